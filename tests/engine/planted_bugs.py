"""Faults of a rejection sampler and of block drafting, planted inside a running vLLM worker and taken out again.

Each replaces one function on the path of vLLM's CPU build: v1/sample/rejection_sampler.py calls its kernels by module
name, and the drafter samples in SpecDecodeBaseProposer._sample_from_logits.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from cotrain.engine.worker_extension import CotrainWorker
from cotrain.lossless.setting import PLAIN, Setting
from drafters.base import SamplingParams

Replace = Callable[[Any, str, Any], None]

PLACEHOLDER = -1
K = 3


class PlantingWorker(CotrainWorker):
    """A worker with bugs on request."""

    def cotrain_plant(self, bug: str | None) -> None:
        """Take out what was planted before, then plant this one; None leaves the worker clean."""
        for owner, name, original in reversed(getattr(self, "_cotrain_planted", [])):
            setattr(owner, name, original)
        self._cotrain_planted: list[tuple[Any, str, Any]] = []

        def replace(owner: Any, name: str, new: Any) -> None:
            self._cotrain_planted.append((owner, name, getattr(owner, name)))
            setattr(owner, name, new)

        if bug is not None:
            (BUGS | BLOCK_BUGS)[bug](self.model_runner, replace)  # type: ignore[attr-defined]


def _sampler_module() -> Any:
    import vllm.v1.sample.rejection_sampler as module

    return module


def draft_temperature_is_not_the_ratios(runner: Any, replace: Replace) -> None:
    """Draft tokens come from half the temperature of the probabilities that verification divides by."""
    original = runner.drafter._sample_from_logits

    def sample(logits: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        ids, probs = original(logits, sampling_metadata)
        return (ids, None) if probs is None else (torch.multinomial(probs.square(), 1).squeeze(1), probs)

    replace(runner.drafter, "_sample_from_logits", sample)


def truncation_keeps_the_draft_token(runner: Any, replace: Replace) -> None:
    """top-k and top-p look at the draft token that was drawn, and spare it."""
    module = _sampler_module()
    constrain, verify = module.apply_sampling_constraints, module.rejection_sample
    scaled: list[Tensor] = []

    def remembering(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        temperature = module.expand_batch_to_tokens(
            sampling_metadata.temperature, cu_num_draft_tokens, logits.shape[0], replace_from=0, replace_to=1
        )
        scaled[:] = [logits / temperature[:, None]]
        return constrain(logits, cu_num_draft_tokens, sampling_metadata)

    def sparing(drafts: Tensor, num: list[int], longest: int, ends: Tensor, probs: Any, logits: Tensor, *rest: Any,
                **options: Any) -> Tensor:  # fmt: skip
        logits = logits.clone()
        rows = torch.arange(len(drafts))
        logits[rows, drafts.long()] = scaled[0][rows, drafts.long()]
        return verify(drafts, num, longest, ends, probs, logits, *rest, **options)

    replace(module, "apply_sampling_constraints", remembering)
    replace(module, "rejection_sample", sparing)


def renormalised_draft_vocabulary(runner: Any, replace: Replace) -> None:
    """The ratio takes the target's probabilities as if the draft vocabulary were all there is."""
    module = _sampler_module()
    original = module._rejection_random_sample
    offsets = runner.drafter.model.draft_id_to_target_id
    inside = offsets + torch.arange(offsets.numel())

    def verify(output: Tensor, ends: Tensor, drafts: Tensor, draft_probs: Any, target: Tensor, *rest: Any) -> None:
        renormalised = torch.zeros_like(target)
        renormalised[:, inside] = target[:, inside]
        renormalised /= renormalised.sum(1, keepdim=True).clamp(min=1e-9)
        original(output, ends, drafts, draft_probs, renormalised, *rest)

    replace(module, "_rejection_random_sample", verify)


def bonus_token_from_the_row_before(runner: Any, replace: Replace) -> None:
    """The bonus token is drawn from the law of the last draft token's position."""
    module = _sampler_module()
    original = module.rejection_sample

    def verify(drafts: Tensor, num: list[int], longest: int, ends: Tensor, probs: Any, logits: Tensor, bonus: Tensor,
               *rest: Any, **options: Any) -> Tensor:  # fmt: skip
        bonus = bonus.clone()
        drafted = torch.tensor(num) > 0
        if drafted.any():
            laws = logits[ends.long()[drafted] - 1].softmax(1)
            bonus[drafted] = torch.multinomial(laws, 1).to(bonus.dtype)
        return original(drafts, num, longest, ends, probs, logits, bonus, *rest, **options)

    replace(module, "rejection_sample", verify)


def accepted_prefix_one_too_long(runner: Any, replace: Replace) -> None:
    """The first rejected draft token is emitted instead of the one that replaces it."""

    def longer(tokens: Tensor, drafts: Tensor) -> None:
        num = int((tokens != PLACEHOLDER).sum())
        if 1 <= num <= len(drafts):
            tokens[num - 1] = drafts[num - 1]

    _change_output(replace, longer)


def accepted_prefix_one_too_short(runner: Any, replace: Replace) -> None:
    """The last accepted draft token is left out, and what should follow it takes its place."""

    def shorter(tokens: Tensor, drafts: Tensor) -> None:
        num = int((tokens != PLACEHOLDER).sum())
        if num >= 2:
            tokens[num - 2] = tokens[num - 1].clone()
            tokens[num - 1] = PLACEHOLDER

    _change_output(replace, shorter)


