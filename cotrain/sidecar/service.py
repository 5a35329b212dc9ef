"""The drafter's trainer beside a host's engines: shards in, a decision and a round of training, a publication out.

A round begins with drafter.batch_tokens new tokens of enough rollouts to judge a candidate on, and decides as a step of a run
does. Engines take a publication with their next step, which may come minutes later: the trainer goes on meanwhile, and the
publication counts when every engine that works has it.
"""

import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any, NamedTuple, Protocol

import torch

from cotrain.config.schema import MIN_PROMPTS, MIN_ROLLOUTS
from cotrain.config.sidecar import SidecarConfig
from cotrain.publish.decision import Outcome
from cotrain.records import ScoredRollout, Versions
from cotrain.roles.publisher import DRAFTER_FILE, Publisher, PublisherSpec
from cotrain.run.checkpoint import new_checkpoint
from cotrain.run.console import Console
from cotrain.run.rows import DrafterEvent, RowFile, read_rows
from cotrain.run.tracking import Tracker
from cotrain.sidecar.intake import Engines, Intake
from cotrain.sidecar.prepare import Prepared, prepare
from cotrain.sidecar.spool import read_json
from cotrain.stream.metrics import rollout_metrics

POLL_SECONDS, SILENT_SECONDS = 0.05, 60.0
NO_ENGINE = (
    "no engine of this model has appeared yet: is cotrain-engine installed where the host's vLLM is, does VLLM_PLUGINS leave it "
    "out, does the variable reach the engine's process? `cotrain sidecar check -- COMMAND` finds out"
)
MOST_ROUNDS = 10_000
"""Rounds over which the chance of a false alarm is shared out, since a sidecar has no planned end."""
LARGE_ROUND = 8
"""Times drafter.batch_tokens after which a round begins although it has too few prompts to judge a candidate on."""


class Stop(Protocol):
    """A threading.Event, or something like it."""

    def is_set(self) -> bool:
        """Is the service to end?"""

    def wait(self, timeout: float) -> object:
        """Wait until it is, or for so many seconds."""


class Records(NamedTuple):
    """Where a sidecar writes what it does."""

    metrics: RowFile
    decisions: RowFile
    tracker: Tracker
    console: Console


def serve(config: SidecarConfig, resume: bool, stop: Stop) -> int:
    """Train beside the engines that find the spool, until `stop` is set. Returns the exit status.

    Raises ValueError as `prepare`, and RunFailure when training fails. Engines go on with the drafter that they have.
    """
    console = Console(sys.stdout)
    with ExitStack() as stack:
        prepared = prepare(config, resume, stack)
        state, run_dir = prepared.state, prepared.run_dir
        console.say(
            f"sidecar {run_dir.path}: engines of {config.model} find it in COTRAIN_SIDECAR={prepared.spool.folder}"
        )
        history, run_id = read_rows(run_dir.metrics), state.tracking_run_id
        tracker = stack.enter_context(Tracker(config, run_id=run_id, history=history, say=console.say))
        metrics, decisions = (RowFile(file, resumed_step=state.step) for file in (run_dir.metrics, run_dir.decisions))
        DrafterService(prepared, Records(metrics, decisions, tracker, console)).run(stop)
    return 0


