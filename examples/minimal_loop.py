"""A minimal joint loop: a policy and its drafter trained together, on cotrain's own parts.

    python examples/minimal_loop.py configs/quickstart.toml steps=6

It takes the configuration of `cotrain train`. One process drives one vLLM engine. There is no Ray, no resume, no restart, no
lag, no canary, no alarm and no MLflow: cotrain/loop/controller.py has these. One step:

      prompts --> engine.generate --> rewards, advantages --> learner.update --> engine.update_policy
                        |                                                              |
                        +-- hidden states --> trainer.take_in --> judge --> engine.update_drafter
                                              trainer.train                            |
                                                    ^---- embedding and head ----------+

| call              | waits for                   | why in this place                                                          |
|-------------------|-----------------------------|----------------------------------------------------------------------------|
| trainer.take_in   | hidden states of the step   | scores both drafters before either is trained on these rollouts (held out) |
| judge             | the scores                  | publishes what was scored, before it changes                               |
| trainer.train     | the decision                | the rollouts are training data from here on                                |
| learner.update    | rewards                     | could run beside the three above, as it does in a run                      |
| set_target_weights| learner.update              | the trainer knows a policy's head before features of that policy arrive    |
"""

import asyncio
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import torch

from cotrain.config.load import load_config
from cotrain.config.schema import RunConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.engine import RolloutEngine
from cotrain.lossless.family import compare_greedy
from cotrain.models.loading import resolve_model
from cotrain.policy.learner import PolicyLearner
from cotrain.policy.losses import group_advantages
from cotrain.process.scratch import scratch_folder
from cotrain.process.threads import engine_environment
from cotrain.publish.decision import Outcome, judge
from cotrain.publish.evidence import Evidence, Publication
from cotrain.records import Prompt, Rollout, RolloutBatch, RolloutRequest, ScoredRollout
from cotrain.tasks.base import build_score, build_task
from cotrain.tasks.prompts import PromptOrder, encode_prompt, load_tokenizer
from cotrain.trainer.spec import trainer_spec
from cotrain.trainer.trainer import DrafterTrainer


@dataclass
class Roles:
    """The three roles, and the folder in shared memory through which weights and features go."""

    engine: RolloutEngine
    learner: PolicyLearner
    trainer: DrafterTrainer
    scratch: Path
    serving: Publication
    """What was decided on the drafter before."""


async def start(config: RunConfig, model: Path, scratch: Path) -> Roles:
    """Start the roles at policy version 0 and drafter version 0."""
    assert config.drafter is not None
    device = "cuda" if torch.cuda.is_available() else "cpu"
    trainer = DrafterTrainer(trainer_spec(config), model, config.drafter.init, device)
    trainer.set_target_weights(model, 0)
    trainer.save_checkpoint(scratch / "drafter", 0)  # the engine loads its first drafter from a folder
    folder = str(scratch / "drafter")
    spec = EngineSpec(config.rollout, str(model), folder, trainer.serving(), config.seed, str(scratch))
    engine = RolloutEngine(spec)
    await engine.start()
    learner = PolicyLearner(config.policy, config.rollout, str(model), config.steps, device)
    return Roles(engine, learner, trainer, scratch, Publication(last_good=0))


def prompts_of_steps(config: RunConfig, model: Path) -> Iterator[list[tuple[Prompt, list[int]]]]:
    """Yield for each step its prompts and their token ids."""
    task = build_task(config.task, config.seed)
    order = PromptOrder(len(task), config.rollout.prompts_per_step, config.seed)
    tokenizer = load_tokenizer(model)
    for step in range(1, config.steps + 1):
        prompts = [task[index] for index in order.step(step)]
        yield [(prompt, encode_prompt(tokenizer, prompt, config.rollout.max_prompt_tokens)) for prompt in prompts]


async def generate(config: RunConfig, engine: RolloutEngine, prompts: list[tuple[Prompt, list[int]]]) -> RolloutBatch:
    """Generate the samples of each prompt. The batch also names the files with the hidden states that the engine computed."""
    samples = range(config.rollout.samples_per_prompt)
    requests = [RolloutRequest(prompt.id, i, token_ids, seed=None) for prompt, token_ids in prompts for i in samples]
    batch = await engine.generate(requests)
    window = await engine.take_window()  # what speculation gained, by measured step times
    return replace(batch, gain=window.gain)


def with_advantages(config: RunConfig, rewards: list[float], batch: RolloutBatch) -> list[ScoredRollout]:
    """Return the rollouts with their rewards, and advantages relative to the samples of the same prompt."""
    size = config.rollout.samples_per_prompt
    groups = [rewards[start : start + size] for start in range(0, len(rewards), size)]
    advantages = [one for group in groups for one in group_advantages(group, config.policy.advantage)]
    return [ScoredRollout(*fields) for fields in zip(batch.rollouts, rewards, advantages, strict=True)]


