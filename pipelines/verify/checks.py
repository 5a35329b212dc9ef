"""What `cotrain verify` puts an engine through: greedy text, drafter swaps in mid-generation, sampled settings."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from cotrain.lossless.checks import LOGIT_ERROR, setting_checks
from cotrain.lossless.draws import Draws, members_first
from cotrain.lossless.emitted import response_draws
from cotrain.lossless.family import CheckResult
from cotrain.lossless.greedy import compare_greedy
from cotrain.lossless.setting import GREEDY, Setting
from cotrain.records import Rollout, RolloutRequest, WeightPayload
from cotrain.rollout.acceptance_stats import total_counts
from cotrain.transport.payload import write_payload
from drafters.base import Drafter, SamplingParams

if TYPE_CHECKING:
    from cotrain.rollout.engine import RolloutEngine

Laws = Callable[[Rollout, SamplingParams], Draws]
"""The response tokens of a rollout under the target's laws."""

DRAFT_VOCABULARY = "draft vocabulary"
SECONDS_BETWEEN_SWAPS = 0.05
PERTURBATION = 0.5
"""Noise on the drafter that takes turns with the real one, in standard deviations of each matrix."""


@dataclass(frozen=True)
class Plan:
    """What is generated and how it is judged; everything is fixed before the first token."""

    settings: tuple[Setting, ...]
    num_speculative_tokens: int
    """The longest draft."""
    prompts: list[list[int]]
    response_tokens: int
    tokens: int
    """Fewest of a sampled setting."""
    dtype: str
    seed: int

    @property
    def num_requests(self) -> int:
        """Requests of each sampled setting."""
        return math.ceil(self.tokens / self.response_tokens)


class Progress:
    """Says which part is done, what it found, and how much time is left."""

    def __init__(self, parts: int, say: Callable[[str], None]):
        self._parts, self._say, self._done, self._started = parts, say, 0, time.perf_counter()

    def done(self, what: str, results: Sequence[CheckResult] = ()) -> None:
        """One part of the plan is finished."""
        self._done += 1
        left = round((time.perf_counter() - self._started) * (self._parts / self._done - 1))
        found = f", smallest p {min(result.p for result in results):.2g}" if results else ""
        self._say(f"{self._done}/{self._parts} {what}{found}, about {left // 60}:{left % 60:02d} left")


def target_laws(model: Any, draft_vocabulary: Sequence[int], dtype: str) -> Laws:
    """Laws by forward passes of a Hugging Face model that holds the engine's weights, in float32.

    draft_vocabulary: target ids that can be drafted. dtype: the engine's.
    """
    size = model.get_output_embeddings().weight.shape[0]
    orders: dict[str, Tensor] = {}
    if len(draft_vocabulary) < size:
        orders[DRAFT_VOCABULARY] = members_first(draft_vocabulary, size)

    def laws(rollout: Rollout, sampling: SamplingParams) -> Draws:
        tokens = (rollout.prompt_token_ids, rollout.token_ids)
        return response_draws(model, *tokens, sampling, orders, LOGIT_ERROR[dtype])

    return laws


def two_drafters(drafter: Drafter, plan: Plan, scratch: Path) -> list[WeightPayload]:
    """The drafter, and another one that takes turns with it, in the folder `scratch`."""
    state, dtype = drafter.state_for_serving(), getattr(torch, plan.dtype)
    other = perturbed(state, plan.seed)
    return [
        write_payload(state, scratch / "one.safetensors", dtype),
        write_payload(other, scratch / "other.safetensors", dtype),
    ]


