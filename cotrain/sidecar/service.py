"""The drafter's trainer beside a host's engines: it reads their shards, judges and trains drafters, and publishes them.

A round begins when drafter.batch_tokens new tokens have come, from enough rollouts to judge a candidate on. It decides as a
step of a run does. Engines take a publication with their next step, which may come minutes later. It counts when every engine
that works serves it; until then the service still reads shards, but begins no round.
"""

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, replace

from cotrain.config.sidecar import SidecarConfig
from cotrain.publish.decision import DrafterEvent, Outcome
from cotrain.publish.evidence import enough
from cotrain.publish.publisher import DRAFTER_FILE, Publisher, PublisherSpec
from cotrain.run.checkpoint import new_checkpoint
from cotrain.run.console import Console
from cotrain.run.rows import RowFile, read_rows
from cotrain.run.step_metrics import drafting_metrics, rollout_metrics
from cotrain.run.tracking import Tracker
from cotrain.sidecar.intake import Engines, Intake
from cotrain.sidecar.launch import CAUSES
from cotrain.sidecar.prepare import Prepared, prepare
from cotrain.transport.spool import Verdict
from cotrain.weights.versions import CurrentWeights

POLL_SECONDS, SILENT_SECONDS = 0.05, 60.0
MOST_ROUNDS = 10_000  # the chance of a false alarm is shared out over these, since a sidecar has no planned end
LARGE_ROUND = 8  # times drafter.batch_tokens: with these a round no longer waits for more prompts to judge on


def serve(
    config: SidecarConfig, resume: bool, stop: Callable[[], bool], ready: Callable[[str], str] = lambda model: ""
) -> tuple[list[Verdict], str]:
    """Train beside the engines that find the spool, until `stop` returns True.

    ready: returns what is printed once engines may start, from the policy's folder.
    Returns the verdicts on engines, and which requests could not be trained on, in words.
    Raises ValueError as `prepare` does, and RunFailure when training fails. The engines continue with the drafter they have.
    """
    console = Console(sys.stdout)
    with ExitStack() as stack:
        prepared = prepare(config, resume, stack)
        run_dir, spool = prepared.run_dir, prepared.spool
        found_by = f"COTRAIN_SIDECAR={spool.folder}{ready(spool.settings().model_path)}"
        console.say(f"sidecar {run_dir.path} for {config.model}, found by {found_by}")
        history, policy = read_rows(run_dir.metrics) if resume else None, prepared.state.fingerprints["model"]
        tracker = stack.enter_context(Tracker(config, policy=policy, history=history, say=console.say))
        left_out = DrafterService(prepared, tracker, console).run(stop)
        return spool.verdicts(), left_out


