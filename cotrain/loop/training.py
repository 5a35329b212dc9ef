"""Trains the drafter in the background, and measures what that adds to a run. Other calls to the trainer run between two updates."""

from collections.abc import Iterable, Mapping
from functools import partial

from cotrain.actors.drafter import Drafter
from cotrain.config.schema import RunConfig
from cotrain.loop.reactor import Reactor
from cotrain.publish.investment import Spent
from cotrain.records import StepTotal
from cotrain.run.rows import RowFile
from cotrain.trainer.trainer import DrafterTrainer

KEEP = 0.9  # weight of what was measured in a step relative to that in the step after it


class Beside:
    """Compares how long things take while the drafter trains with how long they take otherwise."""

    def __init__(self) -> None:
        self._means: dict[
            object, list[list[float]]
        ] = {}  # of each kind: number and seconds, without training and with it

    def added(self, kind: object, number: float, seconds: float, trains: bool) -> float | None:
        """Take in a number of things of a kind. Returns the seconds that training has added to them; None while that is unknown."""
        means = self._means.setdefault(kind, [[0.0, 0.0], [0.0, 0.0]])
        means[trains] = [KEEP * old + new for old, new in zip(means[trains], (number, seconds), strict=True)]
        (n, without), (m, beside) = means
        return number * (beside / m - without / n) if trains and n and m else None


class Costs:
    """What rounds of training add to a run: engine steps and learning take longer while one runs, and learning ends with it."""

    def __init__(self) -> None:
        self._beside, self._steps, self._rounds = Beside(), 0, 0
        self._last, self._step_s = 0.0, 0.0
        self._round_s: float | None = None

    def step(self, trains: bool, engine_steps: Mapping[int, Iterable[StepTotal]], seconds: Mapping[str, float]) -> None:
        """Take in a step. trains: a round ran meanwhile. engine_steps: by engine. seconds: of its phases and the whole."""
        self._steps += 1
        if self._steps == 1:  # processes warm up
            return
        added = [self._beside.added("learn", 1, seconds["learn"], trains)]
        for engine, totals in engine_steps.items():
            slower = [
                self._beside.added((engine, *total[:3]), total.num_steps, total.seconds, trains)
                for total in totals
                if total.kind != "prompts"
            ]
            added += [one / len(engine_steps) for one in slower if one is not None]
        self._step_s = KEEP * self._step_s + (1 - KEEP) * seconds["step"] if self._step_s else seconds["step"]
        self._rounds += trains
        self._last = 0.0
        if trains and added[0] is not None:
            self._last = max(0.0, sum(one for one in added if one is not None))
            self._round_s = self._last if self._round_s is None else KEEP * self._round_s + (1 - KEEP) * self._last

    def spent(self, elapsed: float) -> Spent:
        """elapsed: seconds of the run so far."""
        return Spent(self._last, self._round_s, self._rounds, self._step_s, elapsed)


class DrafterTraining:
    """Keeps the drafter trainer busy. Each update is a call of its own, so that no other call waits for a whole round."""

    def __init__(self, config: RunConfig, trainer: Drafter, reactor: Reactor, events: RowFile):
        assert config.drafter is not None
        self._round = config.drafter.updates_per_step
        self._trainer, self._reactor, self._events = trainer, reactor, events
        self._step = 0
        self.left = 0  # updates that are still to be made; one of them is under way
        self.rows: list[dict[str, float]] = []  # of the updates whose metrics no step has taken; saved in checkpoints
        self.costs = Costs()
        self._began, self._runs = (
            False,
            False,
        )  # whether a round began in this step, and in the one before, whose round runs in this one

    def begin(self, step: int) -> None:
        """Start a round of drafter.updates_per_step updates. Updates that are left of an earlier round are dropped."""
        is_idle = not self.left
        self._step, self.left, self._began = step, self._round, True
        if is_idle:
            self._go_on()

    def finish(self) -> None:
        """Wait for the end of the round."""
        self._reactor.until(lambda: not self.left)

    def measure(self, engine_steps: Mapping[int, Iterable[StepTotal]], seconds: Mapping[str, float]) -> None:
        """Take in what a step took once it has ended: see Costs.step."""
        self.costs.step(self._runs, engine_steps, seconds)
        self._runs, self._began = self._began, False

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