def perturbed(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Another drafter: noise on every matrix."""
    generator = torch.Generator().manual_seed(seed)

    def moved(tensor: Tensor) -> Tensor:
        if tensor.dim() != 2 or not tensor.is_floating_point():
            return tensor
        return tensor + PERTURBATION * tensor.std() * torch.randn(tensor.shape, generator=generator)

    return {name: moved(tensor) for name, tensor in state.items()}


class Verifier:
    """Generates on one engine what a plan asks for, and turns the texts into checks."""

    def __init__(
        self, engine: "RolloutEngine", plan: Plan, laws: Laws, drafters: Sequence[WeightPayload], progress: Progress
    ):
        """The engine serves the first of the drafters; they take turns where drafters are swapped."""
        self._engine, self._plan, self._laws, self._drafters, self._progress = engine, plan, laws, drafters, progress

    async def greedy(self) -> list[CheckResult]:
        """Token identity with no speculation, for every draft length and while the drafters take turns."""
        number, longest = len(self._plan.prompts), self._plan.num_speculative_tokens
        settings = [Setting(k, "greedy", (GREEDY,)) for k in range(longest + 1)]
        plain = await self.generate(settings[0], number)
        self._progress.done("greedy, no speculation")
        results = []
        for setting in settings[1:]:
            results.append(
                self._identity(plain, await self.generate(setting, number), f"k={setting.num_speculative_tokens}")
            )
        speculated, swaps = await self._disturbed(self.generate(settings[-1], number), [longest])
        name = f"k={longest}, {swaps} drafter swaps in mid-generation"
        return [*results, self._identity(plain, speculated, name)]

    async def sampled(self, repeat: int = 0) -> list[CheckResult]:
        """Every setting against the target's laws."""
        rng, results = np.random.default_rng([self._plan.seed, repeat]), []
        for number, setting in enumerate(self._plan.settings):
            rollouts = await self._sample(setting, [repeat, number])
            samplings = [setting.sampling(i) for i in range(len(rollouts))]
            draws = [self._laws(rollout, sampling) for rollout, sampling in zip(rollouts, samplings, strict=True)]
            logit_error = LOGIT_ERROR[self._plan.dtype]
            results.append(setting_checks(rollouts, samplings, draws, str(setting), rng, logit_error))
            self._progress.done(str(setting), results[-1])
        return [result for found in results for result in found]

    async def generate(self, setting: Setting, number: int, seeds: Sequence[int] = ()) -> list[Rollout]:
        """One rollout for each of so many requests; all run side by side, whatever their sampling.

        seeds: what tells this call from others, whose requests must have other seeds.
        Raises RuntimeError when the engine did not speculate as asked, for then nothing would be verified.
        """
        engine, plan, num = self._engine, self._plan, len(setting.samplings)
        await engine.set_num_speculative_tokens(setting.num_speculative_tokens)
        if setting.num_speculative_tokens:
            await engine.set_draft_sample_method(setting.method)
        await engine.reset_prefix_cache()
        first_seed = int(np.random.SeedSequence([plan.seed, *seeds]).generate_state(1)[0]) % 2**30
        requests = []
        for i in range(number):
            prompt, seed = i // num % len(plan.prompts), first_seed + i if setting.is_seeded(i) else None
            requests.append(RolloutRequest(f"prompt-{prompt}", i, plan.prompts[prompt], seed))
        batches = await asyncio.gather(
            *(
                engine.generate(requests[i::num], tap=False, max_tokens=plan.response_tokens, **_parameters(sampling))
                for i, sampling in enumerate(setting.samplings)
                if requests[i::num]
            )
        )
        rollouts = [batches[i % num].rollouts[i // num] for i in range(number)]
        counts = total_counts(rollout.speculation for rollout in rollouts)
        num_drafts = counts.num_drafts if counts else 0
        if bool(num_drafts) != bool(setting.num_speculative_tokens):
            raise RuntimeError(f"asked for {setting}, the engine verified {num_drafts} drafts: nothing is verified")
        return rollouts

    async def _sample(self, setting: Setting, seeds: Sequence[int]) -> list[Rollout]:
        generating, longest = self.generate(setting, self._plan.num_requests, seeds), setting.num_speculative_tokens
        if not setting.unsteady:
            return await generating
        rollouts, _ = await self._disturbed(generating, [*range(longest, -1, -1), *range(1, longest)])
        # Steps with a draft length of 0 are not recorded, so the others do not tell a token's place.
        return [replace(rollout, verification_steps=()) for rollout in rollouts]

    async def _disturbed(
        self, coroutine: Coroutine[Any, Any, list[Rollout]], lengths: Sequence[int]
    ) -> tuple[list[Rollout], int]:
        """Swap drafters and go through draft lengths until the rollouts are there; then serve the first drafter again.

        Returns the rollouts and the number of swaps.
        """
        engine, swaps, generating = self._engine, 0, asyncio.create_task(coroutine)
        try:
            while not generating.done():
                await asyncio.sleep(SECONDS_BETWEEN_SWAPS)
                swaps += 1
                await engine.set_num_speculative_tokens(lengths[swaps % len(lengths)])
                await engine.update_drafter(self._drafters[swaps % len(self._drafters)], engine.versions.drafter + 1)
        finally:
            generating.cancel()  # without effect once it is done
        await engine.update_drafter(self._drafters[0], engine.versions.drafter + 1)
        return await generating, swaps

    def _identity(self, plain: list[Rollout], speculated: list[Rollout], name: str) -> CheckResult:
        result = compare_greedy(plain, speculated, self._plan.dtype).result(f"greedy, {name}")
        self._progress.done(result.setting, [result])
        return result


def _parameters(sampling: SamplingParams) -> dict[str, Any]:
    return {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1}
