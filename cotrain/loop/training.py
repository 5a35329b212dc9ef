"""Trains the drafter in the background, and measures what that adds to a run. Other calls to the trainer run between two updates."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from cotrain.actors.drafter import Drafter
from cotrain.config.schema import AUTO, RunConfig
from cotrain.loop.reactor import Reactor
from cotrain.publish.decision import DrafterEvent
from cotrain.publish.investment import Spent
from cotrain.records import StepTotal
from cotrain.run.rows import RowFile
from cotrain.trainer.trainer import DrafterTrainer

KEEP = 0.9  # weight of what was measured in a step relative to that in the step after it


class Costs:
    """What rounds of training add to a run: engine steps take longer while one runs, and so does learning, which waits for its end."""

    def __init__(self) -> None:
        self._sums: dict[object, list[list[float]]] = {}
        """How often each kind of work was done, and in how many seconds, without training and with it."""
        self._steps, self._rounds, self._uncharged, self._step_s = 0, 0, 0, 0.0

    def step(self, trains: bool, engine_steps: Mapping[int, Sequence[StepTotal]], seconds: Mapping[str, float]) -> None:
        """Take in a step. trains: a round ran meanwhile. engine_steps: by engine. seconds: of its phases and the whole."""
        self._steps += 1
        if self._steps == 1:  # processes warm up
            return
        for sums in self._sums.values():
            sums[trains] = [KEEP * old for old in sums[trains]]
        self._add("learn", 1, seconds["learn"], trains)
        for engine, totals in engine_steps.items():  # which run side by side
            for total in (total for total in totals if total.kind != "prompts"):
                share = 1 / len(engine_steps)
                self._add((engine, *total[:3]), share * total.num_steps, share * total.seconds, trains)
        self._step_s = KEEP * self._step_s + (1 - KEEP) * seconds["step"] if self._step_s else seconds["step"]
        self._rounds, self._uncharged = self._rounds + trains, self._uncharged + trains

    def spent(self, elapsed: float) -> Spent:
        """Return what is known, and charge for the rounds since the last call. elapsed: seconds of the run so far."""
        round_s, last = self._round_s, 0.0
        if round_s is not None:
            last, self._uncharged = round_s * self._uncharged, 0
        return Spent(last, round_s, self._rounds, self._step_s, elapsed)

    @property
    def _round_s(self) -> float | None:
        """Seconds that a round adds to a step, in the mean: what its work took, less what as much took without training."""
        without, beside = self._sums.get("learn", [[0.0], [0.0]])
        if not (without[0] and beside[0]):
            return None
        added = [with_s - m * (without_s / n) for (n, without_s), (m, with_s) in self._sums.values() if n]
        return max(0.0, sum(added) / beside[0])

    def _add(self, kind: object, number: float, seconds: float, trains: bool) -> None:
        sums = self._sums.setdefault(kind, [[0.0, 0.0], [0.0, 0.0]])[trains]
        sums[:] = sums[0] + number, sums[1] + seconds


class DrafterTraining:
    """Keeps the drafter trainer busy. Each update is a call of its own, so that no other call waits for a whole round."""

    def __init__(
        self,
        config: RunConfig,
        trainer: Drafter,
        reactor: Reactor,
        events: RowFile,
        rows: Sequence[dict[str, float]] = (),
    ):
        """rows: what `rows` was when the run was saved."""
        assert config.drafter is not None
        self._round, self._chooses = config.drafter.updates_per_step, config.drafter.init == AUTO
        self._trainer, self._reactor, self._events = trainer, reactor, events
        self._step = 0
        self.left = 0  # updates that are still to be made; one of them is under way
        self.rows = [*rows]  # of the updates whose metrics no step has taken; saved in checkpoints
        self.costs = Costs()
        self._begun, self._runs = False, False  # whether a round began in this step, and in the one before

    def starts(self, step: int, version: int, folder: Path) -> list[DrafterEvent]:
        """Let training start from the best of the drafters in `folder`, if drafter.init asks for that and nothing was trained yet.

        version: that the engines serve. Returns what was chosen and why, as an event.
        """
        if step > 1 or not self._chooses:
            return []
        lengths, others = self._trainer.call(DrafterTrainer.start_with_best, sorted(map(str, folder.glob("[!.]*"))))
        best = max(lengths, key=lambda one: lengths[one], default="")
        tried = [f"{Path(one).name or 'new weights'} {length:.3f}" for one, length in lengths.items()]
        why = [f"; {Path(one).name} was not scored: {reason}" for one, reason in others.items()]
        reason = f"starts from {Path(best).name or 'new weights'}: acceptance lengths of {', '.join(tried) or 'none'}{''.join(why)}"
        return [DrafterEvent(step, "started", version, reason, {})]

    def begin(self, step: int) -> None:
        """Start a round of drafter.updates_per_step updates. Updates that are left of an earlier round are dropped."""
        is_idle = not self.left
        self._step, self.left, self._begun = step, self._round, True
        if is_idle:
            self._go_on()

    def finish(self) -> None:
        """Wait for the end of the round."""
        self._reactor.until(lambda: not self.left)

    def measure(self, engine_steps: Mapping[int, Sequence[StepTotal]], seconds: Mapping[str, float]) -> None:
        """Take in what a step took once it has ended: see Costs.step."""
        self.costs.step(self._runs, engine_steps, seconds)
        self._runs, self._begun = self._begun, False

    def metrics(self) -> dict[str, float]:
        """Means over the updates since the last call, with their total time as drafter/train_s; empty if there were none."""
        rows, self.rows = self.rows, []
        if not rows:
            return {}
        metrics = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        seconds = sum(row["drafter/train_s"] for row in rows)
        return metrics | {"drafter/train_s": seconds, "drafter/updates": len(rows)}

    def _go_on(self) -> None:
        [call] = self._trainer.begin(DrafterTrainer.train, self._step, 1)
        self._reactor.add(call.reference, partial(self._trained, self._step))

    def _trained(self, step: int, returned: tuple[dict[str, float], float, float]) -> None:
        metrics, began, ended = returned
        self.rows.append(metrics)
        self._events.write(step, {"time": ended, "event": "drafter trained", "seconds": ended - began})
        self.left -= 1
        if self.left:
            self._go_on()
