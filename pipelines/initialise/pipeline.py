"""Trains a drafter on the policy's own text before RL: a run whose policy does not train, and which publishes in each step.

in each step: generate, score the last version on what was generated, train, publish --> serve the last version --> register

One process beside the engine's does all of it, without Ray.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cotrain.config.schema import RunConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.models.loading import resolve_model
from cotrain.process import threads
from cotrain.process.children import engine_output_to, two_stage_stop
from cotrain.process.cluster import engine_device
from cotrain.process.stopping import stop_at_once
from cotrain.records import RolloutRequest, Versions, derived_seed
from cotrain.run.checkpoint import RunState, model_fingerprints, new_checkpoint, newest_state
from cotrain.run.console import Console, aligned, duration
from cotrain.run.mlflow_store import tracking_uri
from cotrain.run.provenance import begin_attempt
from cotrain.run.registry import first_drafter
from cotrain.run.rows import RowFile, read_rows
from cotrain.run.run_dir import RunDir
from cotrain.run.tracking import Tracker
from cotrain.tasks.base import Task, build_task, fingerprint
from cotrain.tasks.prompts import PromptOrder, encode_prompt, load_tokenizer
from cotrain.trainer.spec import trainer_spec
from cotrain.trainer.trainer import DrafterTrainer
from drafters.files import write_json
from pipelines.engines import EngineSetup, one_engine

EXPECTED, GENERATED = "rollout/expected_acceptance_length", "rollout/generated_tokens"
TEXT = "rollouts.jsonl"
"""File of a run with the token ids of each step's prompts and responses."""


def initialise(config: RunConfig, resume: bool) -> int:
    """Run to the end, or until asked to stop. Returns the exit status."""
    model = resolve_model(config.policy.model)
    task = build_task(config.task, config.seed, model, config.rollout.max_prompt_tokens)
    fingerprints = model_fingerprints(model) | {"task": fingerprint(task)}
    with ExitStack() as stack:
        run_dir = stack.enter_context(RunDir(config.run_root, config.name, resume))
        state = newest_state(run_dir, config, fingerprints)
        if state.step == config.steps and (run_dir.path / "init.json").exists():
            print(f"{run_dir.path} is finished: its drafter is {run_dir.path}/drafter, its figures are init.json")
            return 0
        begin_attempt(run_dir, config, state.step)
        console = Console(stack.enter_context(engine_output_to(run_dir.logs / "engine.log")))
        stop = stack.enter_context(two_stage_stop(console.say, "step"))
        console.say(f"run {run_dir.path}; the engine's log is {run_dir.logs}/engine.log")
        run = Initialisation(config, run_dir, model, task, load_tokenizer(model), console, stop)
        if not asyncio.run(run.run(state)):
            console.say(f"Stopped; everything up to here is saved. Go on with: cotrain init {run_dir.resume}")
    return 0


