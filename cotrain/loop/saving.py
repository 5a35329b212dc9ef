"""Checkpoints, which the roles write while the run goes on.

A role makes its calls in order. So it saves the state that it has when the controller asks for it, although it writes while the
engines generate the next step. Nothing has to be copied, and only a call that the same role gets meanwhile waits.
"""

import time
from contextlib import ExitStack
from typing import Any

from cotrain.actors.engines import HISTORY
from cotrain.actors.learner import Learner
from cotrain.config.schema import RunConfig
from cotrain.loop.roles import Roles
from cotrain.policy.learner import PolicyLearner
from cotrain.process.calls import Reply
from cotrain.run.checkpoint import RunState, new_checkpoint
from cotrain.run.run_dir import RunDir
from cotrain.trainer.trainer import DrafterTrainer

Part = tuple[Learner[Any], list[Reply[None]]]  # a role that saves, and its call


class Checkpoints:
    """Writes the checkpoints of a run, one after the other."""

    def __init__(self, config: RunConfig, run_dir: RunDir, roles: Roles):
        self._config, self._run_dir, self._roles = config, run_dir, roles
        self._open = ExitStack()  # the folder that is being written, if there is one
        self._parts: list[Part] = []
        self._began, self._seconds = 0.0, dict[str, float]()

    def try_out(self, state: RunState) -> None:
        """Save without tensors and delete it again, so that what cannot be saved shows before the first step."""
        self.begin(state, trial=True)
        self.finish()
        self._seconds = {}

    def begin(self, state: RunState, trial: bool = False) -> None:
        """Let the roles save, once the checkpoint before is whole. trial: without tensors, and see new_checkpoint.

        Every checkpoint.every steps, the drafter's features of earlier policy versions are dropped first, with which the checkpoint
        would need a target head of each. In between, a run that is stopped loses nothing.
        """
        self.finish()
        self._began = time.perf_counter()
        policy, drafter = self._roles.policy, self._roles.drafter
        with ExitStack() as stack:
            folder = stack.enter_context(new_checkpoint(self._run_dir, state, self._config.checkpoint.keep_last, trial))
            parts: list[Part] = [(policy, policy.begin(PolicyLearner.save, folder / "policy", not trial))]
            if drafter is not None and not trial:  # the first drafter has been saved into the run folder
                if state.step % self._config.checkpoint.every == 0:
                    drafter.begin(DrafterTrainer.drop_earlier_versions)
                parts.append((drafter, drafter.begin(DrafterTrainer.save, folder / "drafter")))
            if self._config.rollout.history is not None:
                self._roles.engines.save_history(folder / HISTORY)
            self._parts, self._open = parts, stack.pop_all()

    def poll(self) -> None:
        """Make the checkpoint whole if the roles have written their parts."""
        if all(self._roles.reactor.is_there(call.reference) for _, calls in self._parts for call in calls):
            self.finish()

    def wait(self) -> None:
        """Wait until the roles have written their parts. Raises what a role raised."""
        for role, calls in self._parts:
            role.finish(calls)

    def finish(self) -> None:
        """Wait, and make the checkpoint whole if there is one. Raises as `wait` does, or OSError naming the fix for a full disk."""
        if not self._parts:
            return
        try:
            with self._open.pop_all():  # which discards the checkpoint if a role could not save
                self.wait()
        finally:
            self._parts = []
        self._seconds = {"time/checkpoint_written_s": time.perf_counter() - self._began}

    def metrics(self) -> dict[str, float]:
        """Return once how long it took until the last checkpoint was whole, most of it beside the run."""
        seconds, self._seconds = self._seconds, {}
        return seconds
