"""Errors that end a run, printed without a traceback. They are pickled, so each is made from its message alone."""


class RunFailure(RuntimeError):
    """The run cannot continue; what it has saved is whole."""


class SelfCheckFailed(RunFailure):
    """The hidden states or tokens that the engine returns are not those that the learners expect."""


class TaskFailed(RunFailure):
    """A step cannot be made because a reward function has raised or a prompt does not fit. What is finished can be saved."""