async def improve_drafter(config: RunConfig, roles: Roles, batch: RolloutBatch, step: int) -> str:
    """Score, decide, swap, train. Returns what was decided, in words."""
    assert config.drafter is not None
    serving, trainer, versions = roles.serving, roles.trainer, roles.engine.versions
    scores, _ = trainer.take_in(batch.features, versions.drafter, (), serving.judged_update)
    outcome, left = Outcome(replace(serving, served=serving.served + 1)), max(1, config.steps - step)
    judge(Evidence(step, batch, versions, serving, scores.gathered or scores), config.drafter, outcome, left)
    roles.serving = outcome.serving
    if outcome.events and outcome.events[-1].kind == "published":
        version = trainer.publish()
        payload = trainer.write_payload(roles.scratch / "drafter.safetensors", version)
        rates = None if outcome.expected is None else outcome.expected.rates[-1].tolist()
        swap = await roles.engine.update_drafter(payload, version, rates)
        roles.serving = outcome.serving.published(versions.drafter, version, swap.seconds, scored=False)
    if config.drafter.train and step % config.drafter.train_every == 0:
        trainer.train(step, config.drafter.updates_per_step)
    return outcome.events[-1].reason if outcome.events else "no candidate yet"


async def improve_policy(roles: Roles, scored: list[ScoredRollout]) -> None:
    """Update the policy, and serve it. The trainer gets its embedding and head, which the drafter borrows."""
    roles.learner.update(scored)
    version = roles.learner.policy_version
    payload = roles.learner.write_payload(roles.scratch / "policy.safetensors")
    assert payload is not None  # only ranks other than the first write none
    roles.trainer.set_target_weights(payload.path, version)
    await roles.engine.update_policy(payload, version)


async def greedy(
    config: RunConfig, engine: RolloutEngine, prompts: list[list[int]], draft_tokens: int
) -> list[Rollout]:
    """Greedy responses at a fixed draft length."""
    await engine.set_num_speculative_tokens(draft_tokens)
    await engine.reset_prefix_cache()
    requests = [RolloutRequest(str(i), 0, token_ids, seed=None) for i, token_ids in enumerate(prompts)]
    sampling = {"temperature": 0.0, "top_p": 1.0, "top_k": -1, "max_tokens": config.rollout.max_new_tokens}
    return (await engine.generate(requests, tap=False, **sampling)).rollouts


async def train(config: RunConfig, scratch: Path) -> None:
    """Run all steps, then compare greedy output with and without speculation."""
    model = resolve_model(config.policy.model)
    score = build_score(config.task, config.seed)
    roles = await start(config, model, scratch)
    engine = roles.engine
    try:
        for step, prompts in enumerate(prompts_of_steps(config, model), start=1):
            token_ids = [ids for _, ids in prompts]
            if step == 1:
                await engine.set_num_speculative_tokens(None)  # the engine chooses k from here on
            served = engine.versions
            batch = await generate(config, engine, prompts)
            texts, size = iter([rollout.text for rollout in batch.rollouts]), config.rollout.samples_per_prompt
            rewards = [one for prompt, _ in prompts for one in score(prompt, list(islice(texts, size)))]
            decision = await improve_drafter(config, roles, batch, step)
            await improve_policy(roles, with_advantages(config, rewards, batch))
            length = batch.speculation.acceptance_length
            print(
                f"step {step}/{config.steps}  reward {sum(rewards) / len(rewards):.2f}  accept {length:.2f}  "
                f"tok/s {batch.num_generated_tokens / batch.seconds:.0f}  {served} -> {engine.versions}  {decision}",
                flush=True,
            )
        plain = await greedy(config, engine, token_ids, 0)
        speculated = await greedy(config, engine, token_ids, config.rollout.num_speculative_tokens)
        check = compare_greedy(plain, speculated, config.rollout.dtype)
        print(f"greedy output with and without speculation: {check}")
    finally:
        await engine.shutdown()


def main(arguments: list[str]) -> None:
    files = [argument for argument in arguments if "=" not in argument]
    config = load_config(files, [argument for argument in arguments if "=" in argument])
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ |= engine_environment()  # before vLLM is imported
    os.environ["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"  # this process has threads, which a fork would lose
    with scratch_folder("minimal") as scratch:
        asyncio.run(train(config, scratch))


if __name__ == "__main__":
    main(sys.argv[1:] or ["configs/quickstart.toml"])
