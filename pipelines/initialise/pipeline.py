"""Trains a drafter on the policy's own rollouts before RL, in one process beside the engine's and without Ray.

collect rollouts --> hold out prompts, choose the draft vocabulary --> train on features --> serve --> register
"""

import asyncio
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from functools import partial
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
from cotrain.run.checkpoint import InitProgress, RunState, check_resume, model_fingerprints, newest_state
from cotrain.run.console import Console, aligned, duration
from cotrain.run.mlflow_store import tracking_uri
from cotrain.run.provenance import write_provenance
from cotrain.run.registry import first_drafter
from cotrain.run.rows import RowFile, read_rows
from cotrain.run.run_dir import RunDir
from cotrain.run.tracking import Tracker
from cotrain.trainer.distiller import EXPECTED
from cotrain.trainer.spec import trainer_spec
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.features import FeatureRecord, read_shard
from drafters.files import write_json
from pipelines.engines import EngineSetup, one_engine, send
from pipelines.initialise import sources
from pipelines.initialise.training import Features, RunRecord, Training, updates_of
from pipelines.preflight import check_run

DRAFTER_VERSION = 1
FEATURE_ROLLOUTS = 256
"""Maximum number of rollouts whose features are computed before the next chance to stop."""


def initialise(config: RunConfig, resume: bool) -> int:
    """Run to the end, or until asked to stop. Returns the exit status."""
    model = check_run(config, resume, "init")
    fingerprints = model_fingerprints(model)
    source = sources.open_source(config, model, fingerprints)
    with ExitStack() as stack:
        run_dir = RunDir(config.run_root, config.name) if resume else RunDir.create(config.run_root, config.name)
        stack.enter_context(run_dir)
        if not resume:
            write_config(config, run_dir.config)
        about = {"policy": config.policy.model, "fingerprints": fingerprints, "sampling": sources.sampling(config)}
        corpus = sources.Corpus(run_dir.path, about)
        saved = read_config(run_dir.config).model_dump(mode="json")
        check_resume(config, fingerprints, RunState(0, Versions(0, 0), saved, corpus.about["fingerprints"]))
        if (run_dir.path / "init.json").exists():
            print(f"{run_dir.path} is finished: its drafter is {run_dir.path}/drafter, its figures are init.json")
            return 0
        log = run_dir.start_attempt() / "engine.log"
        write_provenance(run_dir)
        console = Console(stack.enter_context(engine_output_to(log)))
        stop = stack.enter_context(two_stage_stop(console.say, "part"))
        console.say(f"run {run_dir.path}; the engine's log is {run_dir.logs}/engine.log")
        run = Initialisation(config, run_dir, model, corpus, console, stop)
        if not asyncio.run(run.run(source)):
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

    async def run(self, source: sources.Source) -> bool:
        """Run all stages. Returns False when it was asked to stop early."""
        started = time.monotonic()
        async with AsyncExitStack() as stack:
            # Without a drafter the engine would tap no hidden states, and could not be sent a drafter later.
            untrained = Path(stack.enter_context(TemporaryDirectory())) / "untrained"
            with self.console.phase("rollout engine"), stop_at_once():
                trainer = self._trainer(total_updates=1)
                trainer.drafter.save(untrained, trainer.serving_dtype)
                setup = EngineSetup(self.model, [], self.config.rollout, trainer.drafter, untrained)
                engine = await stack.enter_async_context(one_engine(setup, self.config.seed, threads.num_cores()))
            await engine.set_num_speculative_tokens(0)
            say, stop_requested = self.console.say, self.stop_requested
            if not await sources.collect(engine, self.corpus, source, self.config, say, stop_requested):
                return False
            tracker, record = self._records(stack)
            split = sources.split_prompts(self.corpus.rollouts, self.config.init.holdout, self.config.seed)
            training = self._training(record, split, partial(self._features, engine))
            if (progress := await training.train()) is None:
                tracker.finish("KILLED")
                return False
            served = await self._serve(engine, training)
            figures = self._figures(training, progress, served)
            figures |= self._register(tracker, figures, served) | {"seconds": time.monotonic() - started}
            write_json(self.run_dir.path / "init.json", figures)
            self.console.say(summary(figures, self.config, training.best_folder))
        return True

    def _trainer(self, total_updates: int) -> DrafterTrainer:
        """A trainer that begins with drafter.init, or with a new drafter."""
        torch.set_num_threads(threads.num_cores())
        assert self.config.drafter is not None
        init, folder = self.config.drafter.init, self.run_dir.path / "drafter_init"
        first = first_drafter(tracking_uri(self.config), init, self.model, folder)
        spec = trainer_spec(self.config)
        spec = replace(spec, total_updates=total_updates, max_buffer_bytes=self.config.rollout.features.max_bytes)
        return DrafterTrainer(spec, self.model, first, engine_device())

    def _records(self, stack: AsyncExitStack) -> tuple[Tracker, RunRecord]:
        """Open MLflow, and metrics.jsonl as of the newest checkpoint; the RunRecord says where training continues."""
        state = newest_state(self.run_dir, self.config, self.corpus.about["fingerprints"])
        metrics = RowFile(self.run_dir.metrics, resumed_step=state.step)
        with self.console.phase("MLflow"), stop_at_once():
            history = read_rows(self.run_dir.metrics) if self.run_dir.resumed else None
            policy = state.fingerprints["model"]
            tracker = Tracker(self.config, policy=policy, history=history, say=self.console.say)
        stack.enter_context(tracker)

        def log(update: int, row: Mapping[str, float]) -> None:
            metrics.write(update, row)
            tracker.log_step(update, row)

        return tracker, RunRecord(self.config, self.run_dir, state, self.console, log, self.stop_requested)

    def _training(self, record: RunRecord, split: sources.Split, features: Features) -> Training:
        rollouts, holdout = split
        assert self.config.drafter is not None
        trainer = self._trainer(self.config.init.epochs * updates_of(rollouts, self.config.drafter.batch_tokens))
        trainer.set_target_weights(self.model, policy_version=0)
        self.console.say(f"{len(rollouts):,} rollouts to train on, {len(holdout):,} held out")
        return Training(record, trainer, split, features)

    async def _features(self, engine: RolloutEngine, rollouts: Sequence[sources.StoredRollout]) -> list[FeatureRecord]:
        """One record for each rollout, from a prefill of prompt and response; fewer when asked to stop."""
        records: list[FeatureRecord] = []
        while len(records) < len(rollouts) and not self.stop_requested():
            group = rollouts[len(records) : len(records) + FEATURE_ROLLOUTS]
            sequences = [(r.prompt_token_ids + r.token_ids, len(r.prompt_token_ids)) for r in group]
            for shard in await engine.tap_sequences(sequences):
                records += read_shard(shard)
                os.unlink(shard)
            self.console.say(f"features of {len(records):,}/{len(rollouts):,} rollouts")
        return records

    async def _serve(self, engine: RolloutEngine, training: Training) -> SpeculationCounts:
        """Serve the drafter on prompts that it was not trained on, with the sampling and the draft length of [rollout]."""
        trainer, k = training.trainer, self.config.rollout.num_speculative_tokens
        await send(engine, trainer.write_payload(Path(engine.spec.scratch) / "drafter.safetensors", trainer.publish()))
        await engine.set_num_speculative_tokens(k)
        await engine.reset_prefix_cache()  # what was cached without speculation has no drafter KV
        requests = served_requests(training.split[1], self.config)
        with self.console.phase("the drafter, served on held-out prompts"):
            counts = (await engine.generate(requests, tap=False)).speculation
        if counts is None or not counts.num_drafts:
            raise RuntimeError("the engine drafted nothing; every response ended with its first token")
        return counts

    def _figures(self, training: Training, progress: InitProgress, served: SpeculationCounts) -> dict[str, Any]:
        """What init.json says of the data, the training and the drafter as served."""
        rollouts, holdout = training.split
        tokens = torch.tensor([token for rollout in holdout for token in rollout.token_ids])
        vocabulary = training.trainer.drafter.draft_to_target.cpu()
        return {
            "policy": self.config.policy.model,
            "source": self.config.init.source.model_dump(mode="json"),
            "data_fingerprint": sources.data_fingerprint([*rollouts, *holdout]),
            "training_rollouts": len(rollouts),
            "holdout_rollouts": len(holdout),
            "response_tokens": sum(len(r.token_ids) for r in [*rollouts, *holdout]),
            "vocabulary_coverage": float(torch.isin(tokens, vocabulary).double().mean()),
            "steps": training.step,
            "best_epoch": progress.best_epoch,
            "expected_acceptance_length": progress.best[EXPECTED],
            "expected_acceptance_rates": [v for name, v in progress.best.items() if "acceptance_rate_pos" in name],
            "num_speculative_tokens": self.config.rollout.num_speculative_tokens,
            "draft_sample_method": self.config.rollout.draft_sample_method,
            "served": {
                "acceptance_length": served.acceptance_length,
                "acceptance_rates": [accepted / served.num_drafts for accepted in served.accepted_per_position],
                "num_drafts": served.num_drafts,
            },
        }

    def _register(self, tracker: Tracker, figures: dict[str, Any], served: SpeculationCounts) -> dict[str, Any]:
        """Register the drafter in MLflow, and return its name and version there."""
        metrics = {
            EXPECTED: figures["expected_acceptance_length"],
            "vocabulary_coverage": figures["vocabulary_coverage"],
        }
        metrics |= {"acceptance_length": served.acceptance_length, "num_drafts": served.num_drafts}
        tags = {"init": figures["source"]["type"], "data_fingerprint": figures["data_fingerprint"]}
        folder, versions = self.run_dir.path / "drafter", Versions(0, DRAFTER_VERSION)
        registered = tracker.log_drafter(folder, versions, figures["steps"], metrics, tags)
        tracker.finish()
        version = registered.result() if registered.done() else None  # MLflow may not have answered yet
        return {"registered_model": tracker.registered_model, "registered_version": version}