def _change_output(replace: Replace, change: Callable[[Tensor, Tensor], None]) -> None:
    """change(output row [K+1], draft tokens [k]) of every request with drafts, in place."""
    module = _sampler_module()
    original = module.rejection_sample

    def verify(drafts: Tensor, num: list[int], *rest: Any, **options: Any) -> Tensor:
        output = original(drafts, num, *rest, **options)
        for row, own in zip(output, drafts.split(num), strict=True):
            if len(own):
                change(row, own)
        return output

    replace(module, "rejection_sample", verify)


def vllms_cpu_sampler_bug(runner: Any, replace: Replace) -> None:
    """What cotrain.engine.cpu patches: parameters of draft tokens are written to a temporary and lost."""
    module = _sampler_module()

    def lost(x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
        expanded = x.new_empty(num_tokens)
        module._expand(expanded, x, cu_num_tokens, replace_from, replace_to)
        return expanded

    replace(module, "expand_batch_to_tokens", lost)


def lossy_acceptance(runner: Any, replace: Replace) -> None:
    """Lenient acceptance: with probability min(1, 2 p / q)."""
    module = _sampler_module()
    original = module.generate_uniform_probs
    replace(module, "generate_uniform_probs", lambda *arguments: 0.5 * original(*arguments))


BUGS = {
    "draft temperature is not the ratio's": draft_temperature_is_not_the_ratios,
    "truncation keeps the draft token": truncation_keeps_the_draft_token,
    "renormalised draft vocabulary": renormalised_draft_vocabulary,
    "bonus token from the row before": bonus_token_from_the_row_before,
    "accepted prefix one too long": accepted_prefix_one_too_long,
    "accepted prefix one too short": accepted_prefix_one_too_short,
    "vLLM's CPU sampler bug": vllms_cpu_sampler_bug,
    "lossy acceptance": lossy_acceptance,
}


# ---------------------------------------------------------------------------------------------------------------
# Block drafting
# ---------------------------------------------------------------------------------------------------------------


def draft_probabilities_of_another_slot(runner: Any, replace: Replace) -> None:
    """Verification divides by the probabilities of the draft token before."""
    original = runner.drafter._sample_from_logits

    def sample(logits: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        ids, probs = original(logits, sampling_metadata)
        return ids, None if probs is None else probs.unflatten(0, (-1, K)).roll(1, 1).flatten(0, 1)

    replace(runner.drafter, "_sample_from_logits", sample)


def shifted_block(runner: Any, replace: Replace) -> None:
    """The rows of a block have the positions after theirs."""

    def shift(inputs: Any, drafter: Any) -> Any:
        drafter.positions[: inputs[0]] += 1
        return inputs

    _change_inputs(runner.drafter, replace, shift)


def mask_of_another_position(runner: Any, replace: Replace) -> None:
    """Draft tokens are read from the row before their mask."""
    _change_inputs(runner.drafter, replace, lambda inputs, _: (inputs[0], inputs[1] - 1, inputs[2]))


def stale_context_projection(runner: Any, replace: Replace) -> None:
    """Keys and values of the context are made with the weights of now, whatever is loaded later."""
    drafter = runner.drafter.model.model
    original, stale = drafter._project_context_kv, drafter._fused_kv_weight.clone()

    def project(*arguments: Any) -> Any:
        fresh, drafter._fused_kv_weight = drafter._fused_kv_weight, stale
        try:
            return original(*arguments)
        finally:
            drafter._fused_kv_weight = fresh

    replace(drafter, "_project_context_kv", project)


def _change_inputs(drafter: Any, replace: Replace, change: Callable[[Any, Any], Any]) -> None:
    """change((rows, rows that are read, metadata), drafter) of every pass, which returns the same three."""
    original = drafter.set_inputs_first_pass
    replace(drafter, "set_inputs_first_pass", lambda **inputs: change(original(**inputs), drafter))


BLOCK_BUGS = {
    "draft probabilities of another slot": draft_probabilities_of_another_slot,
    "shifted block": shifted_block,
    "mask of another position": mask_of_another_position,
    "stale context projection": stale_context_projection,
}
"""The first changes the distribution of the text, the others the drafts alone."""

HOT_AND_COLD = (SamplingParams(0.5, 1.0, 0, ""), SamplingParams(1.5, 1.0, 0, ""))
TRUNCATED = (SamplingParams(1.0, 1.0, 5, ""),)

WHERE = {
    "draft temperature is not the ratio's": Setting(K, "probabilistic", (PLAIN,)),
    "truncation keeps the draft token": Setting(K, "probabilistic", TRUNCATED),
    "renormalised draft vocabulary": Setting(K, "probabilistic", (PLAIN,)),
    "bonus token from the row before": Setting(1, "probabilistic", (PLAIN,)),
    "accepted prefix one too long": Setting(K, "probabilistic", (PLAIN,)),
    "accepted prefix one too short": Setting(K, "greedy", (PLAIN,)),
    "vLLM's CPU sampler bug": Setting(K, "greedy", HOT_AND_COLD),
    "lossy acceptance": Setting(K, "probabilistic", (PLAIN,)),
}
"""A setting in which each bug does something."""
