"""The sidecar in an engine with vLLM's model runner V2: its own runner, input batch and speculator, on the CPU.

What stands for a GPU is Triton's interpreter; CUDA graphs and streams are not there.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from cotrain.transport.spool import Offer, State, read_json, write_json
from drafters.base import Drafter
from tests.engine.interpreted_triton import INTERPRETED
from tests.engine.sidecar_host import running_host
from tests.engine.test_sidecar_engine import Sidecar, error, holes, prompts
from tests.sidecar_parts import host_environment, make_spool

pytestmark = [pytest.mark.engine, pytest.mark.long]  # minutes

TOKENS, REQUESTS = 8, 4
GREEDY = {"temperature": 0.0, "max_tokens": TOKENS}


class SidecarV2(Sidecar):
    """A step takes a second, so less is generated, and always greedily."""

    def drafts(self) -> tuple[list[list[int]], int, int]:
        """The same texts each time, and of how many tokens they were drafted, and how many of these accepted."""
        before = self.host("counts")
        texts = self.wave(1, REQUESTS, **GREEDY)
        after = self.host("counts")
        return texts, *(after[name] - before.get(name, 0) for name in ("drafted_tokens", "accepted_tokens"))


@pytest.fixture(scope="module")
def texts(target_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What the host generates by itself."""
    environment = host_environment(tmp_path_factory.mktemp("plain"), None) | INTERPRETED
    with running_host(target_folder, environment, "interpreted") as plain:
        return plain("generate", prompts(REQUESTS, 1), GREEDY)


@pytest.fixture(scope="module")
def sidecar(
    target_folder: Path, untrained_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[SidecarV2]:
    """The tests below use one engine, in their order."""
    folder = tmp_path_factory.mktemp("sidecar")
    spool = make_spool(folder / "spool", target_folder, untrained_drafter, max_bytes=2**24)
    with running_host(target_folder, host_environment(folder, spool) | INTERPRETED, "interpreted") as host:
        yield SidecarV2(host, spool)


def test_requests_are_tapped_whole_and_the_text_is_that_of_an_engine_without_it(
    sidecar: SidecarV2, texts: list[list[int]], target_model: Any
) -> None:
    assert sidecar.state.reason is None
    assert sidecar.drafts() == (texts, pytest.approx(3 * REQUESTS * (TOKENS - 1), rel=0.4), pytest.approx(0, abs=4))
    sidecar.settle()
    taken = [record for record, _ in sidecar.take()]
    assert sorted(r.token_ids[12:].tolist() for r in taken) == sorted(texts)
    assert [holes(r) for r in taken] == [0] * REQUESTS
    assert max(error(r, target_model) for r in taken) < 1e-4


def test_a_drafter_is_swapped_in_and_accepted(
    sidecar: SidecarV2, texts: list[list[int]], fitted_drafter: Drafter
) -> None:
    version = sidecar.publish(fitted_drafter.state_for_serving())
    same, drafted, accepted = sidecar.drafts()
    assert same == texts and accepted > drafted / 5
    sidecar.settle()
    assert (sidecar.state.drafter_version, sidecar.state.reason) == (version, None)
    assert sum(record.drafter_version == version for record, _ in sidecar.take()) == REQUESTS


def test_draft_length_0_drafts_nothing_until_it_is_raised(sidecar: SidecarV2, texts: list[list[int]]) -> None:
    offer = read_json(sidecar.spool.current, Offer)
    write_json(sidecar.spool.current, replace(offer, on=False))
    assert sidecar.drafts() == (texts, 0, 0)
    write_json(sidecar.spool.current, offer)
    same, drafted, _ = sidecar.drafts()
    assert same == texts and drafted > 0 and sidecar.state.reason is None


def test_an_update_in_mid_generation_leaves_no_mixed_rollout(
    sidecar: SidecarV2, moved_target_state: dict, tmp_path: Path
) -> None:
    sidecar.settle()
    sidecar.take()
    save_file(moved_target_state, tmp_path / "moved.safetensors")
    sidecar.host("begin", prompts(REQUESTS, 8), 16, 4, 0.0)
    sidecar.host("load", str(tmp_path / "moved.safetensors"))
    sidecar.host("end")
    sidecar.settle()
    told_of = [(record, told) for record, told in sidecar.take() if told.earlier]
    assert len(told_of) == REQUESTS
    for record, told in told_of:
        ((versions, start, end),) = told.earlier
        assert (versions.policy, start, record.policy_version) == (0, 0, 1) and 4 <= end < 16
        assert record.feature_mask.nonzero()[0] == 12 + end - 1 and holes(record) == 12 + end - 1


HOOK = "cotrain.engine.model_runner_v2"


@pytest.mark.parametrize("fault", ["SpeculatorHook.propose", "SpeculatorHook._layout", "SpeculatorHook.__init__"])
def test_a_fault_in_the_hook_leaves_the_host_its_text(
    fault: str, texts: list[list[int]], target_folder: Path, untrained_drafter: Drafter, tmp_path: Path
) -> None:
    spool = make_spool(tmp_path / "spool", target_folder, untrained_drafter)
    environment = host_environment(tmp_path / "plugin", spool) | INTERPRETED
    with running_host(target_folder, environment, "interpreted", f"{HOOK}.{fault}") as host:
        sidecar = SidecarV2(host, spool)
        assert sidecar.drafts()[0] == texts and sidecar.drafts() == (texts, 0, 0)
        state = read_json(sidecar.engine.state, State)
    expected = "planted" if fault == "SpeculatorHook.__init__" else "have failed"
    assert expected in state.reason