class DrafterService:
    """One trainer, and all engines that draft with its drafter."""

    def __init__(self, prepared: Prepared, tracker: Tracker, console: Console):
        self._prepared, self._tracker, self._console, self._state = prepared, tracker, console, prepared.state
        config, state, files = prepared.config, prepared.state, (prepared.run_dir.metrics, prepared.run_dir.decisions)
        self._metrics, self._decisions = (RowFile(file, resumed_step=state.step) for file in files)
        self._intake = Intake(prepared.spool, prepared.trainer, dict(state.heads))
        current = CurrentWeights(state.versions, sys.maxsize)  # a host's rollouts may be of any earlier policy
        self._engines = Engines(prepared.spool, self._intake, current, prepared.inherits)
        # An alarm may end a host's speculation, but never the host.
        drafter = config.drafter.model_copy(update={"on_drafter_failure": "continue"})
        spec, scratch = PublisherSpec(drafter, MOST_ROUNDS, recomputes=False), prepared.spool.current.parent
        self._publisher = Publisher(spec, prepared.trainer, self._engines, scratch, current)
        if state.drafting is not None:
            self._publisher.load_state(state.drafting)
        self._pending: tuple[int, int, Outcome] | None = None  # step, version to go back to, and what was decided
        self._ended = time.monotonic()
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
            if self._state.step % self._prepared.config.checkpoint.every == 0:
                saved = self._save()
        self._intake.poll()
        self._settle(ends=True)
        if self._state.step > saved:
            self._save()
        rounds = f"{self._state.step} rounds, drafter version {self._engines.current.versions.drafter} serves"
        self._console.say(f"{rounds}; go on with: cotrain sidecar {self._prepared.run_dir.resume}")
        return self._intake.in_words(of_all=True)

    def _greet(self) -> None:
        """Say what is new of the engines. From then on, drafters are sent in the number format of the newest one."""
        said = {text: text for text in self._intake.problems}
        is_silent = time.monotonic() - self._ended > SILENT_SECONDS
        if is_silent and not self._intake.engines and not self._state.step and not self._prepared.spool.verdicts():
            said["none"] = f"engines so far: {CAUSES}\n`cotrain sidecar check` finds out"
        if is_silent and (left_out := self._intake.in_words()):
            said["left out"] = f"no round for {SILENT_SECONDS:.0f} s; {left_out}"
        for name, state in self._intake.engines.items():
            about = f": process {state.pid}, vLLM {state.vllm}, {state.dtype}"
            said[name] = f"engine {name}{about if state.reason is None else f' drafts nothing: {state.reason}'}"
            if self._pending is None and (why := state.refused.get(self._engines.version or 0)):  # others have taken it
                said[name + why] = f"engine {name} keeps drafter {state.drafter_version} and refuses the new one: {why}"
            if state.reason is None and name not in self._said:
                self._prepared.trainer.serve_as(state.dtype)
                if self._engines.version != (serving := self._engines.current.versions.drafter):
                    self._send(serving)  # it has started with another drafter
        for key, text in said.items():
            if key not in self._said:
                self._console.say(text)
        self._said = said

    def _send(self, version: int) -> None:
        path = self._prepared.spool.current.with_name(DRAFTER_FILE)
        self._engines.update_drafter(self._prepared.trainer.write_payload(path, version), version)

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
            self._publisher.take_back(outcome)
            self._send(before)
        else:
            name, folder = self._prepared.config.name, self._prepared.run_dir.drafter(event.version)
            self._prepared.trainer.save_checkpoint(folder, event.version)
            tags = {"data_fingerprint": f"{name}:the host's requests to round {step - 1}", "decision": event.reason}
            self._tracker.log_drafter(folder, self._engines.current.versions, step, outcome.promised, tags)
        self._note([event])
        return True

    def _is_due(self) -> bool:
        if self._publisher.mode is not None:
            self._intake.waiting.clear()
            self._prepared.spool.abandon()  # engines tap nothing any more
        tokens = sum(record.num_tokens for _, record in self._intake.waiting)
        suffices = enough([rollout.prompt_id for rollout, _ in self._intake.waiting])
        return tokens >= self._prepared.config.drafter.batch_tokens * (1 if suffices else LARGE_ROUND)

    def _round(self) -> None:
        publisher, trainer, step = self._publisher, self._prepared.trainer, self._state.step + 1
        seconds, self._ended = time.monotonic() - self._ended, time.monotonic()
        left_out, batch = self._intake.in_words(), self._intake.take(seconds)
        seen, current = {rollout.versions for rollout in batch.rollouts}, self._engines.current
        current.observe(max(v.policy for v in seen), [v for v in seen if v.drafter <= trainer.drafter_version])
        versions, outcome = current.versions, publisher.evaluate(step, batch)
        self._pending = (step, versions.drafter, outcome) if outcome.swap is not None else None
        events = outcome.events[:-1] if self._pending else outcome.events
        self._state = replace(self._state, step=step, seconds=self._state.seconds + seconds)
        row = rollout_metrics(batch.rollouts, batch) | drafting_metrics(batch.speculation) | outcome.metrics
        row |= {"versions/policy": versions.policy, "versions/drafter": versions.drafter, "time/step_s": seconds}
        row |= {f"sidecar/acceptance_length/{name}": length for name, length in self._intake.by_adapter().items()}
        counted = self._intake.left_out()
        row["sidecar/dropped"] = float(counted.total() - counted["finished"])
        if outcome.trains and row["drafter/buffer_tokens"]:
            row |= trainer.train(step, self._prepared.config.drafter.updates_per_step)
        self._metrics.write(step, row)
        self._tracker.log_step(step, row)
        notes = [self._tracker.behind, *(event.in_short() for event in events), publisher.mode or "", left_out]
        self._console.step(step, None, row, versions, notes)
        self._note(events)

    def _note(self, events: list[DrafterEvent]) -> None:
        for event in events:
            self._decisions.write(event.step, asdict(event))
            if event.is_bad_news:
                self._console.say(f"  {event.kind}: {event.reason}")

    def _save(self) -> int:
        """Save a checkpoint of everything but the tokens and hidden states of requests. Returns the round."""
        trainer, config, run_dir = self._prepared.trainer, self._prepared.config, self._prepared.run_dir
        versions, drafting = self._engines.current.versions, self._publisher.state()
        state = replace(self._state, versions=versions, heads=self._intake.heads, drafting=drafting)
        with new_checkpoint(run_dir, state, config.checkpoint.keep_last) as folder:
            trainer.save(folder / "trainer", with_features=False)
        return state.step
