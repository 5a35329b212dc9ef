"""What `cotrain verify` puts an engine through: greedy identity, drafter swaps in mid-generation, sampled settings."""

import asyncio
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cotrain.lossless.draws import Draws, members_first
from cotrain.lossless.emitted import LOGIT_ERROR, response_draws, setting_checks
from cotrain.lossless.family import CheckResult
from cotrain.lossless.greedy_check import TIE_GAP
from cotrain.lossless.identity import compare_texts
from cotrain.lossless.power import permutations_for_level
from cotrain.lossless.setting import GREEDY, Setting
from cotrain.lossless.two_sample import two_sample_check
from cotrain.records import Rollout, RolloutRequest, WeightPayload
from cotrain.rollout.acceptance_stats import total_counts
from drafters.base import Sampler

if TYPE_CHECKING:
    from cotrain.rollout.engine import RolloutEngine

Laws = Callable[[Rollout, Sampler], Draws]
"""The response tokens of a rollout under the target's laws."""

DRAFT_VOCABULARY = "draft vocabulary"
TWO_SAMPLE_PROMPTS = 4
SECONDS_BETWEEN_SWAPS = 0.05
PERTURBATION = 0.5
"""Noise on the drafter that takes turns with the real one, in standard deviations of each matrix."""


@dataclass(frozen=True)
class Plan:
    """What is generated and how it is judged; everything is fixed before the first token."""

    settings: tuple[Setting, ...]
    draft_tokens: int
    """K: the longest draft."""
    prompts: list[list[int]]
    response_tokens: int
    tokens: int
    """Of each sampled setting, at least."""
    num_texts: int
    """Of each arm of a two-sample check."""
    exact: bool
    """Compare with the target's own laws; otherwise with text sampled without speculation."""
    level: float
    """p-value at which a check is sure to fail."""
    dtype: str
    seed: int

    @property
    def num_requests(self) -> int:
        """Of each sampled setting: as many with every sampler, seeded and unseeded."""
        return math.ceil(self.tokens / self.response_tokens)

    @property
    def text_tokens(self) -> int:
        """Tokens of a two-sample text: the one of the prefill, and a whole verification step."""
        return self.draft_tokens + 2

    @property
    def num_greedy_tokens(self) -> int:
        """Generated for the greedy checks."""
        return (self.draft_tokens + 2) * len(self.prompts) * self.response_tokens

    @property
    def num_sampled_tokens(self) -> int:
        """Generated for the sampled checks."""
        arms = 2 * self.num_texts * self.text_tokens
        if self.exact:
            return len(self.settings) * self.num_requests * self.response_tokens + arms
        return arms * len(self.two_sample_settings)

    @property
    def two_sample_settings(self) -> list[Setting]:
        """Compared with no speculation when there are no laws; such texts are too short for anything to change."""
        return [setting for setting in self.settings if setting.draft_tokens and not setting.unsteady]


class Progress:
    """Lines with the time left, from the tokens done so far."""

    def __init__(self, total_tokens: int, say: Callable[[str], None]):
        self._total, self._say = total_tokens, say
        self._done = 0
        self._started = time.perf_counter()

    def done(self, what: str, tokens: int, verdict: str = "") -> None:
        """One part of the plan is finished."""
        self._done += tokens
        seconds = time.perf_counter() - self._started
        left = max(0, round(seconds * (self._total / self._done - 1)))
        self._say(f"{what}: {tokens} tokens{verdict}, about {left // 60}:{left % 60:02d} left")


def target_laws(model: Any, draft_vocabulary: Sequence[int] | None, dtype: str) -> Laws:
    """Laws by forward passes of a Hugging Face model that holds the engine's weights, in float32."""
    size = model.get_output_embeddings().weight.shape[0]
    orders: dict[str, Tensor] = {}
    if draft_vocabulary is not None and len(draft_vocabulary) < size:
        orders[DRAFT_VOCABULARY] = members_first(draft_vocabulary, size)

    def laws(rollout: Rollout, sampler: Sampler) -> Draws:
        tokens = (rollout.prompt_token_ids, rollout.token_ids)
        return response_draws(model, *tokens, sampler, orders, LOGIT_ERROR[dtype])

    return laws