class DrafterService:
    """One trainer, and all engines that its drafter serves."""

    def __init__(self, prepared: Prepared, records: Records):
        self._prepared, self._config, self._records = prepared, prepared.config, records
        self._trainer, self._state, state = prepared.trainer, prepared.state, prepared.state
        heads = list(state.task_position or [])
        self._intake = Intake(prepared.spool, self._trainer, self._config.num_speculative_tokens, heads)
        self._engines = Engines(prepared.spool, self._intake)
        # An alarm that ends a run ends only the speculation of a host, whose own rollouts may be of any policy so far.
        drafter = self._config.drafter.model_copy(update={"on_drafter_failure": "continue"})
        spec = PublisherSpec(drafter, MOST_ROUNDS, sys.maxsize, recomputes=False)
        self._publisher = Publisher(spec, self, self._engines, prepared.spool.current.parent, None, state.versions)
        if state.drafting is not None:
            self._publisher.load_state(state.drafting)
        self._pending: tuple[int, Outcome] | None = None
        self._began = self._ended = time.monotonic()
        self._said: set[str] = set()

    def call(self, method: str, *args: Any) -> Any:
        """A method of the trainer, as the publisher calls it. Rollouts have been read already."""
        if method == "take_in":
            records, *scored = args
            metrics = self._trainer.add_records(records)
            return self._trainer.score_fresh(*scored), metrics
        return getattr(self._trainer, method)(*args)

    def run(self, stop: Stop) -> None:
        """Rounds until `stop` is set, and then a checkpoint."""
        saved = self._state.step
        while not stop.is_set():
            self._intake.poll()
            self._greet()
            if self._settle() and self._is_due():
                self._round()
                if self._state.step % self._config.checkpoint.every == 0:
                    saved = self._save()
            else:
                stop.wait(POLL_SECONDS)
        self._settle(ends=True)
        if self._state.step > saved:
            self._save()
        rounds = f"{self._state.step} rounds, drafter version {self._publisher.serving.version} serves"
        self._records.console.say(f"{rounds}; go on with: cotrain sidecar {self._prepared.run_dir.resume}")

    def _greet(self) -> None:
        """Say which engines have come; the first one says in which number format drafters are sent."""
        if not self._intake.engines and time.monotonic() - self._began > SILENT_SECONDS:
            self._say_once(NO_ENGINE)
        for name, engine in self._intake.engines.items():
            facts = engine.facts
            if not facts["attached"]:
                self._say_once(f"engine {name} drafts nothing: {facts['reason']}")
            elif name not in self._said:
                self._said.add(name)
                self._records.console.say(
                    f"engine {name}: process {facts['pid']}, vLLM {facts['vllm']}, {facts['dtype']}"
                )
                owner = read_json(self._prepared.spool.folder / "owner") or {"host": name}
                self._records.tracker.set_tags({"host": owner["host"]})
                self._trainer.serving_dtype = getattr(torch, facts["dtype"])
                if self._engines.version != self._publisher.serving.version:  # after a resume
                    self._send(self._publisher.serving.version)

    def _send(self, version: int) -> None:
        payload = self._trainer.write_payload(self._prepared.spool.current.with_name(DRAFTER_FILE), version)
        self._engines.update_drafter(payload, version)

    def _settle(self, ends: bool = False) -> bool:
        """Is no publication under way any more? One that every working engine has is kept, a refused one is taken back."""
        if self._pending is None:
            return True
        step, outcome = self._pending
        refusals, is_served = self._engines.answers()
        if not (refusals or is_served or ends):
            return False
        event, self._pending = outcome.events[-1], None
        if refusals:
            reason = f"version {event.version} refused, all engines keep what they serve: {refusals[0]}"
            event = replace(event, kind="refused", reason=reason, numbers={})
            self._publisher.serving = outcome.serving
            self._send(outcome.serving.version)
        else:
            self._register(step, outcome)
        self._note([event])
        return True

    def _register(self, step: int, outcome: Outcome) -> None:
        event, config = outcome.events[-1], self._config
        folder = self._prepared.run_dir.drafter(event.version)
        self._trainer.save_checkpoint(folder, event.version)
        tags = {"init": config.drafter.init or "random", "decision": event.reason}
        tags["data_fingerprint"] = f"{config.name}:the host's requests to round {step - 1}"
        self._records.tracker.log_drafter(
            folder, Versions(self._state.versions.policy, event.version), step, outcome.promised, tags
        )

    def _is_due(self) -> bool:
        if self._publisher.mode is not None:  # nothing is trained on any more
            self._intake.waiting.clear()
        rollouts = [rollout for rollout, _ in self._intake.waiting]
        ratio = sum(len(r.prompt_token_ids) + len(r.token_ids) for r in rollouts) / self._config.drafter.batch_tokens
        enough = len(rollouts) >= MIN_ROLLOUTS and len({r.prompt_id for r in rollouts}) >= MIN_PROMPTS
        return ratio >= (1 if enough else LARGE_ROUND)

    def _round(self) -> None:
        publisher, config, step = self._publisher, self._config.drafter, self._state.step + 1
        batch = self._intake.take()
        versions = Versions(max(r.versions.policy for r in batch.rollouts), publisher.serving.version)
        for rollout in batch.rollouts:
            if rollout.versions.drafter <= self._trainer.drafter_version:
                publisher.serves(rollout.versions)
        # A host's policy may move many times in a round, so that versions do not tell how long candidates were refused.
        publisher.serving = replace(publisher.serving, judged_on=versions.policy)
        outcome, mode = publisher.evaluate(step, batch, versions), publisher.mode
        seconds, self._ended = time.monotonic() - self._ended, time.monotonic()
        self._state = replace(self._state, step=step, versions=versions, seconds=self._state.seconds + seconds)
        scored = [ScoredRollout(rollout, 0.0, 0.0) for rollout in batch.rollouts]
        row = rollout_metrics(scored, batch, seconds, versions.drafter, recomputes=False)
        row = {name: value for name, value in row.items() if not name.startswith("policy/")} | outcome.metrics
        row |= {"versions/policy": versions.policy, "versions/drafter": versions.drafter, "time/step_s": seconds}
        row |= self._intake.metrics()
        self._pending = (step, outcome) if outcome.swap is not None else None
        events = outcome.events[:-1] if self._pending else outcome.events
        if outcome.trains and mode is None and row["drafter/buffer_tokens"]:
            row |= self._trainer.train(step, config.updates_per_step)
        self._records.metrics.write(step, row)
        self._records.tracker.log_step(step, row)
        notes = [event.in_short() for event in events] + [mode or ""]
        self._records.console.step(
            step, None, row, versions, self._records.tracker.missing_steps, [*filter(None, notes)]
        )
        self._note(events)

    def _note(self, events: list[DrafterEvent]) -> None:
        for event in events:
            self._records.decisions.write(event.step, asdict(event))
            if event.is_bad_news:
                self._records.console.say(f"  {event.kind}: {event.reason}")
        if events:
            self._records.tracker.log_decisions(self._records.decisions.path, events[-1])

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self._records.console.say(text)

    def _save(self) -> int:
        """Save, but for the text of any request. Returns the round."""
        run_id, drafting = self._records.tracker.run_id, self._publisher.state()
        served = replace(self._state.versions, drafter=self._trainer.drafter_version)
        state = replace(self._state, versions=served, task_position=self._intake.heads, drafting=drafting)
        state = replace(state, tracking_run_id=run_id)
        with new_checkpoint(self._prepared.run_dir, state, self._config.checkpoint.keep_last) as folder:
            self._trainer.save(folder / "trainer", with_features=False)
        return state.step
