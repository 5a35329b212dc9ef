"""`cotrain init`: a drafter trained on the policy's own rollouts before RL. One process beside the engine's, no Ray.

collect rollouts --> hold out prompts, choose the draft vocabulary --> train on features --> serve --> register
"""

import argparse
import asyncio
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cotrain.config.errors import ConfigError
from cotrain.config.files import write_json
from cotrain.config.load import load_config, read_config, to_toml, write_config
from cotrain.config.schema import RunConfig
from cotrain.models.loading import native_head
from cotrain.process import threads
from cotrain.process.engine_output import engine_output_to
from cotrain.process.scratch import scratch_folder
from cotrain.process.stop_signal import two_stage_stop
from cotrain.records import RolloutRequest, Versions
from cotrain.run.checkpoint import (
    RunState,
    check_resume,
    discard_newer,
    latest_checkpoint,
    load_state,
    model_fingerprints,
)
from cotrain.run.console import Console
from cotrain.run.metrics import MetricsWriter, read_metrics
from cotrain.run.provenance import machine, write_provenance
from cotrain.run.run_dir import RunDir
from cotrain.run.served_drafts import metrics_of
from pipelines.initialise.collect import collect
from pipelines.initialise.corpus import Corpus, StoredRollout, data_fingerprint, split_prompts
from pipelines.initialise.report import Figures, summary
from pipelines.initialise.sources import Source, open_source, sampling
from pipelines.preflight import check_init, init_problems, quick_problems

if TYPE_CHECKING:
    from cotrain.rollout.engine import RolloutEngine
    from cotrain.run.tracking import Tracker
    from cotrain.trainer.trainer import DrafterTrainer
    from drafters.base import Serving
    from pipelines.initialise.distil import Distillation
    from pipelines.initialise.served import Served

DESCRIPTION = "Train a drafter on rollouts of the policy, before RL: in-domain initialisation."
EPILOG = """\
Reads [policy], [rollout], [drafter], [task] and [init] of the configuration; see docs/initialisation.md.

  cotrain init configs/smoke.toml name=first-drafter init.tokens=5000
  cotrain init configs/smoke.toml name=other init.source.type=rollouts init.source.path=runs/first-drafter
  cotrain init --resume first-drafter
"""
SERVED_ROLLOUTS = 128
"""Most rollouts of the served evaluation."""
DRAFTER_VERSION = 1
GIB = 2**30


def main(argv: Sequence[str]) -> int:
    """Run the command. Raises ValueError for what the user can mend, before an engine starts."""
    parser = argparse.ArgumentParser(
        prog="cotrain init",
        usage="cotrain init CONFIG... [key=value...] [--dry-run] [--resume NAME]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", nargs="*", metavar="CONFIG", help="TOML files, and overrides section.field=value")
    parser.add_argument("--dry-run", action="store_true", help="check, print the whole configuration as TOML, and stop")
    parser.add_argument("--resume", metavar="NAME", help="continue this run")
    parsed = parser.parse_intermixed_args(argv)
    overrides = [text for text in parsed.config if "=" in text and not Path(text).is_file()]
    files = [text for text in parsed.config if text not in overrides]
    if not files and not overrides and parsed.resume is None:
        raise ConfigError(["CONFIG: no configuration given, for example configs/smoke.toml; see cotrain init --help"])
    config = load_config(files, overrides, parsed.resume)
    resume = parsed.resume is not None
    if parsed.dry_run:
        print(to_toml(config), flush=True)
        if problems := [*init_problems(config), *quick_problems(config, resume)]:
            raise ConfigError(problems)
        print("# no problem found; model, init.source and drafter.init are looked at when the run starts")
        return 0
    return initialise(config, resume)