SERVED_ROLLOUTS = 128
"""Maximum number of rollouts that evaluate the served drafter."""


def served_requests(holdout: Sequence[sources.StoredRollout], config: RunConfig) -> list[RolloutRequest]:
    """Up to samples_per_prompt samples of each held-out prompt, SERVED_ROLLOUTS in all. vLLM cannot seed sampled drafts."""
    prompts = {tuple(r.prompt_token_ids): r.prompt_id for r in holdout}
    samples = min(config.rollout.samples_per_prompt, max(1, SERVED_ROLLOUTS // len(prompts)))
    seeded = config.rollout.draft_sample_method == "greedy"
    return [
        RolloutRequest(prompt_id, sample, list(ids), config.seed + number * samples + sample if seeded else None)
        for number, (ids, prompt_id) in enumerate(list(prompts.items())[:SERVED_ROLLOUTS])
        for sample in range(samples)
    ]


def summary(figures: dict[str, Any], config: RunConfig, folder: Path) -> str:
    """The content of init.json as text, for a reader who has not seen one before."""
    served, k, version = figures["served"], config.rollout.num_speculative_tokens, figures["registered_version"]
    expected_rates, served_rates = (
        "  ".join(f"{position}: {rate:.3f}" for position, rate in enumerate(rates, start=1))
        for rates in (figures["expected_acceptance_rates"], served["acceptance_rates"])
    )
    scale = f"(tokens per verification step at k = {k}, {config.rollout.draft_sample_method}; 1 is no gain, {k + 1} the most)"
    lines = {
        "data": f"{figures['training_rollouts']:,} rollouts trained on, {figures['holdout_rollouts']:,} held out "
        f"(source {figures['source']['type']}, fingerprint {figures['data_fingerprint']})",
        "vocabulary": f"covers {figures['vocabulary_coverage']:.2%} of the held-out response tokens",
        "training": f"{figures['steps']} steps, best after epoch {figures['best_epoch']} of {config.init.epochs}",
        "acceptance": f"expected {figures['expected_acceptance_length']:.3f}, served {served['acceptance_length']:.3f}   {scale}",
        "expected": f"{expected_rates}   (share of steps that accept draft position 1 to k)",
        "served": served_rates,
        "drafter": f"{folder}; serves in stock vLLM as it is",
        "registered": f"models:/{figures['registered_model']}/{version} in MLflow"
        if version is not None
        else "no, MLflow has not answered yet",
    }
    commands = {
        "train with it": f"cotrain train CONFIG drafter.init={folder}",
        "measure its speed": f"cotrain bench --model {config.policy.model} --drafter {folder}",
    }
    head = f"\nDone: a drafter for {config.policy.model} from {figures['response_tokens']:,} response tokens in"
    return f"{head} {duration(figures['seconds'])}\n{aligned(lines, wraps=True)}\n\nNext:\n{aligned(commands)}"
