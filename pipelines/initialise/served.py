"""What a drafter reaches when the engine serves it, beside the same prompts without speculation."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from cotrain.records import RolloutRequest, SpeculationCounts, WeightPayload
from cotrain.rollout.engine import RolloutEngine

WARM_UP_REQUESTS, WARM_UP_TOKENS = 4, 8


@dataclass(frozen=True)
class Served:
    """Measured on the engine."""

    acceptance_length: float
    acceptance_rates: list[float]
    """By draft position: share of verification steps that accepted it and all before it."""
    num_drafts: int
    num_rollouts: int
    tokens_per_s: float
    tokens_per_s_without: float
    """Of the same prompts at draft length 0."""

    @property
    def counts(self) -> SpeculationCounts:
        """All verification steps had as many draft tokens as there are rates."""
        most = len(self.acceptance_rates)
        accepted = tuple(round(rate * self.num_drafts) for rate in self.acceptance_rates)
        return SpeculationCounts((0,) * (most - 1) + (self.num_drafts,), ((0,) * most,) * (most - 1) + (accepted,))

    @property
    def speedup(self) -> float:
        """At this number of requests at once."""
        return self.tokens_per_s / self.tokens_per_s_without


async def serve(engine: RolloutEngine, payload: WeightPayload, drafter_version: int) -> dict[str, str]:
    """Send a drafter and read it back whole; blake2b of each tensor as it is served.

    Raises RuntimeError naming tensors that are not served as sent."""
    await engine.update_drafter(payload, drafter_version)
    served = await engine.served_digests(sorted(payload.digests), draft=True)
    differing = [name for name, digest in payload.digests.items() if served[name] != digest]
    if differing:
        raise RuntimeError(f"the engine serves other drafter weights than were trained: {', '.join(differing)}")
    return served


async def measure_served(engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> Served:
    """Generate with rollout's sampling, once with its draft length and once without speculation."""
    rollout = engine.spec.rollout
    if rollout.draft_sample_method == "probabilistic":
        requests = [replace(request, seed=None) for request in requests]  # vLLM has no seeds for such drafts
    batches = {}
    for draft_tokens in (rollout.draft_tokens, 0):
        await engine.set_draft_tokens(draft_tokens)
        await engine.generate(list(requests[:WARM_UP_REQUESTS]), tap=False, max_tokens=WARM_UP_TOKENS)
        await engine.reset_prefix_cache()
        batches[draft_tokens] = await engine.generate(list(requests), tap=False)
    drafted, plain = batches[rollout.draft_tokens], batches[0]
    counts = drafted.speculation
    if counts is None or not counts.num_drafts:
        raise RuntimeError("the engine drafted nothing; every response ended with its first token")
    rates = [accepted / counts.num_drafts for accepted in counts.accepted_per_position[: rollout.draft_tokens]]
    return Served(
        acceptance_length=counts.acceptance_length,
        acceptance_rates=rates,
        num_drafts=counts.num_drafts,
        num_rollouts=len(requests),
        tokens_per_s=drafted.num_generated_tokens / drafted.seconds,
        tokens_per_s_without=plain.num_generated_tokens / plain.seconds,
    )