def initialise(config: RunConfig, resume: bool = False) -> int:
    """Run to the end, or until asked to stop. Returns the exit status."""
    model = check_init(config, resume)
    fingerprints = model_fingerprints(model)
    source = open_source(config, model, fingerprints)
    with ExitStack() as stack:
        run_dir = RunDir.open(config.run_root, config.name) if resume else RunDir.create(config.run_root, config.name)
        stack.enter_context(run_dir)
        if resume:
            _check_same_run(config, run_dir, fingerprints)
            if (run_dir.path / "init.json").exists():
                print(
                    f"{run_dir.path} is finished: its drafter is {run_dir.path}/drafter, its figures are in init.json"
                )
                return 0
        else:
            write_config(config, run_dir.config)
        log = run_dir.start_attempt() / "engine.log"
        write_provenance(run_dir)
        os.environ.update(
            threads.engine_environment(_threads(config.cluster.engine_threads), config.rollout.kv_cache_gib)
        )
        console = Console(stack.enter_context(engine_output_to(log)))
        stop = stack.enter_context(two_stage_stop(console.say, "part"))
        console.say(f"run {run_dir.path}; the engine's log is {run_dir.logs}/engine.log")
        for note in source.notes:
            console.say(f"note: {note}")
        if config.rollout.num_engines > 1:
            console.say("note: rollout.num_engines is for training; this command runs one engine")
        run = Initialisation(config, run_dir, model, fingerprints, source, console, stop)
        finished = asyncio.run(run.run())
        if not finished:
            console.say(f"Stopped; everything up to here is saved. Go on with: cotrain init {run_dir.resume}")
    return 0


def _check_same_run(config: RunConfig, run_dir: RunDir, fingerprints: dict[str, str]) -> None:
    about = run_dir.path / "rollouts" / "corpus.json"
    began_with = json.loads(about.read_text())["fingerprints"] if about.exists() else fingerprints
    saved = read_config(run_dir.config).model_dump(mode="json")
    check_resume(config, fingerprints, RunState(0, Versions(0, 0), None, saved, began_with))


def _threads(configured: int | None) -> int:
    return configured or threads.num_cores()


