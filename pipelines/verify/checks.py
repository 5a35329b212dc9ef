"""The checks of `cotrain verify` on an engine: greedy text, drafter swaps during generation, and sampled settings."""

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from cotrain.acceptance_stats import counts_of
from cotrain.engine.engine import RolloutEngine
from cotrain.lossless.checks import LOGIT_ERROR, setting_checks
from cotrain.lossless.emitted import Draws, response_draws
from cotrain.lossless.family import CheckResult, Verdict, compare_greedy, judge
from cotrain.lossless.setting import GREEDY, Setting
from cotrain.records import Rollout, RolloutRequest, WeightPayload
from cotrain.run.console import duration
from drafters.base import SamplingParams

Distributions = Callable[[Rollout, SamplingParams], Draws]  # tokens of a response, each under the target's distribution

SECONDS_BETWEEN_SWAPS = 0.05
PERTURBATION = 0.5  # noise on the drafter that takes turns with the real one, in standard deviations of each matrix


@dataclass(frozen=True)
class Plan:
    """What is generated and how it is judged; everything is fixed before the first token."""

    settings: Sequence[Setting]
    prompts: list[list[int]]
    num_speculative_tokens: int  # the longest draft
    response_tokens: int
    tokens: int  # minimum number of response tokens for each sampled setting
    dtype: str
    seed: int
    alpha: float  # false-alarm rate of all checks together


def target_distributions(model: Any, draft_vocabulary: Sequence[int] | None, dtype: str) -> Distributions:
    """Return a function that computes distributions by forward passes of a Hugging Face model in float32.

    draft_vocabulary: target ids that can be drafted; None is all. dtype: the engine's, to which the model's weights were rounded.
    """
    size, drafted = model.get_output_embeddings().weight.shape[0], None
    if draft_vocabulary is not None and len(draft_vocabulary) < size:
        drafted = torch.isin(torch.arange(size), torch.tensor(draft_vocabulary))
    return lambda rollout, sampling: response_draws(
        model, rollout.prompt_token_ids, rollout.token_ids, sampling, drafted, LOGIT_ERROR[dtype]
    )


