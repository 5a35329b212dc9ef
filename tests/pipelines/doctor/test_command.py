"""What the command prints and returns, and how one check's failure leaves the others alone."""

import asyncio
import json
import sys
from io import StringIO
from pathlib import Path

import pytest

from pipelines.doctor import machine
from pipelines.doctor.check import Check, NotApplicable, Problem, run_check
from pipelines.doctor.command import ENGINE, MACHINE, NODES, Doctor, identifier, main, print_table
from pipelines.doctor.engine import EngineChecks, constant_drafts, graph_problem
from pipelines.doctor.nodes import Nodes


def test_every_check_has_its_function_and_a_remedy_in_a_sentence() -> None:
    assert all(callable(getattr(machine, identifier(name))) for name in MACHINE)
    assert all(callable(getattr(Nodes, identifier(name))) for name in list(NODES)[1:])
    assert all(callable(getattr(EngineChecks, identifier(name))) for name in list(ENGINE)[1:])
    for remedy in (MACHINE | NODES | ENGINE).values():
        assert remedy[0].isupper() and remedy.endswith(".")


def test_whatever_a_check_raises_is_its_outcome() -> None:
    def made(error: Exception | None) -> tuple[str, str, str]:
        async def function() -> str:
            if error is not None:
                raise error
            return "fine"

        check = asyncio.run(run_check("name", function, "Mend it."))
        return check.status, check.found, check.remedy

    assert made(None) == ("pass", "fine", "")
    assert made(Problem("broken")) == ("fail", "broken", "Mend it.")
    assert made(NotApplicable("no GPU")) == ("not applicable", "no GPU", "")
    assert made(KeyError()) == ("fail", "KeyError", "Mend it.")


def test_a_failure_has_status_1_a_remedy_and_the_place_of_the_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "SHARED_MEMORY", tmp_path / "shm")
    monkeypatch.setattr(machine, "DISK_GIB", 0.0)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["--only", "shared-memory", "disk", "--json", str(tmp_path / "out.json")]) == 1
    printed = " ".join(capfd.readouterr().out.split())
    assert "is missing or cannot be written" in printed and MACHINE["shared-memory"] in printed
    assert "2 checks in " in printed and "failed: shared-memory" in printed
    log = Path(printed.split()[-1])
    assert log.name == "engine.log" and log.is_file()
    report = json.loads((tmp_path / "out.json").read_text())
    assert not report["passed"] and report["packages"]["python"]
    assert [(check["name"], check["status"]) for check in report["checks"]] == [
        ("shared-memory", "fail"),
        ("disk", "pass"),
    ]


def test_json_alone_is_on_standard_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["--only", "python", "--json", "-"]) == 0
    printed = capfd.readouterr()
    assert json.loads(printed.out)["passed"]
    assert "1 checks in" in printed.err
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--only", "tapp"])
    assert exit.value.code == 2 and "invalid choice: 'tapp'" in capsys.readouterr().err


def test_without_an_engine_its_checks_are_not_applicable(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path) -> None:
        raise ValueError("policy.model: the cache cannot be written")

    monkeypatch.setattr("pipelines.doctor.engine.prepare", refuse)
    doctor = Doctor({"tap", "step-time"}, sys.stdout)
    asyncio.run(doctor.make_all(None))
    assert [(check.name, check.status, check.found) for check in doctor.checks] == [
        ("engine", "fail", "policy.model: the cache cannot be written"),
        ("tap", "not applicable", '"engine" has failed'),
        ("step-time", "not applicable", '"engine" has failed'),
    ]


def test_the_remedy_stands_below_what_was_found() -> None:
    stream = StringIO()
    print_table([Check("tap", "fail", "[2] is another layer", "Look at it.", 1.0)], stream)
    *_, found, remedy, _ = stream.getvalue().splitlines()
    assert found.split() == ["tap", "fail", "[2]", "is", "another", "layer"] and remedy.split() == ["Look", "at", "it."]


GRAPHS = {"mode": "FULL_AND_PIECEWISE", "sizes": [1, 4, 64], "captured": 7, "steps": {200: "NONE", 64: "FULL"}}


@pytest.mark.parametrize(
    ("lost", "problem"),
    [
        ({}, None),
        ({"mode": "NONE"}, "no CUDA graph is captured (cudagraph_mode NONE)"),
        ({"captured": 0}, "no CUDA graph is captured (cudagraph_mode FULL_AND_PIECEWISE)"),
        ({"sizes": []}, "the largest CUDA graph has 0 rows"),
        ({"sizes": [1, 4, 63]}, "the largest CUDA graph has 63 rows, a step of all requests and drafts has 64"),
        ({"steps": {64: "NONE"}}, "with the tap on, a step of 64 rows leaves the CUDA graphs"),
        ({"steps": {16: "FULL"}}, "no step of 64 rows was made with the tap on, only of [16]"),
    ],
)
def test_lost_graphs_are_found(lost: dict, problem: str | None) -> None:
    found = graph_problem(**GRAPHS | lost, rows=16 * (3 + 1))
    assert found is None if problem is None else found is not None and found.startswith(problem)


def test_the_steps_of_a_constant_drafter_are_those_of_its_text() -> None:
    text = [9, 7, 7, 7, 7, 5, 7, 5]
    assert constant_drafts(text, 7, 3) == [(3, 3), (3, 0), (3, 1)]
    assert constant_drafts(text, 8, 2) == [(2, 0)] * 7
