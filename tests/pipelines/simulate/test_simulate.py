"""`cotrain simulate` as a user types it: the answer, and one message for each mistake."""

import re
import resource
from pathlib import Path

import pytest

from pipelines.cli import main
from tests.pipelines.simulate.planted_run import write_run
from tests.pipelines.test_cli import cotrain

CONFIGS = sorted((Path(__file__).parents[3] / "configs" / "simulate").glob("*.toml"))
CPU = str(CONFIGS[0])
GPU = [
    CPU,
    f"cost.cells={[[k, n, 6 + 1.4 * k + 0.01 * n * (k + 1)] for k in (0, 3, 5) for n in (1, 32, 64)]}",
    "drafter.accept=[0.884, 0.771, 0.664]",
    "drafter.k=3",
    "system.max_num_seqs=64",
    "system.learner_seconds=1.5",
    f"workload.groups={[[[900 + 40 * i] for i in range(64)]]}",
]
"""A made-up system on which drafts pay."""


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
    text = said(capsys, *GPU)
    found = re.search(r"worth it\? yes: (\S+)x for generation, (\S+)x for whole steps", text)
    assert found and 1 < float(found[2]) < float(found[1]) < 3.32
    low, high = re.findall(r"-4% to \+20% off: generation (\S+)x to (\S+)x", text)[0]
    assert (float(low), float(high)) == pytest.approx((float(found[1]) / 1.2, float(found[1]) / 0.96), abs=0.02)
    assert re.search(r"3 \d\.\d\dx, 4 \d\.\d\dx, 5 \d\.\d\dx\);", text), "k = 6 and 7 lie wholly beyond the cells"
    assert "worth it? no: " in said(capsys, *GPU, "drafter.accept=[0.01]")
    assert "worth it? no: 1.00x" in said(capsys, *GPU, "drafter.accept=[0.01]", "drafter.adaptive=true")


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
    text = said(capsys, *GPU, "system.lag=1", "system.learner_seconds=100")
    assert re.search(r"worth it\? no: \S+x for generation, 1\.00x for whole steps", text)
    assert re.search(r"no drafter gives more than 1\.\d\dx", text)
    text = said(capsys, *GPU, "drafter=none", "system.learner_seconds=150")
    assert "the learner is the limit at any speed" in text and "worth it?" not in text


def test_the_answer_comes_in_seconds_without_torch() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = cotrain("simulate", *GPU, without_torch=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.returncode == 0, result.stderr
    # Of the processor, which other processes cannot change; 1.5 s measured.
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 6.0


def test_a_run_is_a_system_by_its_own_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path / "run"))
    assert "k<=2 by batch" in said(capsys, "--run", run) and "step times: measured" in said(capsys, "--run", run, "k=1")
    assert "bound 10%" in said(capsys, "--run", run, "--check")
    assert "--check: it predicts a run as it was" in said(capsys, "--run", run, "--check", "k=1", status=2)


def test_help_explains_fields_and_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["simulate", "--help"])
    text = capsys.readouterr().out
    for part in (
        "[system]",
        "[cost]",
        "[drafter]",
        "prefill_tokens_per_s",
        "--check",
    ):
        assert part in text
    assert "[policy]" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "SYSTEM.toml: give one system, for example configs/simulate/cpu.toml, or --run RUN"),
        ([CPU, "other.toml"], "SYSTEM.toml: give one system"),
        ([CPU, "--check"], "--check: it predicts a run as it was; name the run with --run"),
        ([CPU.replace("cpu", "cp")], "no such file; did you mean"),
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