def perturbed(state: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """The state of another drafter: this one with noise on every matrix."""
    generator = torch.Generator().manual_seed(seed)
    matrices = {name: tensor for name, tensor in state.items() if tensor.dim() == 2 and tensor.is_floating_point()}
    return state | {
        name: matrix + PERTURBATION * matrix.std() * torch.randn(matrix.shape, generator=generator)
        for name, matrix in matrices.items()
    }


@dataclass
class Verifier:
    """Generates on one engine what a plan asks for, and turns the texts into checks."""

    engine: RolloutEngine
    plan: Plan
    distributions: Distributions
    drafters: Sequence[WeightPayload]
    """The engine serves the first one. They take turns in settings that swap drafters; none where it drafts from history."""
    say: Callable[[str], None]
    parts_done: int = 0
    started: float = field(default_factory=time.perf_counter)

    async def verdict(self) -> Verdict:
        """Run all checks and judge them together."""
        return judge([*await self.greedy(), *await self.sampled()], self.plan.alpha)

    async def greedy(self) -> list[CheckResult]:
        """Compare greedy tokens with those of no speculation, for every draft length and while the drafters take turns."""
        number, longest = len(self.plan.prompts), self.plan.num_speculative_tokens
        plain, *steady = [Setting(k, "greedy", (GREEDY,)) for k in range(longest + 1)]
        expected = await self.generate(plain, number)
        self._part_done("greedy, no speculation")
        results: list[CheckResult] = []

        def compare(speculated: list[Rollout], name: str) -> None:
            results.append(compare_greedy(expected, speculated, self.plan.dtype).result(f"greedy, {name}"))
            self._part_done(results[-1].setting, results[-1:])

        for setting in steady:
            compare(await self.generate(setting, number), f"k={setting.num_speculative_tokens}")
        if self.drafters:
            speculated, swaps = await self._disturbed(self.generate(steady[-1], number), [longest])
            compare(speculated, f"k={longest}, {swaps} drafter swaps in mid-generation")
        return results

    async def sampled(self) -> list[CheckResult]:
        """Test the sampled tokens of every setting against the target's distributions."""
        rng, logit_error = np.random.default_rng(self.plan.seed), LOGIT_ERROR[self.plan.dtype]
        results: list[CheckResult] = []
        for number, setting in enumerate(self.plan.settings):
            rollouts = await self._sample(setting, number)
            samplings = [setting.sampling(i) for i in range(len(rollouts))]
            draws = [self.distributions(*pair) for pair in zip(rollouts, samplings, strict=True)]
            checks = setting_checks(rollouts, samplings, draws, str(setting), rng, logit_error)
            self._part_done(str(setting), checks)
            results += checks
        return results

    async def _sample(self, setting: Setting, seed: int) -> list[Rollout]:
        number, longest = math.ceil(self.plan.tokens / self.plan.response_tokens), setting.num_speculative_tokens
        generating = self.generate(setting, number, seed)
        if not setting.unsteady:
            return await generating
        rollouts, _ = await self._disturbed(generating, [*range(longest, -1, -1), *range(1, longest)])
        # Steps with a draft length of 0 are not recorded, so a token's place in its step is not known.
        return [replace(rollout, verification_steps=()) for rollout in rollouts]

    async def generate(self, setting: Setting, number: int, seed: int = 0) -> list[Rollout]:
        """Generate `number` rollouts at the same time, whatever their sampling parameters.

        seed: calls with different numbers give their requests different seeds.
        Raises RuntimeError when the engine did not speculate as the setting says, because that would verify nothing.
        """
        engine, plan, num = self.engine, self.plan, len(setting.samplings)
        await engine.set_num_speculative_tokens(setting.num_speculative_tokens)
        if setting.num_speculative_tokens:
            await engine.set_draft_sample_method(setting.method)
        await engine.reset_prefix_cache()
        first_seed = int(np.random.SeedSequence([plan.seed, seed]).generate_state(1)[0]) % 2**30
        requests = []
        for i in range(number):
            prompt, request_seed = i // num % len(plan.prompts), first_seed + i if setting.is_seeded(i) else None
            requests.append(RolloutRequest(f"prompt-{prompt}", i, plan.prompts[prompt], request_seed))
        generating = []
        for i, s in enumerate(setting.samplings[:number]):
            own: dict[str, Any] = {"temperature": s.temperature, "top_p": s.top_p, "top_k": s.top_k or -1}
            generating.append(engine.generate(requests[i::num], tap=False, max_tokens=plan.response_tokens, **own))
        batches = await asyncio.gather(*generating)
        rollouts = [batches[i % num].rollouts[i // num] for i in range(number)]
        num_drafts = counts_of(rollouts).total()
        if bool(num_drafts) != bool(setting.num_speculative_tokens):
            raise RuntimeError(f"{setting}: the engine verified {num_drafts} drafts: nothing is verified")
        return rollouts

    async def _disturbed(
        self, coroutine: Coroutine[Any, Any, list[Rollout]], lengths: Sequence[int]
    ) -> tuple[list[Rollout], int]:
        """Swap drafters and change draft lengths until the rollouts are done. Returns them and the number of swaps."""
        engine, swaps, generating = self.engine, 0, asyncio.create_task(coroutine)
        try:
            while not generating.done():
                await asyncio.sleep(SECONDS_BETWEEN_SWAPS)
                swaps += 1
                await engine.set_num_speculative_tokens(lengths[swaps % len(lengths)])
                if self.drafters:
                    await engine.update_drafter(self.drafters[swaps % len(self.drafters)], engine.versions.drafter + 1)
        finally:
            generating.cancel()  # without effect once it is done
        if self.drafters:
            await engine.update_drafter(self.drafters[0], engine.versions.drafter + 1)
        return await generating, swaps

    def _part_done(self, what: str, results: Sequence[CheckResult] = ()) -> None:
        """Say which part of the plan is done, its smallest p, and how much time is left."""
        self.parts_done += 1
        parts = self.plan.num_speculative_tokens + 1 + bool(self.drafters) + len(self.plan.settings)
        left = (time.perf_counter() - self.started) * (parts / self.parts_done - 1)
        smallest = f", smallest p {min(result.p for result in results):.2g}" if results else ""
        self.say(f"{self.parts_done}/{parts} {what}{smallest}, about {duration(left, 0)} left")