@dataclass(frozen=True)
class Initialisation:
    config: RunConfig
    run_dir: RunDir
    model: Path
    task: Task
    tokenizer: Any
    console: Console
    stop_requested: Callable[[], bool]

    async def run(self, state: RunState) -> bool:
        """Continue from `state`, serve the last version and register it. Returns False when it was asked to stop early."""
        config, started = self.config, time.monotonic()
        async with AsyncExitStack() as stack:
            with self.console.phase("rollout engine"), stop_at_once() as last_lines:
                last_lines.append(self.run_dir.stopped)
                trainer = self._trainer(state)
                # Without a drafter the engine would tap no hidden states, and could not be sent a drafter later.
                first = Path(stack.enter_context(TemporaryDirectory())) / "drafter"
                trainer.save_checkpoint(first, trainer.drafter_version)
                setup = EngineSetup(self.model, [], config.rollout, trainer.drafter, first)
                engine = await stack.enter_async_context(one_engine(setup, config.seed, threads.num_cores()))
            if not await self.steps(engine, trainer, state):
                return False
            figures = await self._figures(engine, trainer)
        version, drafter = trainer.drafter_version, self.run_dir.path / "drafter"
        trainer.save_checkpoint(drafter, version)
        tags = {"data_fingerprint": f"{config.name}:rollouts to step {config.steps}"}
        metrics = {f"drafter/{name}": figures[name] for name in ("expected_acceptance_length", "vocabulary_coverage")}
        policy = state.fingerprints["model"]
        with self.console.phase("MLflow"), Tracker(config, policy=policy, say=self.console.say) as tracker:
            for row in read_rows(self.run_dir.metrics):
                tracker.log_step(row["step"], row)
            tracker.log_drafter(drafter, Versions(0, version), config.steps, metrics, tags)
            tracker.finish()
        figures["seconds"] = time.monotonic() - started
        write_json(self.run_dir.path / "init.json", figures)
        self.console.say(summary(figures, config, drafter, tracker.registered_model))
        return True

    def _trainer(self, state: RunState) -> DrafterTrainer:
        """The trainer as `state` left it; at first it begins with drafter.init, or with a new drafter."""
        torch.set_num_threads(threads.num_cores())
        spec, folder = trainer_spec(self.config), self.run_dir.path / "drafter_init"
        first = first_drafter(tracking_uri(self.config), spec.drafter.init, self.model, folder)
        trainer = DrafterTrainer(spec, self.model, first, engine_device())
        if state.step:
            trainer.load(self.run_dir.checkpoint(state.step) / "trainer")
        trainer.set_target_weights(self.model, policy_version=0)
        return trainer

    def requests(self, step: int) -> list[RolloutRequest]:
        """Return the requests of a step, counted from 1, which depend on the seed and the step alone."""
        seed, rollout, requests = self.config.seed, self.config.rollout, list[RolloutRequest]()
        for index in PromptOrder(len(self.task), rollout.prompts_per_step, seed).step(step):
            prompt = self.task[index]
            token_ids = encode_prompt(self.tokenizer, prompt, rollout.max_prompt_tokens)
            for sample in range(rollout.samples_per_prompt):
                own = derived_seed(seed, step, prompt.id, sample)
                requests.append(RolloutRequest(prompt.id, sample, token_ids, own))
        return requests

    async def steps(self, engine: RolloutEngine, trainer: DrafterTrainer, state: RunState) -> bool:
        """Make the steps after `state`. Returns False when asked to stop before the last; the steps made are saved.

        The engine does not speculate meanwhile, so that its text is the same after a resume.
        """
        config, run_dir, drafter = self.config, self.run_dir, trainer_spec(self.config).drafter
        metrics, text = (RowFile(file, state.step) for file in (run_dir.metrics, run_dir.path / TEXT))
        await engine.set_num_speculative_tokens(0)
        for step in range(state.step + 1, config.steps + 1):
            began = time.perf_counter()
            batch = await engine.generate(self.requests(step))
            written = [{"prompt_token_ids": r.prompt_token_ids, "token_ids": r.token_ids} for r in batch.rollouts]
            text.write(step, {"rollouts": written})
            scores, row = trainer.take_in(batch.features, trainer.drafter_version, keep=(), judged=0)
            if rates := scores.serving[-1].rates():
                row[EXPECTED] = 1 + sum(rates)
            if step % drafter.train_every == 0:
                row |= trainer.train(step, drafter.updates_per_step)
                trainer.publish()
            tokens = batch.num_generated_tokens
            row |= {GENERATED: tokens, "rollout/tokens_per_s": tokens / batch.seconds}
            row |= {"versions/drafter": trainer.drafter_version, "time/step_s": time.perf_counter() - began}
            metrics.write(step, row)
            versions, stopping = Versions(0, trainer.drafter_version), self.stop_requested()
            notes = [f"loss {row['drafter/loss']:.3f}"] if "drafter/loss" in row else []
            self.console.step(step, config.steps, row, versions, notes)
            if step == config.steps or stopping or step % config.checkpoint.every == 0:
                newest = replace(state, step=step, versions=versions)
                with new_checkpoint(run_dir, newest, config.checkpoint.keep_last) as folder:
                    trainer.save(folder / "trainer")
            if stopping and step < config.steps:
                return False
        return True

    async def _figures(self, engine: RolloutEngine, trainer: DrafterTrainer) -> dict[str, Any]:
        """Serve the last version on the responses of one more step, which it was not trained on. Returns what init.json says of it."""
        version, rows = trainer.drafter_version, read_rows(self.run_dir.metrics)
        payload = trainer.write_payload(Path(engine.spec.scratch) / "drafter.safetensors", version)
        await engine.update_drafter(payload, version)
        await engine.set_num_speculative_tokens(self.config.rollout.num_speculative_tokens)
        await engine.reset_prefix_cache()  # what was cached without speculation has no drafter KV
        # Their requests have no seeds, since vLLM cannot seed sampled drafts.
        requests = [replace(request, seed=None) for request in self.requests(self.config.steps + 1)]
        with self.console.phase("the drafter, served on fresh responses"):
            batch = await engine.generate(requests)
        scores, _ = trainer.take_in(batch.features, version, keep=(), judged=0)
        rates, served = scores.serving[-1].rates(), batch.speculation
        if not rates or not served:
            raise ValueError("rollout.max_new_tokens: responses are too short to judge the drafter by; raise it")
        tokens = torch.tensor([token for rollout in batch.rollouts for token in rollout.token_ids])
        return {
            "steps": self.config.steps,
            "response_tokens": sum(row[GENERATED] for row in rows),
            "vocabulary_coverage": float(torch.isin(tokens, trainer.drafter.draft_to_target.cpu()).double().mean()),
            "expected_acceptance_length": 1 + sum(rates),
            "served_acceptance_length": served.acceptance_length,
        }


def summary(figures: dict[str, Any], config: RunConfig, folder: Path, registered_model: str) -> str:
    """The content of init.json as text, for a reader who has not seen one before."""
    expected, served = figures["expected_acceptance_length"], figures["served_acceptance_length"]
    k, method = config.rollout.num_speculative_tokens, config.rollout.draft_sample_method
    lines = {
        "vocabulary": f"covers {figures['vocabulary_coverage']:.2%} of fresh response tokens",
        "acceptance": f"expected {expected:.3f}, served {served:.3f} tokens per verification step at k = {k}, {method}; "
        f"1 is no gain, {k + 1} the most",
        "drafter": f"{folder}; serves in stock vLLM as it is",
        "registered": f"models:/{registered_model}@serving in MLflow" if config.tracking.log_drafters else "no",
        "train with it": f"cotrain train CONFIG drafter.init={folder}",
        "measure its speed": f"cotrain bench --model {config.policy.model} --drafter {folder}",
    }
    head = f"{figures['response_tokens']:,} response tokens, {figures['steps']} steps, {duration(figures['seconds'])}"
    return f"\nDone: a drafter for {config.policy.model} from {head}\n{aligned(lines)}"