class Initialisation:
    """One run of the command."""

    def __init__(
        self,
        config: RunConfig,
        run_dir: RunDir,
        model: Path,
        fingerprints: dict[str, str],
        source: Source,
        console: Console,
        stop_requested: Callable[[], bool],
    ) -> None:
        from drafters.base import TargetSpec

        assert config.drafter is not None
        self.config, self.drafter, self.run_dir, self.model = config, config.drafter, run_dir, model
        self.fingerprints, self.source = fingerprints, source
        self.console, self.stop_requested = console, stop_requested
        self.target = TargetSpec.from_pretrained(model)
        self._serving: Serving | None = None

    async def run(self) -> bool:
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
            await engine.set_draft_tokens(0)
            init, max_new = self.config.init, self.config.rollout.max_new_tokens
            if not await collect(
                engine, corpus, self.source, init.tokens, max_new, self.console.say, self.stop_requested
            ):
                return False
            training, holdout = split_prompts(corpus.rollouts, init.holdout, self.config.seed)
            metrics, tracker = self._records(stack)
            distillation, coverage = await self._prepare(engine, training, holdout, metrics, tracker)
            if not await distillation.run():
                tracker.finish("KILLED")
                return False
            served = await self._serve(engine, scratch, distillation, holdout)
            data = training, holdout
            self._finish(distillation, coverage, served, data, tracker, time.monotonic() - started)
        return True

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def _engine_spec(self, scratch: Path) -> Any:
        """The engine starts on an untrained drafter: with none it would tap nothing, and could not be sent one."""
        from cotrain.rollout.spec import EngineSpec

        trainer = self._trainer(total_updates=1)
        folder = scratch / "untrained"
        trainer.save_checkpoint(folder, self._dtype())
        self._serving = trainer.drafter.serving
        return EngineSpec(
            rollout=self.config.rollout,
            model_path=str(self.model),
            drafter_folder=str(folder),
            serving=self._serving,
            seed=self.config.seed,
            scratch=str(scratch / "engine"),
        )

    # -- training ----------------------------------------------------------------------------------------------------

    def _trainer(self, total_updates: int) -> "DrafterTrainer":
        """drafter.init, or random weights."""
        import torch

        from cotrain.process.cluster import place
        from cotrain.run.registry import first_drafter
        from cotrain.run.store_uri import tracking_uri
        from cotrain.trainer.trainer import DrafterTrainer

        torch.set_num_threads(_threads(self.config.cluster.learner_threads))
        init, folder = self.drafter.init, self.run_dir.path / "drafter_init"
        first: Path | None = folder
        if not folder.exists():
            first = first_drafter(tracking_uri(self.config), init, self.model, folder)
        # One "step" of the trainer's schedule is one update here.
        schedule = {"updates_per_step": 1, "train_every": 1}
        return DrafterTrainer(
            config=self.drafter.model_copy(update=schedule),
            rollout=self.config.rollout,
            model_path=str(self.model),
            init_folder=None if first is None else str(first),
            total_steps=total_updates,
            seed=self.config.seed,
            device=place(self.config, len(machine()["gpus"])).device,
        )

    def _dtype(self) -> Any:
        import torch

        return getattr(torch, self.config.rollout.dtype)

    def _records(self, stack: AsyncExitStack) -> tuple[MetricsWriter, "Tracker"]:
        """metrics.jsonl and MLflow, both as they stood at the newest checkpoint."""
        from cotrain.run.tracking import Tracker

        checkpoint = latest_checkpoint(self.run_dir)
        state = load_state(checkpoint) if checkpoint else None
        step = state.step if state else 0
        discard_newer(self.run_dir, step, 0)
        metrics = stack.enter_context(MetricsWriter(self.run_dir.metrics, resumed_step=step))
        with self.console.phase("MLflow"):
            tracker = Tracker(
                self.config,
                run_id=state.tracking_run_id if state else None,
                history=read_metrics(self.run_dir.metrics),
                say=self.console.say,
            )
        return metrics, stack.enter_context(tracker)

    async def _prepare(
        self,
        engine: "RolloutEngine",
        training: list[StoredRollout],
        holdout: list[StoredRollout],
        metrics: MetricsWriter,
        tracker: "Tracker",
    ) -> tuple["Distillation", float]:
        """Everything before the first update: plan, target weights, vocabulary (and its coverage), hold-out."""
        from pipelines.initialise.distil import Distillation, choose_vocabulary, plan_training
        from pipelines.initialise.feature_store import FeatureStore

        say = self.console.say
        plan = plan_training(self.config, training, self._feature_bytes())
        trainer = self._trainer(plan.num_updates)
        trainer.set_target_weights(str(self.model), 0)
        keep = self.drafter.init is not None or native_head(self.model) is not None
        coverage = choose_vocabulary(trainer, self.target.vocab_size, training, holdout, keep)
        say(f"{len(training):,} rollouts to train on, {len(holdout):,} held out")
        say(f"the draft vocabulary covers {coverage:.2%} of the held-out response tokens")
        cache = int(self.config.init.cache_gib * GIB)
        store = FeatureStore(engine, self.run_dir.path / "features", cache, trainer.drafter.serving.aux_layers, say)
        with self.console.phase("features of the hold-out"):
            held_out = await store.load("holdout", holdout)
        distillation = Distillation(
            self.config, self.run_dir, trainer, store, training, plan, self.fingerprints, tracker.run_id
        )
        distillation.say, distillation.stop_requested = say, self.stop_requested
        distillation.holdout = held_out

        def on_look(update: int, row: Mapping[str, float]) -> None:
            metrics.write(update, row)
            tracker.log_step(update, row)

        distillation.on_look = on_look
        distillation.resume()
        return distillation, coverage

    def _feature_bytes(self) -> int:
        """Of one token in the trainer's memory: hidden states, token id and mask."""
        aux_layers = self._serving.aux_layers if self._serving else ()
        width = (len(aux_layers) + 1) * self.target.hidden_size
        return width * {"float32": 4, "bfloat16": 2}[self.config.rollout.dtype] + 9

    # -- result ------------------------------------------------------------------------------------------------------

    async def _serve(
        self, engine: "RolloutEngine", scratch: Path, distillation: "Distillation", holdout: list[StoredRollout]
    ) -> tuple["Served", dict[str, str]]:
        """The best drafter on the engine, on prompts it was not trained on; digests of what is served."""
        from cotrain.transport.payload import write_payload
        from pipelines.initialise.served import measure_served, serve

        distillation.use_best()
        trainer = distillation.trainer
        trainer.publish()
        payload = write_payload(trainer.state_for_serving(), scratch / "drafter.safetensors", self._dtype())
        digests = await serve(engine, payload, DRAFTER_VERSION)
        with self.console.phase("the drafter, served on held-out prompts, with and without speculation"):
            return await measure_served(engine, served_requests(holdout, self.config)), digests

    def _finish(
        self,
        distillation: "Distillation",
        coverage: float,
        served: tuple["Served", dict[str, str]],
        data: tuple[list[StoredRollout], list[StoredRollout]],
        tracker: "Tracker",
        seconds: float,
    ) -> None:
        """Save and register the drafter, write init.json, and say what came out."""
        from pipelines.initialise.distil import EXPECTED

        training, holdout = data
        folder = self.run_dir.path / "drafter"
        distillation.trainer.save_checkpoint(folder, self._dtype())
        progress, rollout = distillation.progress, self.config.rollout
        figures = Figures(
            policy=self.config.policy.model,
            source=self.config.init.source.model_dump(mode="json"),
            data_fingerprint=data_fingerprint([*training, *holdout]),
            training_rollouts=len(training),
            holdout_rollouts=len(holdout),
            response_tokens=sum(len(r.token_ids) for r in [*training, *holdout]),
            vocabulary_coverage=coverage,
            updates=progress.update,
            planned_updates=distillation.plan.num_updates,
            best_update=progress.best_update,
            expected_acceptance_length=progress.best[EXPECTED],
            expected_acceptance_rates=[v for name, v in progress.best.items() if "acceptance_rate_pos" in name],
            draft_tokens=rollout.draft_tokens,
            draft_sample_method=rollout.draft_sample_method,
            served=served[0],
            served_digests=served[1],
            seconds=seconds,
        )
        version = self._register(tracker, folder, figures)
        write_json(self.run_dir.path / "init.json", asdict(figures) | {"registered_version": version})
        self.console.say("\n" + "\n".join(summary(figures, self.config, folder, tracker.registered_model, version)))

    def _register(self, tracker: "Tracker", folder: Path, figures: Figures) -> int | None:
        """Version in the registry; None when MLflow did not take it (it says so itself)."""
        versions = Versions(0, DRAFTER_VERSION)
        metrics = {
            "expected_acceptance_length": figures.expected_acceptance_length,
            "vocabulary_coverage": figures.vocabulary_coverage,
        }
        tags = {"init": figures.source["type"], "data_fingerprint": figures.data_fingerprint}
        step = max(1, figures.updates)
        registered = tracker.log_drafter(folder, versions, step, metrics, tags)
        tracker.log_served(DRAFTER_VERSION, metrics_of(figures.served.counts), step)
        tracker.finish()
        return registered.result() if registered.done() else None


def served_requests(holdout: Sequence[StoredRollout], config: RunConfig) -> list[RolloutRequest]:
    """The held-out prompts, the samples of each as far as SERVED_ROLLOUTS goes."""
    prompts = {tuple(r.prompt_token_ids): r.prompt_id for r in holdout}
    samples = min(config.rollout.samples_per_prompt, max(1, SERVED_ROLLOUTS // len(prompts)))
    chosen = list(prompts.items())[:SERVED_ROLLOUTS]
    return [
        RolloutRequest(prompt_id, sample, list(ids), config.seed + number * samples + sample)
        for number, (ids, prompt_id) in enumerate(chosen)
        for sample in range(samples)
    ]