def perturbed(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Another drafter: noise on every matrix."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        if tensor.dim() != 2 or not tensor.is_floating_point():
            return tensor
        return tensor + PERTURBATION * tensor.std() * torch.randn(tensor.shape, generator=generator)

    return {name: moved(tensor) for name, tensor in state.items()}


# ---------------------------------------------------------------------------------------------------------------
# Greedy
# ---------------------------------------------------------------------------------------------------------------


async def greedy_checks(
    engine: "RolloutEngine", plan: Plan, drafters: Sequence[WeightPayload], progress: Progress
) -> list[CheckResult]:
    """Token identity with no speculation: for every draft length, and while the given drafters take turns.

    The first of them is served afterwards.
    """
    tokens = len(plan.prompts) * plan.response_tokens
    plain = await _greedy(engine, plan, 0)
    progress.done("greedy, no speculation", tokens)
    results = []
    for k in range(1, plan.draft_tokens + 1):
        speculated = await _greedy(engine, plan, k)
        results.append(_identity(plain, speculated, plan, f"greedy, k={k}"))
        progress.done(f"greedy, k={k}", tokens, _short(results[-1:]))
    generating = asyncio.create_task(_greedy(engine, plan, plan.draft_tokens))
    swaps = await _disturb(engine, generating, drafters, [plan.draft_tokens])
    speculated = await generating
    name = f"greedy, k={plan.draft_tokens}, {swaps} drafter swaps in mid-generation"
    results.append(_identity(plain, speculated, plan, name))
    progress.done(name, tokens, _short(results[-1:]))
    return results


async def _disturb(
    engine: "RolloutEngine", generating: asyncio.Task[Any], drafters: Sequence[WeightPayload], lengths: Sequence[int]
) -> int:
    """Swap drafters and go through draft lengths until the task is done. Number of swaps; the first is served again."""
    swaps = 0
    try:
        while not generating.done():
            await asyncio.sleep(SECONDS_BETWEEN_SWAPS)
            swaps += 1
            await engine.set_draft_tokens(lengths[swaps % len(lengths)])
            await engine.update_drafter(drafters[swaps % len(drafters)], engine.versions.drafter + 1)
    except BaseException:
        generating.cancel()
        raise
    await engine.update_drafter(drafters[0], engine.versions.drafter + 1)
    return swaps


async def _greedy(engine: "RolloutEngine", plan: Plan, k: int) -> list[Rollout]:
    return await generate(engine, plan, Setting(k, "greedy", (GREEDY,)), len(plan.prompts), plan.response_tokens, 0)


def _identity(plain: list[Rollout], speculated: list[Rollout], plan: Plan, name: str) -> CheckResult:
    gap = TIE_GAP[plan.dtype]

    def is_tie(prompt: int, position: int) -> bool:
        """Each arm emits its argmax: tied tokens have equal probabilities, so at most 1/2 each."""
        p, q = plain[prompt].log_probs[position], speculated[prompt].log_probs[position]
        return abs(p - q) <= gap and max(p, q) <= math.log(0.5) + gap

    texts = ([r.token_ids for r in plain], [r.token_ids for r in speculated])
    return compare_texts(*texts, is_tie).result(name)


# ---------------------------------------------------------------------------------------------------------------
# Sampled
# ---------------------------------------------------------------------------------------------------------------


async def sampled_checks(
    engine: "RolloutEngine",
    plan: Plan,
    laws: Laws,
    drafters: Sequence[WeightPayload],
    rng: np.random.Generator,
    progress: Progress,
    repeat: int = 0,
) -> list[CheckResult]:
    """Every setting against the target's laws, and one against text sampled without speculation.

    drafters take turns in unsteady settings.
    """
    results: list[CheckResult] = []
    for number, setting in enumerate(plan.settings, 1):
        rollouts = await _sampled(engine, plan, setting, drafters, _first_seed(plan, repeat, number))
        samplers = [setting.sampler(i) for i in range(len(rollouts))]
        draws = [laws(rollout, sampler) for rollout, sampler in zip(rollouts, samplers, strict=True)]
        found = setting_checks(rollouts, samplers, draws, str(setting), rng, LOGIT_ERROR[plan.dtype])
        results += found
        title = f"setting {number}/{len(plan.settings)}, {setting}"
        progress.done(title, sum(map(len, draws)), _short(found))
    last = next(s for s in reversed(plan.settings) if s.draft_tokens)
    setting = replace(last, samplers=plan.settings[0].samplers, seeding="unseeded", unsteady=False)
    return [*results, await _against_plain_text(engine, plan, setting, rng, progress, repeat, len(plan.settings) + 1)]


async def _sampled(
    engine: "RolloutEngine", plan: Plan, setting: Setting, drafters: Sequence[WeightPayload], first_seed: int
) -> list[Rollout]:
    coroutine = generate(engine, plan, setting, plan.num_requests, plan.response_tokens, first_seed)
    if not setting.unsteady:
        return await coroutine
    generating = asyncio.create_task(coroutine)
    longest = setting.draft_tokens
    await _disturb(engine, generating, drafters, [*range(longest, -1, -1), *range(1, longest)])
    return [replace(rollout, verification_steps=()) for rollout in await generating]


async def two_sample_checks(
    engine: "RolloutEngine", plan: Plan, rng: np.random.Generator, progress: Progress, repeat: int = 0
) -> list[CheckResult]:
    """Every setting against text sampled without speculation; for targets too large for a forward pass here."""
    return [
        await _against_plain_text(engine, plan, setting, rng, progress, repeat, number)
        for number, setting in enumerate(plan.two_sample_settings, 1)
    ]


async def _against_plain_text(
    engine: "RolloutEngine",
    plan: Plan,
    setting: Setting,
    rng: np.random.Generator,
    progress: Progress,
    repeat: int,
    number: int,
) -> CheckResult:
    short = replace(plan, prompts=plan.prompts[:TWO_SAMPLE_PROMPTS])
    first_seed = _first_seed(plan, repeat, number)
    arms = []
    for arm in (setting, replace(setting, draft_tokens=0)):
        rollouts = await generate(engine, short, arm, plan.num_texts, plan.text_tokens, first_seed)
        first_seed += plan.num_texts  # the same seeds would make the arms dependent
        arms.append(_texts(rollouts, setting, len(short.prompts)))
    speculated, plain = arms
    name = f"{setting}, against no speculation"
    permutations = permutations_for_level(plan.level)
    result = two_sample_check(speculated, plain, name, rng, plan.text_tokens, permutations=permutations)
    progress.done(name, 2 * plan.num_texts * plan.text_tokens, _short([result]))
    return result


def _texts(rollouts: list[Rollout], setting: Setting, num_prompts: int) -> list[list[list[int]]]:
    """[prompt and sampler][sample][token]: only texts of one law are exchangeable."""
    groups: dict[tuple[int, int], list[list[int]]] = {}
    for i, rollout in enumerate(rollouts):
        num = len(setting.samplers)
        groups.setdefault((i // num % num_prompts, i % num), []).append(rollout.token_ids)
    return [groups[key] for key in sorted(groups)]


# ---------------------------------------------------------------------------------------------------------------
# Generating
# ---------------------------------------------------------------------------------------------------------------


async def generate(
    engine: "RolloutEngine", plan: Plan, setting: Setting, number: int, tokens: int, first_seed: int
) -> list[Rollout]:
    """One rollout of so many tokens for each of so many requests; all run side by side, whatever their sampler.

    Raises RuntimeError when the engine did not speculate as asked, for then nothing would be verified.
    """
    await engine.set_draft_tokens(setting.draft_tokens)
    if setting.draft_tokens:
        await engine.set_draft_sample_method(setting.method)
    await engine.reset_prefix_cache()
    requests = [_request(plan, setting, i, first_seed + i) for i in range(number)]
    num = len(setting.samplers)
    batches = await asyncio.gather(
        *(
            engine.generate(requests[i::num], tap=False, max_tokens=tokens, **_parameters(sampler))
            for i, sampler in enumerate(setting.samplers)
            if requests[i::num]
        )
    )
    rollouts = [batches[i % num].rollouts[i // num] for i in range(number)]
    _check_speculation(rollouts, setting)
    return rollouts


def _request(plan: Plan, setting: Setting, i: int, seed: int) -> RolloutRequest:
    prompt = i // len(setting.samplers) % len(plan.prompts)
    return RolloutRequest(f"prompt-{prompt}", i, plan.prompts[prompt], seed if setting.is_seeded(i) else None)


def _parameters(sampler: Sampler) -> dict[str, Any]:
    return {"temperature": sampler.temperature, "top_p": sampler.top_p, "top_k": sampler.top_k or -1}


def _check_speculation(rollouts: list[Rollout], setting: Setting) -> None:
    counts = total_counts(rollout.speculation for rollout in rollouts)
    num_drafts = counts.num_drafts if counts else 0
    if bool(num_drafts) != bool(setting.draft_tokens):
        raise RuntimeError(
            f"asked for {setting}, the engine verified drafts in {num_drafts} steps: nothing is verified"
        )
    if num_drafts and not any(rollout.verification_steps for rollout in rollouts):
        raise RuntimeError("the engine does not record verification steps: per_request_spec_decode_metrics='detailed'")


def _first_seed(plan: Plan, repeat: int, number: int) -> int:
    """Seeds of their own for every request of every repeat, below 2^31."""
    key = np.random.SeedSequence([plan.seed, repeat, number]).generate_state(1)[0]
    return int(key) % 2**30


def _short(results: list[CheckResult]) -> str:
    return f", smallest p {min(result.p for result in results):.2g}"
