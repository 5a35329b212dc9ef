"""A hook into the drafting of vLLM's model runner V2, its default on GPUs: it feeds the tap, and keeps the draft length.

It is what hooks.py has for the V1 runner. V2 gives its speculator all rows of a step and all hidden states before it drafts.
"""

import inspect
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cotrain.engine.hooks import TapHook
from cotrain.engine.interface import SPECULATOR_TAKES

LENGTH = "num_speculative_tokens"  # the argument that passes a step's draft length to the speculator, since vLLM 0.32


class SpeculatorHook(TapHook):
    """Replaces the speculator's `propose`, and corrects what the runner tells the scheduler about its drafts.

    For draft length 0, V2 still runs the drafter's first pass, which keeps the drafter's KV cache complete. That pass is
    left out unless speculation may come back in the middle of a request (`reads_prompts`).
    """

    def __init__(self, model_runner: Any, *options: Any):
        """Raise ValueError, and touch nothing, when this runner is not as we know it."""
        super().__init__(model_runner, *options)
        speculator = model_runner.speculator
        own_states = getattr(model_runner.get_model(), "get_mtp_target_hidden_states", None)
        takes = [*inspect.signature(speculator.propose).parameters]
        if takes[: len(SPECULATOR_TAKES)] != SPECULATOR_TAKES:
            raise ValueError(f"{type(speculator).__name__}.propose takes ({' '.join(takes)})")
        if own_states is not None and own_states() is not None:
            raise ValueError("its drafter gets other hidden states than its head; set VLLM_USE_V2_MODEL_RUNNER=0")
        self._speculator, self._propose = speculator, speculator.propose
        self._draft_logits = self._drawn_from = getattr(speculator, "draft_logits", None)
        self._takes_length = LENGTH in takes
        self._take_draft_token_ids, self._has_drafted = model_runner.take_draft_token_ids, True
        model_runner.take_draft_token_ids = self.take_draft_token_ids
        speculator.propose = self.draft

    def draft(self, *args: Any, **options: Any) -> Any:
        """Take the place of the speculator's `propose`. Dummy runs still go to vLLM's own."""
        self._has_drafted = True
        return self._propose(*args, **options) if options.get("dummy_run") else super().draft(*args, **options)

    def propose(
        self, input_batch: Any, attn_metadata: Any, slot_mappings: Any, hidden: Tensor, aux_hidden: Any, *rest: Any,
        **options: Any,
    ) -> Any:  # fmt: skip
        """Stand in for the speculator's propose. Returns draft tokens [R, most draft tokens]."""
        if self.tap.requests:
            self._guard(self.record, [*(aux_hidden or ()), hidden], input_batch)
        length = options.get(LENGTH, self.draft_length)
        if length == 0 and not self.reads_prompts:
            return self.no_drafts(input_batch)
        self._speculator.draft_logits = self._drawn_from  # the drafts of the step before have been verified
        if self._drawn_from is not self._draft_logits:  # CUDA graphs go on drawing, where a temperature is above 0
            rest = (*rest[:4], torch.zeros_like(rest[4]), *rest[5:])
        most = self._speculator.num_speculative_steps
        if length is not None and not self._takes_length:
            # At least one token, because that pass keeps the KV cache complete. The scheduler leaves out the rest.
            self._speculator.num_speculative_steps = max(1, length)
        try:
            return self._propose(input_batch, attn_metadata, slot_mappings, hidden, aux_hidden, *rest, **options)
        finally:
            self._speculator.num_speculative_steps = most

    def set_draws(self, draws: bool) -> None:
        """Draw draft tokens from the next step on, or take the likeliest. Raises ValueError in an engine that cannot draw."""
        if draws and self._draft_logits is None:
            raise ValueError('rollout.draft_sample_method: V2 draws drafts only if it starts with "probabilistic"')
        self._drawn_from = self._draft_logits if draws else None

    def no_drafts(self, input_batch: Any, *rest: Any, **options: Any) -> Tensor:
        """Return zeros that the runner takes for drafts, [R, most draft tokens]. The scheduler is not told of them."""
        self._has_drafted = False
        shape = input_batch.num_reqs, self._speculator.num_speculative_steps
        return torch.zeros(shape, dtype=torch.long, device=input_batch.input_ids.device)

    def take_draft_token_ids(self) -> Any:
        """Replace the runner's method: return what the scheduler is told about the drafts. Verified tokens stay on the device."""
        drafts = self._take_draft_token_ids()
        if drafts is not None and not self._has_drafted:
            drafts.draft_token_ids = [[] for _ in drafts.draft_token_ids]
        return drafts

    def _layout(self, batch: Any) -> tuple[list[str], np.ndarray, Tensor, Tensor]:
        """Read V2's InputBatch, whose rows of padding come last."""
        starts = batch.query_start_loc_np[: batch.num_reqs + 1]
        if starts[-1] != batch.num_tokens:  # adaptive verification has left out drafts, and only the device knows which
            starts = batch.query_start_loc[: batch.num_reqs + 1].numpy(force=True)
        return batch.req_ids, starts, batch.positions, batch.input_ids
