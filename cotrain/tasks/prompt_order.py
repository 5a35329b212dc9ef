"""The order in which a run visits its prompts: a function of the seed, resumable within an epoch."""

import random


class PromptOrder:
    """Batches of prompt indices, reshuffled each epoch; no index comes twice in an epoch.

    An epoch's last num_prompts % prompts_per_step indices are left out, so that no batch mixes two epochs and holds
    one prompt twice. The shuffle depends only on (seed, epoch), so that {"epoch", "position"} is the whole state.
    """

    def __init__(self, num_prompts: int, prompts_per_step: int, seed: int) -> None:
        if prompts_per_step > num_prompts:
            raise ValueError(
                f"rollout.prompts_per_step = {prompts_per_step} is more than the {num_prompts} prompts of the task; "
                "lower it, or raise task.size"
            )
        self._num_prompts, self._prompts_per_step, self._seed = num_prompts, prompts_per_step, seed
        self.restore({"epoch": 0, "position": 0})

    def next(self) -> list[int]:
        """Return the indices of the next step's prompts."""
        if self._position + self._prompts_per_step > self._num_prompts:
            self.restore({"epoch": self._epoch + 1, "position": 0})
        batch = self._order[self._position : self._position + self._prompts_per_step]
        self._position += self._prompts_per_step
        return batch

    def state(self) -> dict[str, int]:
        """Return what restore needs: the epoch, and how many of its indices were handed out."""
        return {"epoch": self._epoch, "position": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Continue after the batch at which state() was taken."""
        if not 0 <= state["position"] <= self._num_prompts:
            raise ValueError(f"position {state['position']} lies outside the task's {self._num_prompts} prompts")
        self._epoch, self._position = state["epoch"], state["position"]
        self._order = list(range(self._num_prompts))
        random.Random(f"{self._seed}/{self._epoch}").shuffle(self._order)
