"""`cotrain init`: a drafter trained on the policy's own rollouts before RL. One process beside the engine's, no Ray.

collect rollouts --> hold out prompts, choose the draft vocabulary --> train on features --> serve --> register
"""

import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotrain.config.files import write_json
from cotrain.config.load import read_config, write_config
from cotrain.config.schema import DrafterConfig, RunConfig
from cotrain.models.loading import native_head
from cotrain.process import threads
from cotrain.process.engine_output import engine_output_to
from cotrain.process.scratch import scratch_folder
from cotrain.process.stop_signal import two_stage_stop
from cotrain.records import Versions
from cotrain.run.checkpoint import (
    RunState,
    check_resume,
    discard_newer,
    latest_checkpoint,
    load_state,
    model_fingerprints,
)
from cotrain.run.console import Console
from cotrain.run.metrics import metrics_of
from cotrain.run.provenance import machine, write_provenance
from cotrain.run.rows import RowFile, read_rows
from cotrain.run.run_dir import RunDir
from pipelines.initialise.rollouts import Corpus, StoredRollout, data_fingerprint, split_prompts
from pipelines.initialise.sources import Source, collect, open_source, sampling
from pipelines.preflight import check_run, read_command_line

if TYPE_CHECKING:
    from cotrain.rollout.engine import RolloutEngine
    from cotrain.run.tracking import Tracker
    from cotrain.trainer.distiller import Distiller
    from cotrain.transport.features import FeatureRecord
    from pipelines.initialise.training import Training

