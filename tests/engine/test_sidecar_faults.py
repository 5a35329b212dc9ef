"""An error in any hook of the sidecar leaves the host's engine as it would be without: same text, no drafts, no error."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from drafters.base import Drafter
from tests.cotrain.sidecar.test_packaging import PROJECT, needed_by
from tests.sidecar_parts import ROOT, host_environment, make_spool

pytestmark = pytest.mark.engine

NOT_ADOPTED = [f"cotrain.engine.host.adoption.{name}" for name in ("check_arguments", "check_config", "_claim")]
NOT_ADOPTED += ["cotrain.engine.host.scheduling.HostScheduling"]
NOT_ATTACHED = [
    "cotrain.engine.host.scheduling.Decisions.__init__",
    "cotrain.engine.host.worker.WorkerSidecar",
    "cotrain.engine.host.worker.ServedWeights",
    "cotrain.engine.host.policy_watch.PolicyWatch.write",
    "cotrain.engine.cpu.correct",
]
SWITCHED_OFF = [
    *(f"cotrain.engine.host.scheduling.Decisions.{name}" for name in ("draft_lengths", "stamp", "observe", "finish")),
    "cotrain.engine.host.scheduling.generated_of",
    *(
        f"cotrain.engine.host.worker.WorkerSidecar.{name}"
        for name in ("_begin_segments", "_take", "_watch", "_follow_policy", "_write_policy", "_tap", "_report")
    ),
    "cotrain.engine.hooks.DraftingHook.record",
    "cotrain.engine.hooks.DraftingHook.propose",
]
FAULTS = {"configure": NOT_ADOPTED, "start": NOT_ATTACHED, "run": SWITCHED_OFF}


@pytest.fixture(scope="module")
def engines(
    target_folder: Path, untrained_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """What each engine did, by its fault."""
    folder = tmp_path_factory.mktemp("faults")
    spool = make_spool(folder / "spool", target_folder, untrained_drafter)
    environment = host_environment(folder / "plugin", spool) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    command = [sys.executable, str(ROOT / "tests/engine/sidecar_faults.py"), str(target_folder), json.dumps(FAULTS)]
    host = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert host.returncode == 0
    lines = [json.loads(line) for line in host.stdout.splitlines() if line.startswith('{"fault"')]
    return {line.pop("fault"): line for line in lines}


def test_an_engine_without_a_fault_drafts_and_generates_the_same(engines: dict[str, dict[str, Any]]) -> None:
    assert not engines["no sidecar"]["has_drafter"]
    assert engines["none"]["has_drafter"] and engines["none"]["drafted"][0] > 300
    assert engines["none"]["drafted"][1] == pytest.approx(2 * engines["none"]["drafted"][0], rel=0.2)
    assert engines["none"]["tokens"] == engines["no sidecar"]["tokens"]


@pytest.mark.parametrize("fault", NOT_ADOPTED)
def test_an_engine_that_cannot_be_adopted_is_configured_as_its_host_asked(
    fault: str, engines: dict[str, dict[str, Any]]
) -> None:
    assert engines[fault]["configured"] == engines["no sidecar"]["configured"]
    assert engines[fault]["configured"][0] is False, "no drafter"


@pytest.mark.parametrize("fault", NOT_ATTACHED)
def test_an_engine_that_starts_with_a_fault_never_drafts(fault: str, engines: dict[str, dict[str, Any]]) -> None:
    found = engines[fault]
    assert found["tokens"] == engines["no sidecar"]["tokens"]
    assert found["num_drawn"] == engines["no sidecar"]["num_drawn"]
    assert found["has_drafter"] and found["drafted"] == [0, 0]


@pytest.mark.parametrize("fault", SWITCHED_OFF)
def test_a_fault_leaves_the_host_its_text_and_switches_drafting_off(
    fault: str, engines: dict[str, dict[str, Any]]
) -> None:
    """Of the engine without a fault, which drafts until the fault is planted."""
    found, drafted = engines[fault], engines["none"]["drafted"][0]
    assert found["before"] > 0.8 * drafted
    assert found["tokens"] == engines["no sidecar"]["tokens"]
    assert found["num_drawn"] == engines["no sidecar"]["num_drawn"]
    first, second = found["drafted"]
    assert first == second < found["before"]


def test_what_an_engine_has_imported_needs_no_more_than_the_dependencies(engines: dict[str, dict[str, Any]]) -> None:
    assert needed_by(engines["modules"]["files"]) <= {*PROJECT["project"]["dependencies"], "vllm"}
