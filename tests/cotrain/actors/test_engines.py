"""Several rollout engines as one: what they serve together, and how their figures add up. Actors are stand-ins."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.actors.engines import RolloutEngines
from cotrain.actors.replicas import MOST_RESTARTS
from cotrain.engine.engine import RolloutEngine
from cotrain.process.failures import RunFailure
from cotrain.records import GainReport, StepTotal, SwapReport, Versions, WeightPayload, Window
from cotrain.weights.payload import WeightUpdateRefused
from cotrain.weights.versions import CurrentWeights
from drafters.base import ServingSpec

PAYLOAD = WeightPayload("drafter.safetensors", 10, {"fc.weight": "00"})


class Engine:
    """Serves a version number; refuses in a check or in the update."""

    def __init__(self, refuses: str = "", error: type[Exception] = WeightUpdateRefused):
        self.refuses, self.error = refuses, error
        self.served, self.before = [0], 0
        self.log: list[str] = []
        self.window = Window(None, [])
        self.digests = PAYLOAD.digests

    def take_window(self) -> Window:
        return self.window

    def check_drafter(self, payload: WeightPayload) -> None:
        self._note("check")

    def update_drafter(self, payload: WeightPayload, version: int, expected_rates: Any = None) -> SwapReport:
        self._note("update")
        self.served.append(version)
        return SwapReport(0.1 * version, payload.num_bytes)

    def undo_drafter_update(self) -> None:
        self._note("undo")
        self.served.pop()

    def update_policy(self, payload: WeightPayload, version: int) -> SwapReport:
        self._note(f"{payload.path} p{version}")
        return SwapReport(1.0, payload.num_bytes)

    def set_num_speculative_tokens(self, num_speculative_tokens: int | None) -> None:
        self._note(f"draft {num_speculative_tokens}")

    def served_digests(self, names: list[str], draft: bool) -> dict[str, str]:
        return self.digests

    def on_workers(self, method: Callable[..., Any], *args: Any) -> Any:
        return getattr(self, method.__name__)(*args)

    def learn_from(self, batch: str) -> None:
        self._note(f"learn {batch}")

    def save_history(self, path: str) -> None:
        self._note(f"save {path}")

    def load_history(self, path: str) -> None:
        self._note(f"load {path}")

    def history_size(self) -> tuple[int, int]:
        return 50, 1800

    def _note(self, what: str) -> None:
        self.log.append(what)
        if self.refuses == what:
            raise self.error(f"refused in {what}")


class Remote:
    """`actor.call.remote(method, ...)` of an engine; its result comes from the cluster."""

    def __init__(self, engine: Engine):
        self.engine, self.call, self.start = engine, self, SimpleNamespace(remote=lambda spec: ("start", spec))

    def remote(self, method: str, *args: Any) -> Any:
        try:
            return getattr(self.engine, method)(*args)
        except Exception as error:
            return error


class Cluster:
    def __init__(self, node_of: dict[str, str]) -> None:
        self.node_of, self.killed = node_of, list[Remote]()

    def kill(self, actor: Remote) -> None:
        self.killed.append(actor)

    def get(self, references: list[Any], seconds: float | None = None) -> list[Any]:
        for result in references:
            if isinstance(result, Exception):
                raise result
        return references


class Engines(RolloutEngines):
    """Engines on nodes of their own; one that is started again is a new stand-in."""

    def __init__(self, *engines: Engine, min_engines: int = 1, history: bool | None = None, seed: int = 0):
        rollout = SimpleNamespace(num_engines=len(engines), tensor_parallel_size=1, history=history)
        policy = SimpleNamespace(weight_transfer="files", sends_without_file=False, lora=None)
        cluster = SimpleNamespace(min_engines=min_engines)
        config = SimpleNamespace(cluster=cluster, rollout=rollout, policy=policy, seed=seed)
        self.stand_ins = [*engines]
        node_of = {f"rollout_{i}": f"node of rollout_{i}" for i in range(len(engines))}
        scratch = {node: Path("shm") / node for node in node_of.values()}
        bring = lambda path, node: f"{node}/{path}"
        nodes = SimpleNamespace(bring=bring, begin_bring=bring, arrived=str, model_path="m", scratch=scratch)
        self.starting: list[Any] = []
        current = CurrentWeights(Versions(0, 0))
        super().__init__(Cluster(node_of), nodes, config, current, lambda *started: self.starting.append(started))  # type: ignore[arg-type]
        self.start_after(0)

    def start_after(self, step: int) -> list[Any]:
        return self.start(ServingSpec("eagle3"), step, Path("v0000"))

    def _new_actor(self, engine: int) -> Any:
        if engine in getattr(self, "_away", ()):
            self.stand_ins[engine] = Engine()
        return Remote(self.stand_ins[engine])


def engines_of(*engines: Engine) -> Engines:
    return Engines(*engines)


def test_a_drafter_goes_to_all_engines() -> None:
    engines = [Engine(), Engine()]
    assert engines_of(*engines).update_drafter(PAYLOAD, 3).seconds == pytest.approx(0.3)
    assert [engine.served[-1] for engine in engines] == [3, 3]
    assert [engine.log for engine in engines] == [["check", "update"]] * 2


def test_one_engine_checks_only_once() -> None:
    engine = Engine()
    engines_of(engine).update_drafter(PAYLOAD, 1)
    assert engine.log == ["update"]


def test_a_drafter_that_one_engine_cannot_take_is_served_by_none() -> None:
    engines = [Engine(), Engine(refuses="check"), Engine()]
    with pytest.raises(WeightUpdateRefused, match="refused in check"):
        engines_of(*engines).update_drafter(PAYLOAD, 3)
    assert [engine.log for engine in engines] == [["check"]] * 3


def test_engines_that_had_switched_go_back_when_one_fails_late() -> None:
    engines = [Engine(), Engine(refuses="update"), Engine()]
    with pytest.raises(WeightUpdateRefused, match="refused in update"):
        engines_of(*engines).update_drafter(PAYLOAD, 3)
    assert [engine.served[-1] for engine in engines] == [0, 0, 0]
    assert [engine.log[-1] for engine in engines] == ["undo", "update", "undo"]


def test_an_engine_whose_weights_are_unknown_is_no_refusal() -> None:
    """A refusal is answered by going on with the old drafter."""
    engines = [Engine(), Engine(refuses="update", error=RunFailure)]
    with pytest.raises(RunFailure, match="refused in update"):
        Engines(*engines, min_engines=2).update_drafter(PAYLOAD, 3)


def test_a_policy_that_an_engine_refuses_ends_the_run() -> None:
    """That engine would generate with the policy before, under the new version."""
    with pytest.raises(RunFailure, match="an engine refused policy 4: refused in"):
        Engines(Engine(), Engine(refuses=f"node of rollout_1/{PAYLOAD.path} p4")).update_policy(PAYLOAD, 4)


def test_an_engine_that_dies_is_out_until_it_serves_what_is_of_record() -> None:
    engines = Engines(Engine(), Engine())
    engines.update_policy(PAYLOAD, 4)
    engines.stand_ins[1].refuses, engines.stand_ins[1].error = "check", RunFailure
    dead = engines._actors[1]
    assert engines.update_drafter(PAYLOAD, 3).seconds == pytest.approx(0.3)
    assert engines.in_dispatch == [0] and engines._cluster.killed == [dead]  # type: ignore[attr-defined]
    [((_, spec), started, _)] = engines.starting
    assert (spec.scratch[-1], spec.drafter_folder, str(spec.versions)) == ("1", "v0000", "p0-d0"), (
        "it starts as it did first"
    )
    engines.update_policy(PAYLOAD, 5)
    assert engines.stand_ins[1].log == [], "nothing is asked of an engine that starts"
    engines.set_num_speculative_tokens(3)
    engines.set_num_speculative_tokens(0)
    started(None)
    back = ["node of rollout_1/drafter.safetensors p5", "update", "draft 0"]
    assert engines.in_dispatch == [0, 1] and engines.stand_ins[1].log == back
    assert engines.stand_ins[1].served == [0, 3], "and it is given what is of record"
    with pytest.raises(RunFailure, match="died"):
        Engines(Engine()).lose(0, RunFailure("it died"))


def test_an_engine_that_comes_back_with_other_weights_ends_the_run() -> None:
    engines = Engines(Engine(), Engine())
    engines.update_policy(PAYLOAD, 4)
    engines.lose(1, RunFailure("it died"))
    engines.stand_ins[1].digests = {"fc.weight": "01"}
    with pytest.raises(RunFailure, match="rollout_1 was started again and does not serve what the others do"):
        engines.come_back(1)
    assert engines.in_dispatch == [0]


def test_an_engine_that_dies_again_and_again_stays_away() -> None:
    engines = Engines(Engine(), Engine())
    for death in range(MOST_RESTARTS + 1):
        engines.lose(1, RunFailure("it died"))
        assert len(engines.starting) == min(death + 1, MOST_RESTARTS)
        if death < MOST_RESTARTS:
            engines.come_back(1)
    assert engines.in_dispatch == [0]


def test_all_engines_know_the_same_history() -> None:
    engines = Engines(Engine(), Engine(), Engine(), history=True)
    engines.share_history(1, "a reference")
    assert [engine.log for engine in engines.stand_ins] == [["learn a reference"], [], ["learn a reference"]]
    assert engines.history_metrics() == {"history/tokens": 50, "history/bytes": 1800}
    engines.lose(2, RunFailure("it died"))
    engines.come_back(2)
    file = "shm/node of rollout_0/rollout_0/history.safetensors"
    assert engines.stand_ins[0].log[-1] == f"save {file}"
    assert engines.stand_ins[2].log == [f"load node of rollout_2/{file}", "draft None"]
    engines.save_history(Path("checkpoint"))
    assert engines.stand_ins[0].log[-1] == "save checkpoint"


def test_an_engine_that_dies_while_it_learns_is_lost_once() -> None:
    """What was shared with it says nothing of the one that takes its place."""
    dying = {"refuses": "learn a reference", "error": RunFailure}
    engines = Engines(Engine(), Engine(**dying), history=True)
    engines.share_history(0, "a reference")
    assert engines.in_dispatch == [0, 1]
    engines.history_metrics()
    assert engines.in_dispatch == [0]
    engines = Engines(Engine(), Engine(**dying), history=True)
    engines.share_history(0, "a reference")
    engines.lose(1, RunFailure("it died"))
    engines.come_back(1)
    engines.history_metrics()
    assert engines.in_dispatch == [0, 1]


def test_what_an_engine_has_seen_is_known_by_its_number_whichever_are_away() -> None:
    stand_ins = [Engine() for _ in range(3)]
    for i, engine in enumerate(stand_ins):
        engine.window = Window(GainReport(i), [StepTotal(0, i + 1, "steady", 1, 1, 0.1)])
    engines = engines_of(*stand_ins)
    engines.lose(0, RunFailure("it died"))
    assert engines.call_all(RolloutEngine.take_window) == {1: stand_ins[1].window, 2: stand_ins[2].window}


def test_no_two_engines_of_any_runs_or_attempts_draw_the_same_noise() -> None:
    def seeds(seed: int, first_step: int) -> list[int]:
        return [spec.seed for _, spec in Engines(*[Engine()] * 4, seed=seed).start_after(first_step)]

    found = [seed for run in range(50) for first_step in (0, 1, 40) for seed in seeds(run, first_step)]
    assert len(set(found)) == len(found) == 600
    assert all(0 <= seed < 2**31 for seed in found)  # what NumPy and vLLM take
    assert seeds(7, 3) == seeds(7, 3)
