"""Trains a drafter on the policy's own text before RL: a run whose policy does not train, and which publishes in each step.

collect text --> in each step: hidden states, score, train, publish --> serve the last version --> register

One process beside the engine's does all of it, without Ray.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from cotrain.config.load import read_config, write_config
from cotrain.config.schema import RunConfig
from cotrain.engine.engine import RolloutEngine
from cotrain.process import threads
from cotrain.process.children import engine_output_to, two_stage_stop
from cotrain.process.cluster import engine_device
from cotrain.process.stopping import stop_at_once
from cotrain.records import RolloutRequest, SpeculationCounts, Versions
from cotrain.run.checkpoint import RunState, check_resume, model_fingerprints, new_checkpoint, newest_state
from cotrain.run.console import Console, aligned, duration
from cotrain.run.mlflow_store import tracking_uri
from cotrain.run.provenance import write_provenance
from cotrain.run.registry import first_drafter
from cotrain.run.rows import RowFile, read_rows
from cotrain.run.run_dir import RunDir
from cotrain.run.tracking import Tracker
from cotrain.trainer.spec import trainer_spec
from cotrain.trainer.trainer import DrafterTrainer
from drafters.files import write_json
from pipelines.engines import EngineSetup, one_engine, send
from pipelines.initialise import sources
from pipelines.initialise.sources import PromptStream, StoredRollout
from pipelines.preflight import check_run

EXPECTED = "rollout/expected_acceptance_length"


def initialise(config: RunConfig, resume: bool) -> int:
    """Run to the end, or until asked to stop. Returns the exit status."""
    model = check_run(config, resume, "init")
    fingerprints = model_fingerprints(model)
    prompts = sources.open_prompts(config, model)
    with ExitStack() as stack:
        run_dir = RunDir(config.run_root, config.name) if resume else RunDir.create(config.run_root, config.name)
        stack.enter_context(run_dir)
        if not resume:
            write_config(config, run_dir.config)
        corpus = sources.Corpus(run_dir.path, fingerprints)
        saved = read_config(run_dir.config).model_dump(mode="json")
        check_resume(config, fingerprints, RunState(0, Versions(0, 0), saved, corpus.fingerprints))
        if (run_dir.path / "init.json").exists():
            print(f"{run_dir.path} is finished: its drafter is {run_dir.path}/drafter, its figures are init.json")
            return 0
        log = run_dir.start_attempt() / "engine.log"
        write_provenance(run_dir)
        console = Console(stack.enter_context(engine_output_to(log)))
        stop = stack.enter_context(two_stage_stop(console.say, "part"))
        console.say(f"run {run_dir.path}; the engine's log is {run_dir.logs}/engine.log")
        run = Initialisation(config, run_dir, model, corpus, console, stop)
        if not asyncio.run(run.run(prompts)):
            console.say(f"Stopped; everything up to here is saved. Go on with: cotrain init {run_dir.resume}")
    return 0


@dataclass(frozen=True)
class Initialisation:
    config: RunConfig
    run_dir: RunDir
    model: Path
    corpus: sources.Corpus
    console: Console
    stop_requested: Callable[[], bool]

    async def run(self, prompts: PromptStream) -> bool:
        """Collect, train, serve and register. Returns False when it was asked to stop early."""
        started, config, say = time.monotonic(), self.config, self.console.say
        async with AsyncExitStack() as stack:
            # Without a drafter the engine would tap no hidden states, and could not be sent a drafter later.
            untrained = Path(stack.enter_context(TemporaryDirectory())) / "untrained"
            with self.console.phase("rollout engine"), stop_at_once() as last_lines:
                last_lines.append(self.run_dir.stopped)
                new = self._trainer(total_updates=1)
                new.drafter.save(untrained, new.serving_dtype)
                setup = EngineSetup(self.model, [], config.rollout, new.drafter, untrained)
                engine = await stack.enter_async_context(one_engine(setup, config.seed, threads.num_cores()))
            await engine.set_num_speculative_tokens(0)
            if not await self.collect(engine, prompts):
                return False
            training, held_out = sources.split(self.corpus.rollouts, config.rollout.samples_per_prompt)
            say(f"{len(training):,} rollouts to train on, {len(held_out):,} held out")
            state = newest_state(self.run_dir, config, self.corpus.fingerprints)
            with self.console.phase("MLflow"), stop_at_once() as last_lines:
                last_lines.append(self.run_dir.stopped)
                history = read_rows(self.run_dir.metrics) if self.run_dir.resumed else None
                tracker = Tracker(config, policy=state.fingerprints["model"], history=history, say=say)
            stack.enter_context(tracker)
            trainer = await self.train(engine, training, state, tracker)
            if trainer is None:
                tracker.finish("KILLED")
                return False
            rates, served = await self._evaluate(engine, trainer, held_out)
            figures = self._register(tracker, trainer, held_out, rates) | {
                "served_acceptance_length": served.acceptance_length,
                "served_acceptance_rates": [accepted / served.num_drafts for accepted in served.accepted_per_position],
                "seconds": time.monotonic() - started,
            }
            write_json(self.run_dir.path / "init.json", figures)
            say(summary(figures, config, self.run_dir.path / "drafter", tracker.registered_model))
        return True

    async def collect(self, engine: RolloutEngine, prompts: PromptStream) -> bool:
        """Append parts until there are init.tokens response tokens. Returns False when it was to stop early.

        What the next part holds depends on the corpus alone, so an interrupted collection continues as if it had not been.
        """
        corpus, wanted, samples = self.corpus, self.config.init.tokens, self.config.rollout.samples_per_prompt
        before, started = corpus.num_response_tokens, time.monotonic()
        while not self.stop_requested():
            have, done = corpus.num_response_tokens, len(corpus.rollouts)
            if have >= wanted:
                return True
            mean_length = have / done if done else self.config.rollout.max_new_tokens
            count = min(sources.PART_ROLLOUTS, ceil((wanted - have) / mean_length))
            requests = prompts.requests(done // samples, max(1, round(count / samples)))
            rollouts = (await engine.generate(requests, tap=False)).rollouts
            corpus.append(
                [StoredRollout(r.prompt_id, r.sample_index, r.prompt_token_ids, r.token_ids) for r in rollouts]
            )
            have = corpus.num_response_tokens
            rate = (have - before) / (time.monotonic() - started)
            self.console.say(f"rollouts {len(corpus.rollouts):,}  {have:,}/{wanted:,} tokens  {rate:,.0f} tok/s")
        return False

    def _trainer(self, total_updates: int) -> DrafterTrainer:
        """A trainer that begins with drafter.init, or with a new drafter."""
        torch.set_num_threads(threads.num_cores())
        assert self.config.drafter is not None
        init, folder = self.config.drafter.init, self.run_dir.path / "drafter_init"
        first = first_drafter(tracking_uri(self.config), init, self.model, folder)
        spec = trainer_spec(self.config)
        spec = replace(spec, total_updates=total_updates, max_buffer_bytes=self.config.rollout.features.max_bytes)
        return DrafterTrainer(spec, self.model, first, engine_device())

    async def train(
        self, engine: RolloutEngine, rollouts: Sequence[StoredRollout], state: RunState, tracker: Tracker
    ) -> DrafterTrainer | None:
        """Train on all rollouts, as many in a step as in a step of a run. Returns None when asked to stop; that step is saved.

        The draft vocabulary is chosen from all rollouts, which the first step's features alone would cover less well.
        """
        config, run_dir = self.config, self.run_dir
        size = config.rollout.prompts_per_step * config.rollout.samples_per_prompt
        steps = [rollouts[i : i + size] for i in range(0, len(rollouts), size)]
        assert config.drafter is not None
        tokens = [sum(len(rollout.sequence[0]) for rollout in part) for part in steps]
        updates = [ceil(config.init.epochs * number / config.drafter.batch_tokens) for number in tokens]
        trainer, metrics = self._trainer(sum(updates)), RowFile(run_dir.metrics, resumed_step=state.step)
        if state.step:
            trainer.load(run_dir.checkpoint(state.step) / "trainer")
        trainer.set_target_weights(self.model, policy_version=0)
        if not state.step:
            texts = [(torch.tensor(r.prompt_token_ids), torch.tensor(r.token_ids)) for r in rollouts]
            trainer.choose_first_vocabulary(texts, policy_version=0)
        for step in range(state.step + 1, len(steps) + 1):
            began = time.perf_counter()
            shards = await engine.tap_sequences([rollout.sequence for rollout in steps[step - 1]])
            scores, row = trainer.take_in(shards, trainer.drafter_version, keep=(), judged=0)
            if rates := scores.serving[-1].rates():
                row[EXPECTED] = 1 + sum(rates)
            row |= trainer.train(step, updates[step - 1])
            row |= {"versions/drafter": trainer.publish(), "time/step_s": time.perf_counter() - began}
            metrics.write(step, row)
            tracker.log_step(step, row)
            versions, stopping = Versions(0, trainer.drafter_version), self.stop_requested()
            self.console.step(step, len(steps), row, versions, [f"loss {row['drafter/loss']:.3f}"])
            if step == len(steps) or stopping or step % config.checkpoint.every == 0:
                with new_checkpoint(
                    run_dir, replace(state, step=step, versions=versions), keep_last=config.checkpoint.keep_last
                ) as folder:
                    trainer.save(folder / "trainer")
            if stopping and step < len(steps):
                return None
        return trainer

    async def _evaluate(
        self, engine: RolloutEngine, trainer: DrafterTrainer, held_out: Sequence[StoredRollout]
    ) -> tuple[list[float], SpeculationCounts]:
        """Return the expected acceptance rates of the last version on held-out rollouts, and what it accepts on their prompts."""
        rollout, version = self.config.rollout, trainer.drafter_version
        shards = await engine.tap_sequences([rollout.sequence for rollout in held_out])
        scores, _ = trainer.take_in(shards, version, keep=(), judged=0)
        await send(engine, trainer.write_payload(Path(engine.spec.scratch) / "drafter.safetensors", version))
        await engine.set_num_speculative_tokens(rollout.num_speculative_tokens)
        await engine.reset_prefix_cache()  # what was cached without speculation has no drafter KV
        # They have no seeds, since vLLM cannot seed sampled drafts.
        requests = [RolloutRequest(r.prompt_id, i, r.prompt_token_ids, None) for i, r in enumerate(held_out)]
        with self.console.phase("the drafter, served on held-out prompts"):
            served = (await engine.generate(requests, tap=False)).speculation
        rates = scores.serving[-1].rates()
        if not rates or served is None or not served.num_drafts:
            raise ValueError("init.tokens: the held-out responses are too short to judge the drafter by; raise it")
        return rates, served

    def _register(
        self, tracker: Tracker, trainer: DrafterTrainer, held_out: Sequence[StoredRollout], rates: list[float]
    ) -> dict[str, Any]:
        """Write the last version and register it in MLflow. Returns what init.json says of it, of the data and the training."""
        step, folder = trainer.drafter_version, self.run_dir.path / "drafter"
        trainer.save_checkpoint(folder, step)
        tokens = torch.tensor([token for rollout in held_out for token in rollout.token_ids])
        coverage = float(torch.isin(tokens, trainer.drafter.draft_to_target.cpu()).double().mean())
        expected = {"expected_acceptance_length": 1 + sum(rates), "vocabulary_coverage": coverage}
        tags = {"init": self.config.init.source.type, "data_fingerprint": self.corpus.fingerprint()}
        metrics = {f"drafter/{name}": value for name, value in expected.items()}
        tracker.log_drafter(folder, Versions(0, step), step, metrics, tags)
        tracker.finish()
        return expected | {
            "training_rollouts": len(self.corpus.rollouts) - len(held_out),
            "holdout_rollouts": len(held_out),
            "response_tokens": self.corpus.num_response_tokens,
            "steps": step,
            "expected_acceptance_rates": rates,
        }


def summary(figures: dict[str, Any], config: RunConfig, folder: Path, registered_model: str) -> str:
    """The content of init.json as text, for a reader who has not seen one before."""
    expected, served = figures["expected_acceptance_length"], figures["served_acceptance_length"]
    k, method = config.rollout.num_speculative_tokens, config.rollout.draft_sample_method
    lines = {
        "data": f"{figures['training_rollouts']:,} rollouts trained on, {figures['holdout_rollouts']:,} held out",
        "vocabulary": f"covers {figures['vocabulary_coverage']:.2%} of the held-out response tokens",
        "acceptance": f"expected {expected:.3f}, served {served:.3f} tokens per verification step at k = {k}, {method}; "
        f"1 is no gain, {k + 1} the most",
        "drafter": f"{folder}; serves in stock vLLM as it is",
        "registered": f"models:/{registered_model}@serving in MLflow" if config.tracking.log_drafters else "no",
        "train with it": f"cotrain train CONFIG drafter.init={folder}",
        "measure its speed": f"cotrain bench --model {config.policy.model} --drafter {folder}",
    }
    head = f"{figures['response_tokens']:,} response tokens, {figures['steps']} steps, {duration(figures['seconds'])}"
    return f"\nDone: a drafter for {config.policy.model} from {head}\n{aligned(lines)}"
