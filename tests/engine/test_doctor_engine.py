"""The engine checks of `cotrain doctor`: all pass on a sound engine, and each planted fault fails the check of its name."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest

from cotrain.rollout.vllm import weights
from cotrain.rollout.vllm.cpu import fork_engine_core
from pipelines.doctor import engine as doctor_engine
from pipelines.doctor.check import Check, run_check
from pipelines.doctor.command import ENGINE, identifier
from pipelines.doctor.engine import EngineChecks, started_engine
from pipelines.doctor.worker import DoctorWorker

pytestmark = pytest.mark.engine

QUICK = ("tap", "drafter-swap", "read-back")
Replace = Callable[[Any, str, Any], None]


class PlantingWorker(DoctorWorker):
    """A worker with faults on request."""

    _cotrain_planted: list[tuple[Any, str, Any]]

    def cotrain_plant(self, fault: str | None) -> None:
        """Take out what was planted before, then plant this one; None leaves the worker sound."""
        for owner, name, original in reversed(getattr(self, "_cotrain_planted", [])):
            setattr(owner, name, original)
        self._cotrain_planted = []

        def replace(owner: Any, name: str, new: Any) -> None:
            self._cotrain_planted.append((owner, name, getattr(owner, name)))
            setattr(owner, name, new)

        if fault is not None:
            FAULTS[fault][0](self, replace)


def wrong_layer_ids(worker: Any, replace: Replace) -> None:
    """The target hands over the states of the layers above those that the drafter was made for."""
    model = worker.get_model().model
    replace(model, "aux_hidden_state_layers", tuple(layer + 1 for layer in model.aux_hidden_state_layers))


def tap_shifted_by_one(worker: Any, replace: Replace) -> None:
    """Every row is kept one position too late."""
    tap = worker._cotrain_hook.tap
    record = tap.record
    replace(tap, "record", lambda name, first, *rows: record(name, first + 1, *rows))


def states_shifted_by_one(worker: Any, replace: Replace) -> None:
    """Every token's row holds the hidden state of the token before it."""
    tap = worker._cotrain_hook.tap
    record = tap.record
    replace(tap, "record", lambda name, first, ids, hidden: record(name, first, ids, hidden.roll(1, 0)))


def drafter_update_swallowed(worker: Any, replace: Replace) -> None:
    """An update of the drafter is taken and never loaded."""
    replace(worker._cotrain_weights[True], "_serve", lambda *arguments: None)


def stale_drafter(worker: Any, replace: Replace) -> None:
    """The new drafter can be read back, and drafting goes on with the token map of the one before."""
    proposer = worker.model_runner.drafter
    served, original = proposer.model.draft_id_to_target_id, proposer._sample_draft_tokens
    before = served.detach().clone()

    def sample(*arguments: Any) -> Any:
        new, served.data = served.data, before
        try:
            return original(*arguments)
        finally:
            served.data = new

    replace(proposer, "_sample_draft_tokens", sample)


def read_back_finds_nothing(worker: Any, replace: Replace) -> None:
    """The comparison of what is served with what was sent is always content."""
    replace(weights, "differing_tensors", lambda *arguments: [])


def read_back_of_the_first_column(worker: Any, replace: Replace) -> None:
    """Only the first column of a matrix is compared."""
    compare = weights.differing_tensors

    def first_column(model: Any, expected: dict, *rest: Any) -> list[str]:
        served = {name: tensor for name, tensor, _ in weights.served_tensors(model, expected)}
        kept = {name: served[name].to(t.dtype).clone() if t.dim() == 2 else t for name, t in expected.items()}
        for name, tensor in expected.items():
            if tensor.dim() == 2:
                kept[name][:, 0] = tensor[:, 0]
        return compare(model, kept, *rest)

    replace(weights, "differing_tensors", first_column)


FAULTS = {
    "wrong layer ids": (wrong_layer_ids, "tap", "configured [2, 4, 5], they look like layers [3, 5"),
    "tap shifted by one": (tap_shifted_by_one, "tap", "rows of"),
    "states shifted by one": (states_shifted_by_one, "tap", "the engine's hidden states are not"),
    "drafter update swallowed": (drafter_update_swallowed, "drafter-swap", "other tensors are served"),
    "stale drafter": (stale_drafter, "drafter-swap", "drafts with another drafter than the one that was swapped in"),
    "broken read-back": (read_back_finds_nothing, "read-back", "misses one: ['d2t', 'fc.weight'"),
    "read-back of a part": (read_back_of_the_first_column, "read-back", "misses one: ['fc.weight'"),
}
"""What is planted, the one check that it fails, and a part of what that check says."""


@pytest.fixture(scope="module")
def make() -> Iterator[Callable[..., Any]]:
    """make(name) makes checks of one running engine; make(name, fault) with a fault planted, which is taken out after."""
    with pytest.MonkeyPatch.context() as patch, asyncio.Runner() as runner:
        patch.setattr(doctor_engine, "WORKER", f"{__name__}.PlantingWorker")
        fork_engine_core()
        stack = AsyncExitStack()
        checks: EngineChecks = runner.run(stack.enter_async_context(started_engine()))
        plant = partial(checks.engine._call, "cotrain_plant")

        def make_checks(*names: str, fault: str | None = None) -> list[Check]:
            runner.run(plant(fault))
            try:
                return [runner.run(run_check(n, getattr(checks, identifier(n)), ENGINE[n])) for n in names]
            finally:
                runner.run(plant(None))

        yield make_checks
        runner.run(stack.aclose())


def test_a_sound_engine_passes_every_check(make: Callable[..., list[Check]]) -> None:
    _, *names = ENGINE
    for check in make(*names):
        assert check.status == ("not applicable" if check.name == "cuda-graphs" else "pass"), check


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_fails_the_check_of_its_name(make: Callable[..., list[Check]], fault: str) -> None:
    _, name, found = FAULTS[fault]
    failed = [check for check in make(*QUICK, fault=fault) if check.status != "pass"]
    assert [check.name for check in failed] == [name]
    assert found in failed[0].found and failed[0].remedy == ENGINE[name]
