"""The drafter's trainer beside a host's engines: it reads their shards, judges and trains drafters, and publishes them.

A round begins when drafter.batch_tokens new tokens have come, from enough rollouts to judge a candidate on. It decides as a
step of a run does. Engines take a publication with their next step, which may come minutes later. It counts when every engine
that works serves it; until then the service still reads shards, but begins no round.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from cotrain.config.sidecar import SidecarConfig
from cotrain.publish.decision import DrafterEvent, Outcome
from cotrain.publish.evidence import enough
from cotrain.publish.publisher import DRAFTER_FILE, Publisher, PublisherSpec
from cotrain.records import ScoredRollout
from cotrain.run.checkpoint import new_checkpoint
from cotrain.run.console import Console
from cotrain.run.rows import RowFile, read_rows
from cotrain.run.step_metrics import rollout_metrics
from cotrain.run.tracking import Tracker
from cotrain.sidecar.intake import Engines, Intake
from cotrain.sidecar.launch import CAUSES
from cotrain.sidecar.prepare import Prepared, prepare
from cotrain.weights.versions import CurrentWeights

POLL_SECONDS, SILENT_SECONDS = 0.05, 60.0
MOST_ROUNDS = 10_000  # the chance of a false alarm is shared out over these, since a sidecar has no planned end
LARGE_ROUND = 8  # times drafter.batch_tokens: with these a round no longer waits for more prompts to judge on


def serve(
    config: SidecarConfig, resume: bool, stop: Callable[[], bool], ready: Callable[[str], str] = lambda model: ""
) -> tuple[list[Any], str]:
    """Train beside the engines that find the spool, until `stop` returns True.

    ready: returns what is printed once engines may start, from the policy's folder.

    Returns Spool.verdicts, and which requests could not be trained on, in words.
    Raises ValueError as `prepare` does, and RunFailure when training fails. The engines continue with the drafter they have.
    """
    console = Console(sys.stdout)
    with ExitStack() as stack:
        prepared = prepare(config, resume, stack)
        run_dir = prepared.run_dir
        found_by = f"COTRAIN_SIDECAR={prepared.spool.folder}{ready(prepared.spool.settings().model_path)}"
        console.say(f"sidecar {run_dir.path} for {config.model}, found by {found_by}")
        history, policy = read_rows(run_dir.metrics) if resume else None, prepared.state.fingerprints["model"]
        tracker = Tracker(config, policy=policy, history=history, say=console.say)
        left_out = DrafterService(prepared, stack.enter_context(tracker), console).run(stop)
        return prepared.spool.verdicts(), left_out


class DrafterService:
    """One trainer, and all engines that draft with its drafter."""

    def __init__(self, prepared: Prepared, tracker: Tracker, console: Console):
        self._prepared, self._tracker, self._console = prepared, tracker, console
        self._trainer, self._state, self._config = prepared.trainer, prepared.state, prepared.config
        files = prepared.run_dir.metrics, prepared.run_dir.decisions
        self._metrics, self._decisions = (RowFile(file, resumed_step=self._state.step) for file in files)
        heads = dict(self._state.heads)
        self._intake = Intake(prepared.spool, self._trainer, self._config.num_speculative_tokens, heads)
        # A host's rollouts may be of any earlier policy.
        self._current = CurrentWeights(self._state.versions, sys.maxsize)
        self._engines = Engines(prepared.spool, self._intake, self._current)
        # An alarm may end a host's speculation, but never the host.
        drafter = self._config.drafter.model_copy(update={"on_drafter_failure": "continue"})
        spec = PublisherSpec(drafter, MOST_ROUNDS, recomputes=False)
        scratch = prepared.spool.current.parent
        self._publisher = Publisher(spec, self._trainer, self._engines, scratch, self._current)
        if self._state.drafting is not None:
            self._publisher.load_state(self._state.drafting)
        self._pending: tuple[int, int, Outcome] | None = None  # step, version to go back to, and what was decided
        self._inherits = prepared.inherits
        self._ended = time.monotonic()
        self._left_out = Counter[str]()
        self._said: dict[str, str] = {}

    def run(self, stop: Callable[[], bool]) -> str:
        """Run rounds until `stop` returns True, and then save a checkpoint. Returns which requests were left out."""
        saved = self._state.step
        while not stop():
            self._intake.poll()
            self._greet()
            if not (self._settle() and self._is_due()):
                time.sleep(POLL_SECONDS)
                continue
            self._round()
            if self._state.step % self._config.checkpoint.every == 0:
                saved = self._save()
        self._intake.poll()
        self._settle(ends=True)
        if self._state.step > saved:
            self._save()
        rounds = f"{self._state.step} rounds, drafter version {self._current.versions.drafter} serves"
        self._console.say(f"{rounds}; go on with: cotrain sidecar {self._prepared.run_dir.resume}")
        return self._intake.in_words(since=Counter())

    def _greet(self) -> None:
        """Say what is new of the engines. From then on, drafters are sent in the number format of the newest one."""
        said = {text: text for text in self._intake.problems}
        is_silent = time.monotonic() - self._ended > SILENT_SECONDS
        if is_silent and not self._intake.engines and not self._state.step and not self._prepared.spool.verdicts():
            said["none"] = f"engines so far: {CAUSES}\n`cotrain sidecar check -- COMMAND` finds out"
        if is_silent and (left_out := self._intake.in_words(self._left_out)):
            said["left out"] = f"no round for {SILENT_SECONDS:.0f} s; {left_out}"
        for name, engine in self._intake.engines.items():
            pid, vllm, dtype, why = (engine.facts.get(fact) for fact in ("pid", "vllm", "dtype", "reason"))
            if not engine.facts["attached"]:
                said[name] = f"engine {name} drafts nothing: {why}"
                continue
            said[name] = f"engine {name}: process {pid}, vLLM {vllm}, {dtype}"
            if name not in self._said:
                self._meet(engine.facts["host"], dtype)
        for key, text in said.items():
            if key not in self._said:
                self._console.say(text)
        self._said = said

    def _meet(self, host: str, dtype: Any) -> None:
        """Begin to work with an engine: send it the drafter that serves, if it started with another one."""
        self._tracker.set_tags({"host": host})
        self._trainer.serve_as(str(dtype))
        if self._inherits or self._engines.version != self._current.versions.drafter:
            self._inherits = False
            self._send(self._current.versions.drafter)

    def _send(self, version: int) -> None:
        payload = self._trainer.write_payload(self._prepared.spool.current.with_name(DRAFTER_FILE), version)
        self._engines.update_drafter(payload, version)

    def _settle(self, ends: bool = False) -> bool:
        """Return whether no publication is running. One that every working engine serves is kept, and a refused one undone."""
        if self._pending is None:
            return True
        step, before, outcome = self._pending
        refusals, is_served = self._engines.answers()
        if not (refusals or is_served or ends):
            return False
        event, self._pending = outcome.events[-1], None
        if refusals:
            reason = f"version {event.version} refused, all engines keep what they serve: {refusals[0]}"
            event = replace(event, kind="refused", reason=reason, numbers={})
            self._publisher.serving = outcome.serving
            self._send(before)
        else:
            folder = self._prepared.run_dir.drafter(event.version)
            self._trainer.save_checkpoint(folder, event.version)
            tags = {"init": self._config.drafter.init or "random", "decision": event.reason}
            tags["data_fingerprint"] = f"{self._config.name}:the host's requests to round {step - 1}"
            self._tracker.log_drafter(folder, self._current.versions, step, outcome.promised, tags)
        self._note([event])
        return True

    def _is_due(self) -> bool:
        if self._publisher.mode is not None:
            self._intake.waiting.clear()
            self._prepared.spool.abandon()  # engines tap nothing any more
        rollouts = [rollout for rollout, _ in self._intake.waiting]
        ratio = sum(record.num_tokens for _, record in self._intake.waiting) / self._config.drafter.batch_tokens
        return ratio >= (1 if enough([rollout.prompt_id for rollout in rollouts]) else LARGE_ROUND)

    def _round(self) -> None:
        publisher, batch, step = self._publisher, self._intake.take(), self._state.step + 1
        seen = {rollout.versions for rollout in batch.rollouts}
        newest = self._trainer.drafter_version
        self._current.observe(max(v.policy for v in seen), [v for v in seen if v.drafter <= newest])
        versions = self._current.versions
        outcome = publisher.evaluate(step, batch)
        self._pending = (step, versions.drafter, outcome) if outcome.swap is not None else None
        events = outcome.events[:-1] if self._pending else outcome.events
        seconds, self._ended = time.monotonic() - self._ended, time.monotonic()
        self._state = replace(self._state, step=step, seconds=self._state.seconds + seconds)
        scored = [ScoredRollout(rollout, 0.0, 0.0) for rollout in batch.rollouts]
        row = rollout_metrics(scored, replace(batch, seconds=seconds), versions.drafter, recomputes=False)
        row = {name: value for name, value in row.items() if not name.startswith("policy/")} | outcome.metrics
        row |= {"versions/policy": versions.policy, "versions/drafter": versions.drafter, "time/step_s": seconds}
        row |= self._intake.metrics()
        if outcome.trains and row["drafter/buffer_tokens"]:
            row |= self._trainer.train(step, self._config.drafter.updates_per_step)
        self._metrics.write(step, row)
        self._tracker.log_step(step, row)
        left_out, self._left_out = self._intake.in_words(self._left_out), self._intake.left_out()
        notes = [self._tracker.behind, *(event.in_short() for event in events), publisher.mode or "", left_out]
        self._console.step(step, None, row, versions, notes)
        self._note(events)

    def _note(self, events: list[DrafterEvent]) -> None:
        for event in events:
            self._decisions.write(event.step, asdict(event))
            self._tracker.log_decisions(self._decisions.path, event)
            if event.is_bad_news:
                self._console.say(f"  {event.kind}: {event.reason}")

    def _save(self) -> int:
        """Save a checkpoint of everything but the tokens and hidden states of requests. Returns the round."""
        drafting, heads = self._publisher.state(), self._intake.heads
        state = replace(self._state, versions=self._current.versions, heads=heads, drafting=drafting)
        with new_checkpoint(self._prepared.run_dir, state, self._config.checkpoint.keep_last) as folder:
            self._trainer.save(folder / "trainer", with_features=False)
        return state.step
