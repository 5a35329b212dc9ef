"""`cotrain simulate` as a user types it: the answer, and one message for each mistake."""

import re
import resource
from pathlib import Path

import pytest

from pipelines.cli import main
from tests.pipelines.simulate.planted_run import write_run
from tests.pipelines.test_cli import cotrain

CONFIGS = sorted((Path(__file__).parents[3] / "configs" / "simulate").glob("*.toml"))
CPU, H100, PAPER = map(str, CONFIGS)
NEVER = ["drafter.accept=[0.0]", "drafter.acceptance_length=none"]


def said(capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    """What the command prints, on one line."""
    assert main(["simulate", *arguments]) == status
    printed = capsys.readouterr()
    return " ".join((printed.err if status == 2 else printed.out).split())


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_system_that_is_checked_in_is_answered(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, str(path))
    for question in ("worth it?", "how sure?", "which k?", "what decides", "whole step"):
        assert question in text
    for k in (0, 1, 7):
        assert "generation" in said(capsys, str(path), f"drafter.k={k}")


def test_a_measured_system_has_a_verdict_as_sure_as_known_predictions_were(capsys: pytest.CaptureFixture[str]) -> None:
    assert "worth it? not certain: 1.10x for generation" in said(capsys, CPU)
    assert "worth it? no: 0.97x" in said(capsys, CPU, "drafter.k=3")
    text = said(capsys, PAPER)
    assert re.search(r"worth it\? yes: 1\.7\dx for generation, 1\.40x for whole steps", text)
    assert "-11% to +20% off: generation 1.47x to 1.99x" in text
    assert "6 1.41x" not in text and re.search(r"5 \d\.\d\dx, 6 \d\.\d\dx extrapolated", text)
    assert "adjusted to measured steps with k = 3, 5" in text and "envelope" not in text


def test_an_envelope_has_no_verdict_and_says_how_wrong_such_predictions_were(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for arguments in ([H100], [PAPER, "cost.drafted_k=[]"], [PAPER, "drafter.k=7"]):
        text = said(capsys, *arguments)
        assert "worth it? not known: " in text and "yes" not in text and "an envelope: no measured step" in text
        assert "predictions without measured steps with such drafts were -30% to +200% off" in text
        gain, low, high = map(float, re.findall(r"(?:known:|generation|to) (\d\.\d)x", text)[:3])
        assert low < gain / 2 and high == pytest.approx(gain / 0.7, abs=0.1)
        assert not re.search(r"\d\.\d\dx", text.partition("whole step ")[0]), "no third digit"
    assert "worth it? not known: 0." in said(capsys, H100, "drafter.accept=[0.1]", "drafter.acceptance_length=none")
    assert "worth it? no: " in said(capsys, H100, *NEVER)
    assert "worth it? no: 1.0x" in said(capsys, H100, *NEVER, "drafter.adaptive=true")


def test_the_answer_says_which_engine_it_is_of_and_what_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = said(capsys, H100)
    assert "engine vllm-2026: 1.2 ms of the host a step and 0.145 a draft pass, asynchronous scheduling in all" in text
    assert "engine nemo-rl-2026: 1.2 ms of the host a step and 1.56 a draft pass" in said(capsys, PAPER)
    given = ["cost.engine=vllm-2025", "cost.host_draft_ms=0.3", "cost.async_scheduling=without_drafts"]
    assert "vllm-2025: 1.2 ms of the host a step and 0.3 a draft pass, asynchronous scheduling in undrafted" in said(
        capsys, H100, *given
    )
    measured = tmp_path / "measured.toml"
    cells = [[k, n, 7 + 0.5 * k + 0.1 * n] for k in (0, 1, 3, 7) for n in (1, 64)]
    measured.write_text(f'[cost]\ncells = {cells}\ncells_context = 900\ncells_source = "a card, a date"\n')
    text = said(capsys, H100, str(measured))
    assert "a roofline with 8 measured steps (a card, a date), engine vllm-2026" in text and "envelope" not in text
    assert "worth it? yes: " in text and "EXTRAPOLATED" not in text


def test_what_lies_beyond_the_cells_is_marked(capsys: pytest.CaptureFixture[str]) -> None:
    assert "EXTRAPOLATED" not in said(capsys, CPU)
    more = f"workload.groups={[[[20 + i] for i in range(48)]]}"
    assert "EXTRAPOLATED at batch 33 to 48" in said(capsys, CPU, "system.max_num_seqs=64", more)
    assert "EXTRAPOLATED at batch 1 to 16" in said(capsys, CPU, "drafter.k=5")


def test_step_times_without_drafts_are_enough_where_none_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    plain = ["cost.cells=[[0, 1, 10], [0, 16, 12]]", "system.learner_seconds=1"]
    for none in ("drafter=none", "drafter.k=0"):
        assert "no drafter gives more than" in said(capsys, CPU, *plain, none)
    assert "steps with k = [0] tell nothing of k = 1: give cost.cells" in said(capsys, CPU, *plain, status=2)


def test_the_learner_bounds_what_a_drafter_can_give(capsys: pytest.CaptureFixture[str]) -> None:
    text = said(capsys, PAPER, "system.lag=1", "system.learner_seconds=100")
    assert "worth it? no: 1.77x for generation, 1.00x for whole steps" in text
    assert "no drafter gives more than 2.00x" in text
    text = said(capsys, PAPER, "drafter=none", "system.learner_seconds=150")
    assert "the learner is the limit at any speed" in text and "worth it?" not in text


def test_the_answer_comes_in_seconds_without_torch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = cotrain("simulate", PAPER, without_torch=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    # Processor time. The usual machine takes 1.5 s; a slow and busy one takes up to five times as long.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 20.0


def test_a_run_is_a_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run"))
    assert "k<=2 by batch" in said(capsys, "--run", run) and "step times: measured" in said(
        capsys, "--run", run, "drafter.k=1"
    )


def test_help_explains_fields_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    text = capsys.readouterr().out
    for part in (
        "[system]",
        '[cost]  type = "roofline"',
        '[cost]  type = "cells"',
        "[drafter]",
        "drafted_k",
        "--run quickstart",
    ):
        assert part in text
    assert "[policy]" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SYSTEM.toml: give a system, for example configs/simulate/cpu.toml, or --run RUN"),
        ([CPU, "--run", "quickstart"], "SYSTEM.toml: give a system"),
        ([CPU, PAPER], "workload: limit, mean_length, responses would have no effect beside groups"),
        ([PAPER.replace("8b", "8")], "no such file; did you mean"),
        ([CPU, "drafter.kk=2"], "drafter.kk: unknown field; did you mean drafter.k?"),
        ([CPU, "system.slots=2", "drafter.k=two"], "2 problems in the configuration"),
        (["--run", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(Path(word).name for word in value) if isinstance(value, list) else "",
)
def test_mistakes_are_named(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert message in said(capsys, *arguments, status=2)


def test_a_study_is_no_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "study.json").write_text("{}")
    assert "it is a study; name one of its runs" in said(capsys, "--run", str(tmp_path), status=2)