DESCRIPTION = "Train a drafter on rollouts of the policy, before RL: in-domain initialisation."
EPILOG = """\
Reads [policy], [rollout], [drafter], [task] and [init] of the configuration; see docs/initialisation.md.

  cotrain init configs/smoke.toml name=first-drafter init.tokens=5000
  cotrain init configs/smoke.toml name=other init.source.type=rollouts init.source.path=runs/first-drafter
  cotrain init --resume first-drafter
"""
DRAFTER_VERSION = 1
Split = tuple[list[StoredRollout], list[StoredRollout]]
"""Rollouts to train on, and those held out."""
FEATURE_ROLLOUTS = 256
"""Most rollouts whose features are computed between two chances to stop."""


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for what the user can mend, before an engine starts."""
    asked = read_command_line("init", argv, DESCRIPTION, EPILOG)
    return 0 if asked is None else initialise(*asked)


def initialise(config: RunConfig, resume: bool = False) -> int:
    """Run to the end, or until asked to stop. Returns the exit status."""
    model = check_run(config, resume, "init")
    fingerprints = model_fingerprints(model)
    source = open_source(config, model, fingerprints)
    with ExitStack() as stack:
        run_dir = RunDir(config.run_root, config.name) if resume else RunDir.create(config.run_root, config.name)
        stack.enter_context(run_dir)
        if resume:
            _check_same_run(config, run_dir, fingerprints)
            if (run_dir.path / "init.json").exists():
                print(f"{run_dir.path} is finished: its drafter is {run_dir.path}/drafter, its figures are init.json")
                return 0
        else:
            write_config(config, run_dir.config)
        log = run_dir.start_attempt() / "engine.log"
        write_provenance(run_dir)
        os.environ.update(threads.engine_environment(threads.num_cores()))
        console = Console(stack.enter_context(engine_output_to(log)))
        stop = stack.enter_context(two_stage_stop(console.say, "part"))
        console.say(f"run {run_dir.path}; the engine's log is {run_dir.logs}/engine.log")
        for note in source.notes:
            console.say(f"note: {note}")
        if config.rollout.num_engines > 1:
            console.say("note: rollout.num_engines is for training; this command runs one engine")
        run = Initialisation(config, run_dir, model, fingerprints, console, stop)
        if not asyncio.run(run.run(source)):
            console.say(f"Stopped; everything up to here is saved. Go on with: cotrain init {run_dir.resume}")
    return 0


def _check_same_run(config: RunConfig, run_dir: RunDir, fingerprints: dict[str, str]) -> None:
    about = run_dir.path / "rollouts" / "corpus.json"
    began_with = json.loads(about.read_text())["fingerprints"] if about.exists() else fingerprints
    saved = read_config(run_dir.config).model_dump(mode="json")
    check_resume(config, fingerprints, RunState(0, Versions(0, 0), None, saved, began_with))


class Initialisation:
    """One run of the command."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        model: Path,
        fingerprints: dict[str, str],
        console: Console,
        stop_requested: Callable[[], bool],
    ) -> None:
        self.config, self.run_dir, self.model = config, run_dir, model
        self.fingerprints, self.console, self.stop_requested = fingerprints, console, stop_requested

    @cached_property
    def drafter(self) -> DrafterConfig:
        """The [drafter] section, which preflight has found to be there."""
        assert self.config.drafter is not None
        return self.config.drafter

    @cached_property
    def dtype(self) -> Any:
        """Number format of the engine's weights."""
        import torch

        return getattr(torch, self.config.rollout.dtype)

    async def run(self, source: Source) -> bool:
        """All stages; False when it was asked to stop early."""
        from cotrain.rollout.engine import RolloutEngine

        started = time.monotonic()
        corpus = Corpus(self.run_dir.path / "rollouts")
        corpus.describe(
            {
                "policy": self.config.policy.model,
                "fingerprints": self.fingerprints,
                "source": self.config.init.source.model_dump(mode="json"),
                "sampling": sampling(self.config),
            }
        )
        async with AsyncExitStack() as stack:
            scratch = stack.enter_context(scratch_folder(self.config.name))
            engine = RolloutEngine(self._engine_spec(scratch))
            stack.push_async_callback(engine.shutdown)
            with self.console.phase("rollout engine"):
                await engine.start()
            await engine.set_num_speculative_tokens(0)
            if not await collect(engine, corpus, source, self.config, self.console.say, self.stop_requested):
                return False
            tracker, log = self._records(stack)
            split = split_prompts(corpus.rollouts, self.config.init.holdout, self.config.seed)
            training = await self._prepare(engine, split, tracker, log)
            if training is None or not await training.train(self.stop_requested):
                tracker.finish("KILLED")
                return False
            figures = self._figures(training, split) | await self._serve(engine, scratch, training, split[1])
            self._finish(training.trainer, figures | {"seconds": time.monotonic() - started}, tracker)
        return True

    def _engine_spec(self, scratch: Path) -> Any:
        """The engine starts on an untrained drafter: with none it would tap nothing, and could not be sent one."""
        from cotrain.rollout.spec import EngineSpec

        trainer = self._trainer(total_updates=1)
        folder = scratch / "untrained"
        trainer.drafter.save(folder, self.dtype)
        return EngineSpec(
            rollout=self.config.rollout,
            model_path=str(self.model),
            drafter_folder=str(folder),
            serving=trainer.drafter.serving,
            seed=self.config.seed,
            scratch=str(scratch / "engine"),
        )

    def _trainer(self, total_updates: int) -> "Distiller":
        """A trainer that begins with drafter.init, or with random weights."""
        import torch

        from cotrain.process.cluster import place
        from cotrain.run.mlflow_store import tracking_uri
        from cotrain.run.registry import first_drafter
        from cotrain.trainer.distiller import Distiller

        torch.set_num_threads(threads.num_cores())
        first: Path | None = self.run_dir.path / "drafter_init"
        if not (first and first.exists()):
            first = first_drafter(
                tracking_uri(self.config), self.drafter.init, self.model, self.run_dir.path / "drafter_init"
            )
        device = place(self.config, len(machine()["gpus"])).device
        return Distiller(self.config, self.model, first, total_updates, device)

    def _records(self, stack: AsyncExitStack) -> tuple["Tracker", Callable[[int, Mapping[str, float]], None]]:
        """MLflow, and what writes an evaluation there and to metrics.jsonl; both as they stood at the checkpoint."""
        from cotrain.run.tracking import Tracker

        checkpoint = latest_checkpoint(self.run_dir)
        state = load_state(checkpoint) if checkpoint else None
        step = state.step if state else 0
        discard_newer(self.run_dir, step, 0)
        metrics = RowFile(self.run_dir.metrics, resumed_step=step)
        with self.console.phase("MLflow"):
            tracker = Tracker(
                self.config,
                run_id=state.tracking_run_id if state else None,
                history=read_rows(self.run_dir.metrics),
                say=self.console.say,
            )

        def log(update: int, row: Mapping[str, float]) -> None:
            metrics.write(update, row)
            tracker.log_step(update, row)

        return stack.enter_context(tracker), log

    async def _prepare(
        self, engine: "RolloutEngine", split: Split, tracker: "Tracker", log: Callable[[int, Mapping[str, float]], None]
    ) -> "Training | None":
        """Everything before the first update: plan, target weights, vocabulary, features of the hold-out."""
        from drafters.base import TargetSpec
        from pipelines.initialise.training import RunRecord, Training, choose_vocabulary, plan_updates

        training, holdout = split
        target = TargetSpec.from_pretrained(self.model)
        width = (self.drafter.model.num_aux_layers + 1) * target.hidden_size
        bytes_per_token = width * self.dtype.itemsize + 9  # hidden states, token id and mask
        plan = plan_updates(self.config, [r.num_tokens for r in training], bytes_per_token)
        trainer = self._trainer(len(plan))
        trainer.set_target_weights(str(self.model), 0)
        if self.drafter.init is None and native_head(self.model) is None:
            choose_vocabulary(trainer, target.vocab_size, training)
        self.console.say(f"{len(training):,} rollouts to train on, {len(holdout):,} held out")

        async def features(wanted: Sequence[StoredRollout]) -> "list[FeatureRecord] | None":
            return await self._features(engine, wanted)

        held_out = await features(holdout)
        if held_out is None:
            return None
        record = RunRecord(self.config, self.run_dir, self.fingerprints, tracker.run_id, self.console.say, log)
        return Training(record, trainer, plan, training, features, held_out)

    async def _features(
        self, engine: "RolloutEngine", rollouts: Sequence[StoredRollout]
    ) -> "list[FeatureRecord] | None":
        """One record for each rollout, from a prefill of prompt and response; None when asked to stop."""
        from cotrain.transport.features import read_shard

        records: list[FeatureRecord] = []
        while len(records) < len(rollouts):
            if self.stop_requested():
                return None
            group = rollouts[len(records) : len(records) + FEATURE_ROLLOUTS]
            sequences = [(r.prompt_token_ids + r.token_ids, len(r.prompt_token_ids)) for r in group]
            for shard in await engine.tap_sequences(sequences):
                records += read_shard(shard.path)
                os.unlink(shard.path)
            self.console.say(f"features of {len(records):,}/{len(rollouts):,} rollouts")
        return records

    async def _serve(
        self, engine: "RolloutEngine", scratch: Path, training: "Training", holdout: list[StoredRollout]
    ) -> dict[str, Any]:
        """Figures of the best drafter on the engine, on prompts that it was not trained on."""
        from cotrain.transport.payload import write_payload
        from pipelines.initialise.result import measure_served, serve, served_requests

        training.use_best()
        training.trainer.check_publishable(DRAFTER_VERSION)
        payload = write_payload(
            training.trainer.drafter.state_for_serving(), scratch / "drafter.safetensors", self.dtype
        )
        await serve(engine, payload, DRAFTER_VERSION)
        with self.console.phase("the drafter, served on held-out prompts, with and without speculation"):
            served = await measure_served(engine, served_requests(holdout, self.config))
        return {"served": served.to_json(), "served_counts": metrics_of(served.counts)}

    def _figures(self, training: "Training", split: Split) -> dict[str, Any]:
        """What init.json says of the data and of the training."""
        from pipelines.initialise.training import EXPECTED, vocabulary_coverage

        data, progress, rollout = [*split[0], *split[1]], training.progress, self.config.rollout
        return {
            "policy": self.config.policy.model,
            "source": self.config.init.source.model_dump(mode="json"),
            "data_fingerprint": data_fingerprint(data),
            "training_rollouts": len(split[0]),
            "holdout_rollouts": len(split[1]),
            "response_tokens": sum(len(r.token_ids) for r in data),
            "vocabulary_coverage": vocabulary_coverage(training.trainer, split[1]),
            "updates": progress.update,
            "planned_updates": len(training.plan),
            "best_update": progress.best_update,
            "expected_acceptance_length": progress.best[EXPECTED],
            "expected_acceptance_rates": [v for name, v in progress.best.items() if "acceptance_rate_pos" in name],
            "num_speculative_tokens": rollout.num_speculative_tokens,
            "draft_sample_method": rollout.draft_sample_method,
        }

    def _finish(self, trainer: "Distiller", figures: dict[str, Any], tracker: "Tracker") -> None:
        """Save and register the drafter, write init.json, and say what came out."""
        from pipelines.initialise.result import summary

        folder = self.run_dir.path / "drafter"
        trainer.drafter.save(folder, self.dtype)
        step = max(1, figures["updates"])
        metrics = {name: figures[name] for name in ("expected_acceptance_length", "vocabulary_coverage")}
        tags = {"init": figures["source"]["type"], "data_fingerprint": figures["data_fingerprint"]}
        registered = tracker.log_drafter(folder, Versions(0, DRAFTER_VERSION), step, metrics, tags)
        tracker.log_step(step + 1, {"versions/drafter": DRAFTER_VERSION} | figures.pop("served_counts"))
        tracker.finish()
        figures["registered_model"] = tracker.registered_model
        figures["registered_version"] = registered.result() if registered.done() else None  # MLflow may be away
        write_json(self.run_dir.path / "init.json", figures)
        self.console.say("\n" + "\n".join(summary(figures, self.config, folder)))
