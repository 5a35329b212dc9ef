"""What a drafter reaches when the engine serves it, and what `cotrain init` says of it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from cotrain.config.schema import RunConfig
from cotrain.records import RolloutRequest, SpeculationCounts, WeightPayload
from cotrain.rollout.engine import RolloutEngine
from cotrain.run.console import duration
from pipelines.initialise.rollouts import StoredRollout

SERVED_ROLLOUTS = 128
"""Most rollouts of the served evaluation."""


async def serve(engine: RolloutEngine, payload: WeightPayload, drafter_version: int) -> None:
    """Send a drafter and read it back whole. Raises RuntimeError naming tensors that are not served as sent."""
    await engine.update_drafter(payload, drafter_version)
    served = await engine.served_digests(sorted(payload.digests), draft=True)
    if differing := [name for name, digest in payload.digests.items() if served[name] != digest]:
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


async def measure_served(engine: RolloutEngine, requests: Sequence[RolloutRequest]) -> SpeculationCounts:
    """Generate with the sampling and the draft length of [rollout]."""
    rollout = engine.spec.rollout
    if rollout.draft_sample_method == "probabilistic":
        requests = [replace(request, seed=None) for request in requests]  # vLLM has no seeds for such drafts
    await engine.set_num_speculative_tokens(rollout.num_speculative_tokens)
    await engine.reset_prefix_cache()  # what was cached without speculation has no drafter KV
    counts = (await engine.generate(list(requests), tap=False)).speculation
    if counts is None or not counts.num_drafts:
        raise RuntimeError("the engine drafted nothing; every response ended with its first token")
    return counts


def summary(figures: dict[str, Any], config: RunConfig, folder: Path) -> str:
    """What init.json holds, for somebody who has not seen one before."""
    served, k = figures["served"], config.rollout.num_speculative_tokens
    expected_rates, served_rates = (
        "  ".join(f"{position}: {rate:.3f}" for position, rate in enumerate(rates, start=1))
        for rates in (figures["expected_acceptance_rates"], served["acceptance_rates"])
    )
    registered = f"models:/{figures['registered_model']}/{figures['registered_version']} in MLflow"
    return f"""
Done: a drafter for {config.policy.model} from {figures["response_tokens"]:,} response tokens in \
{duration(figures["seconds"])}

  data         {figures["training_rollouts"]:,} rollouts trained on, {figures["holdout_rollouts"]:,} held out \
(source {figures["source"]["type"]}, fingerprint {figures["data_fingerprint"]})
  vocabulary   covers {figures["vocabulary_coverage"]:.2%} of the held-out response tokens
  training     {figures["updates"]} of {figures["planned_updates"]} updates, best after {figures["best_update"]}
  acceptance   expected {figures["expected_acceptance_length"]:.3f}, served {served["acceptance_length"]:.3f}   \
(tokens per verification step at k = {k}, {config.rollout.draft_sample_method}; 1 is no gain, {k + 1} the most)
  expected     {expected_rates}   (share of steps that accept draft position 1 to k)
  served       {served_rates}

  drafter      {folder}; serves in stock vLLM as it is
  registered   {registered if figures["registered_version"] is not None else "no, MLflow has not answered yet"}

Next:
  train with it       cotrain train CONFIG drafter.init={folder}
  measure its speed   cotrain bench --model {config.policy.model} --drafter {folder}"""
