"""What the command prints and returns, and how one check's failure leaves the others alone."""

import json
from pathlib import Path

import pytest

from cotrain.config.load import load_config
from cotrain.process.cluster import place
from pipelines.doctor import engine, machine
from pipelines.doctor.command import Check, main, run_check
from pipelines.doctor.machine import MACHINE
from pipelines.preflight import find_problems


def test_every_remedy_is_a_sentence() -> None:
    for remedy in (*(remedy for _, remedy in MACHINE.values()), *engine.REMEDIES.values()):
        assert remedy[0].isupper() and remedy.endswith(".")


def test_whatever_a_check_raises_is_its_outcome() -> None:
    def made(error: Exception | None) -> tuple[str, str, str]:
        def function() -> str:
            if error is not None:
                raise error
            return "fine"

        check = run_check("name", function, "Mend it.")
        return check.status, check.found, check.remedy

    assert made(None) == ("pass", "fine", "")
    assert made(ValueError("broken")) == ("fail", "broken", "Mend it.")
    assert made(KeyError()) == ("fail", "KeyError", "Mend it.")


def test_a_failure_has_status_1_a_remedy_and_the_place_of_the_output(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    facts = json.dumps({"version": "2.12.1", "cuda": None, "gpus": 0})
    monkeypatch.setattr(machine, "output_of", lambda *_: facts)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["--only", "vllm", "torch", "--json", str(tmp_path / "out.json")]) == 1
    printed = " ".join(capfd.readouterr().out.split())
    assert "torch 2.12.1 is installed" in printed and MACHINE["torch"][1] in printed
    assert "2 checks in " in printed and "failed: torch" in printed
    log = Path(printed.split()[-1])
    assert log.name == "engine.log" and log.is_file()
    report = json.loads((tmp_path / "out.json").read_text())
    assert not report["passed"] and report["packages"]["python"]
    assert [(check["name"], check["status"]) for check in report["checks"]] == [
        ("torch", "fail"),
        ("vllm", "pass"),
    ]


def test_a_sound_machine_has_status_0_and_nothing_is_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["--only", "vllm", "--json", str(tmp_path / "out.json")]) == 0
    assert "1 checks in" in capfd.readouterr().out
    assert json.loads((tmp_path / "out.json").read_text())["passed"]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_an_unknown_check_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        main(["--only", "tapp"])
    assert exit.value.code == 2 and "invalid choice: 'tapp'" in capsys.readouterr().err


def test_verify_needs_the_drafter_of_a_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def output_of(*arguments: str) -> str:
        raise ValueError(f"cotrain: {arguments[2]} has died")

    monkeypatch.setattr(engine, "output_of", output_of)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert main(["--only", "verify", "--json", str(tmp_path / "out.json")]) == 1
    checks = json.loads((tmp_path / "out.json").read_text())["checks"]
    assert [(check["name"], check["found"]) for check in checks] == [("run", "cotrain: train has died")]


def test_a_run_that_swapped_and_checked_nothing_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(engine, "output_of", lambda *arguments: asked.append(arguments))
    (tmp_path / "run" / "drafters" / "v0001").mkdir(parents=True)
    rows = {"drafter/published": 2.0, "lossless/speculated_tokens": 0.0}
    (tmp_path / "run" / "metrics.jsonl").write_text(json.dumps({"step": 1} | rows) + "\n")
    with pytest.raises(
        ValueError, match="it swapped in 2 drafters and checked 0 speculated tokens; both must be above 0"
    ):
        engine.run(tmp_path, "auto")
    assert {"cluster.address=auto", "cluster.strategy=SPREAD"} < set(asked[0])
    config = load_config([], asked[0][3:])
    assert config.run_root == tmp_path and config.lossless.every == 1


def test_the_verdict_of_verify_is_what_was_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def output_of(*arguments: str) -> str:
        (tmp_path / "verify").mkdir()
        (tmp_path / "verify" / "verify.json").write_text('{"verdict": "NOT lossless: 3 of 80"}')
        raise ValueError("exit status 1: written to")

    monkeypatch.setattr(engine, "output_of", output_of)
    (tmp_path / "run" / "drafters" / "v0001").mkdir(parents=True)
    with pytest.raises(ValueError, match="NOT lossless: 3 of 80"):
        engine.verify(tmp_path)


def test_the_remedy_is_below_what_was_found() -> None:
    found, remedy = str(Check("tap", "fail", "[2] is another layer", "Look at it.")).splitlines()
    assert found.split() == ["tap", "fail", "[2]", "is", "another", "layer"] and remedy.split() == ["Look", "at", "it."]


def test_the_configuration_of_the_short_run_is_a_sound_one(tmp_path: Path) -> None:
    assert find_problems(load_config([], [*engine.RUN, *engine.DRAFTER, f"run_root={tmp_path}"])) == []


def test_on_several_gpus_the_short_run_has_two_learner_processes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(engine, "output_of", lambda *arguments: asked.append(arguments))
    for gpus in (2, 3):
        monkeypatch.setattr(engine, "machine", lambda gpus=gpus: {"gpus": ["GPU"] * gpus})
        with pytest.raises(ValueError):
            engine.run(tmp_path, None)
        config = load_config([], asked[-1][3:])
        assert config.policy.num_processes == gpus - 1 and place(config, [gpus])


@pytest.mark.parametrize(
    ("swaps", "engines", "changed", "passes"),
    [(2, "1 adopted", 4, True), (0, "1 adopted", 0, False), (2, "1 adopted", 5, False), (2, None, 0, False)],
)
def test_a_host_without_drafters_or_with_other_text_fails(
    swaps: int, engines: str | None, changed: int, passes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    printed = f"{changed} of 16 texts changed\n" + (f"  engines     {engines}\n" if engines else "")
    monkeypatch.setattr(engine, "output_of", lambda *arguments: printed)
    monkeypatch.setattr(engine, "resolve_model", Path)
    (tmp_path / "sidecar").mkdir()
    (tmp_path / "sidecar" / "metrics.jsonl").write_text(json.dumps({"step": 1, "drafter/published": swaps}) + "\n")
    if passes:
        assert engine.sidecar(tmp_path) == "1 adopted, 2 drafters swapped in, 4 of 16 texts changed"
    else:
        with pytest.raises(
            ValueError, match=rf"^{swaps} drafters swapped in, {changed} of 16 texts changed; engines: "
        ):
            engine.sidecar(tmp_path)
