"""What a drafter reaches when the engine serves it, and what `cotrain init` says and writes of it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.records import RolloutRequest, SpeculationCounts, WeightPayload
from cotrain.rollout.engine import RolloutEngine
from cotrain.run.console import duration
from pipelines.initialise.rollouts import StoredRollout

WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 8
SERVED_ROLLOUTS = 128
"""Most rollouts of the served evaluation."""


@dataclass(frozen=True)
class Served:
    """Generation of the same prompts with the drafter and without speculation."""

    counts: SpeculationCounts
    num_rollouts: int
    tokens_per_s: float
    tokens_per_s_without: float

    @property
    def acceptance_rates(self) -> list[float]:
        """[K] share of verification steps that accepted a draft position and all before it."""
        return [accepted / self.counts.num_drafts for accepted in self.counts.accepted_per_position]

    def to_json(self) -> dict[str, Any]:
        """As it stands in init.json."""
        return {
            "acceptance_length": self.counts.acceptance_length,
            "acceptance_rates": self.acceptance_rates,
            "num_drafts": self.counts.num_drafts,
            "num_rollouts": self.num_rollouts,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_without": self.tokens_per_s_without,
        }


async def serve(engine: RolloutEngine, payload: WeightPayload, drafter_version: int) -> None:
    """Send a drafter and read it back whole. Raises RuntimeError naming tensors that are not served as sent."""
    await engine.update_drafter(payload, drafter_version)
    served = await engine.served_digests(sorted(payload.digests), draft=True)
    differing = [name for name, digest in payload.digests.items() if served[name] != digest]
    if differing:
        raise RuntimeError(f"the engine serves other drafter weights than were trained: {', '.join(differing)}")


def served_requests(holdout: Sequence[StoredRollout], config: RunConfig) -> list[RolloutRequest]:
    """The held-out prompts, and as many samples of each as SERVED_ROLLOUTS allows."""
    prompts = {tuple(r.prompt_token_ids): r.prompt_id for r in holdout}
    samples = min(config.rollout.samples_per_prompt, max(1, SERVED_ROLLOUTS // len(prompts)))
    return [
        RolloutRequest(prompt_id, sample, list(ids), config.seed + number * samples + sample)
        for number, (ids, prompt_id) in enumerate(list(prompts.items())[:SERVED_ROLLOUTS])
        for sample in range(samples)
    ]


async def measure_served(engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> Served:
    """Generate with the sampling of [rollout], once with its draft length and once without speculation."""
    rollout = engine.spec.rollout
    if rollout.draft_sample_method == "probabilistic":
        requests = [replace(request, seed=None) for request in requests]  # vLLM has no seeds for such drafts
    batches = []
    for num_speculative_tokens in (rollout.num_speculative_tokens, 0):
        await engine.set_num_speculative_tokens(num_speculative_tokens)
        await engine.generate(list(requests[:WARM_UP_REQUESTS]), tap=False, max_tokens=WARM_UP_TOKENS)
        await engine.reset_prefix_cache()
        batches.append(await engine.generate(list(requests), tap=False))
    drafted, plain = batches
    if drafted.speculation is None or not drafted.speculation.num_drafts:
        raise RuntimeError("the engine drafted nothing; every response ended with its first token")
    return Served(
        counts=drafted.speculation,
        num_rollouts=len(requests),
        tokens_per_s=drafted.num_generated_tokens / drafted.seconds,
        tokens_per_s_without=plain.num_generated_tokens / plain.seconds,
    )


def summary(figures: dict[str, Any], config: RunConfig, folder: Path) -> list[str]:
    """What init.json holds, for somebody who has not seen one before."""
    served, k = figures["served"], config.rollout.num_speculative_tokens
    lines = [
        f"Done: a drafter for {config.policy.model} from {figures['response_tokens']:,} response tokens in "
        f"{duration(figures['seconds'])}",
        "",
        f"  data         {figures['training_rollouts']:,} rollouts trained on, {figures['holdout_rollouts']:,} held out "
        f"(source {figures['source']['type']}, fingerprint {figures['data_fingerprint']})",
        f"  vocabulary   covers {figures['vocabulary_coverage']:.2%} of the held-out response tokens",
        f"  training     {figures['updates']} of {figures['planned_updates']} updates, best after "
        f"{figures['best_update']}",
        f"  acceptance   expected {figures['expected_acceptance_length']:.3f}, served "
        f"{served['acceptance_length']:.3f}   (tokens per verification step at k = {k}, "
        f"{config.rollout.draft_sample_method}; 1 is no gain, {k + 1} the most)",
    ]
    for name, rates in (
        ("expected", figures["expected_acceptance_rates"]),
        ("served", served["acceptance_rates"]),
    ):
        listed = "  ".join(f"{position}: {rate:.3f}" for position, rate in enumerate(rates, start=1))
        lines.append(f"  {name:<12} {listed}   (share of steps that accept draft position 1 to k)")
    speed, plain = served["tokens_per_s"], served["tokens_per_s_without"]
    at_once = min(config.rollout.rollouts_per_step, served["num_rollouts"])
    lines += [
        f"  speed        {speed:,.0f} tok/s, {plain:,.0f} without speculation: {speed / plain:.2f} times, {at_once} "
        "requests at once, one run each; `cotrain bench` measures it well",
        "",
        f"  drafter      {folder}; serves in stock vLLM as it is",
    ]
    if figures["registered_version"] is not None:
        lines.append(f"  registered   models:/{figures['registered_model']}/{figures['registered_version']} in MLflow")
    return [
        *lines,
        "",
        "Next:",
        f"  train with it       cotrain train CONFIG drafter.init={folder}",
        f"  measure its speed   cotrain bench --model {config.policy.model} --drafter {folder}",
    ]
