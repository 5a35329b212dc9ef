import io

import pytest

from cotrain.records import Versions
from cotrain.run.console import Console, RunSummary, step_line, summary_lines
from cotrain.run.run_dir import RunDir

FULL = {
    "time/step_s": 8.1,
    "policy/reward": 0.41,
    "rollout/response_length": 87.2,
    "rollout/acceptance_length": 2.31,
    "rollout/expected_acceptance_length": 2.28,
    "rollout/drafted_tokens": 300,
    "rollout/num_drafts": 100,
    "rollout/speedup_vs_no_speculation": 1.34,
    "rollout/tokens_per_s": 512.3,
    "policy/kl": 0.003,
}


@pytest.fixture
def stream():
    return io.StringIO()


@pytest.fixture
def run(tmp_path):
    with RunDir.create(tmp_path / "runs", "first") as run_dir:
        yield run_dir


def test_the_step_line_of_a_step_that_measured_everything(stream):
    Console(stream).step(12, 40, FULL, Versions(12, 5))
    assert stream.getvalue() == (
        "step 12/40  8.1s  reward 0.41  len 87  accept 2.31 (exp 2.28)  k 3  gain 1.34x  tok/s 512  kl 0.003"
        "  p12 d5  eta 4m\n"
    )


def test_what_a_run_does_not_have_is_left_out():
    metrics = {"time/step_s": 1.0, "policy/reward": 0.5, "policy/kl": None}
    assert step_line(1, 2, metrics, Versions(1, 0)) == "step 1/2  1.0s  reward 0.50  p1 d0"


def test_a_draft_length_below_k_shows_as_it_was():
    assert "  k 2.5  " in step_line(1, 2, FULL | {"rollout/drafted_tokens": 250}, Versions(1, 0))


def test_time_left_is_of_the_last_steps_and_ends_with_the_run(stream):
    console = Console(stream)
    for step, seconds in enumerate([100.0, *[2.0] * 10], start=1):
        console.step(step, 12, {"time/step_s": seconds}, Versions(step, 0))
    console.step(12, 12, {"time/step_s": 2.0}, Versions(12, 0))
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("eta 18m") and lines[-2].endswith("eta 2s") and "eta" not in lines[-1]


def test_steps_that_mlflow_lacks_are_in_the_line(stream):
    Console(stream).step(2, 2, {}, Versions(2, 0), missing_steps=3)
    assert stream.getvalue() == "step 2/2  p2 d0  mlflow 3 behind\n"


def test_notes_end_the_line(stream):
    Console(stream).step(
        2, 2, {}, Versions(2, 1), notes=["drafter kept back, no gain is certain", "without speculation"]
    )
    assert stream.getvalue() == "step 2/2  p2 d1  drafter kept back, no gain is certain  without speculation\n"


def test_the_banner_says_where_to_look(stream, run_config, run):
    Console(stream).banner(run_config(), run, {"mlflow": "cotrain ui --uri [5000]", "tap": "3 of 64 rollouts"})
    for text in (
        str(run.path),
        "4 (8 prompts x 8 samples)",
        f"tail -f {run.metrics}",
        "--uri [5000]",
        "  tap      3 of 64",
    ):
        assert text in stream.getvalue()


def test_phases_in_a_log_are_lines_and_those_of_a_step_are_silent(stream):
    console = Console(stream)
    with console.phase("loading the engine"):
        pass
    with console.phase("generating", terminal_only=True):
        pass
    assert stream.getvalue() == "loading the engine ...\nloading the engine: 0.0s\n"


def rows(**extra):
    return [
        {
            "step": i,
            "policy/reward": i / 10,
            "rollout/acceptance_length": 1 + i / 20,
            "drafter/published": i % 2,
            "time/step_s": 20.0,
        }
        | extra
        for i in range(1, 21)
    ]


def summary(config, run, rows, **changes):
    facts = {
        "stopped_early": False,
        "greedy_identical": True,
        "speculation": "k=2 at batch 1 (gain 1.21x), off from batch 2: 0.78x at k=1",
        "drafter_uri": "models:/x-drafter@serving",
        "next_commands": [("go on", "cotrain train a.toml --resume first steps=40")],
    }
    return "\n".join(summary_lines(config, run, rows, RunSummary(**facts | changes)))


def test_the_summary_of_a_whole_run(run_config, run):
    text = summary(run_config(steps=20), run, rows())
    for part in (
        "Done: 20 of 20 steps in 7m",
        "reward       0.35 -> 1.75",
        "acceptance   1.18 -> 1.88",
        "4 the most",
        "swaps        10 drafters",
        "identical with and without speculation",
        "models:/x-drafter@serving",
        "go on  cotrain train a.toml --resume first steps=40",
    ):
        assert part in text


def test_a_step_with_a_handful_of_drafts_counts_for_little(run_config, run):
    first = {"rollout/num_drafts": 4, "rollout/acceptance_length": 4.0}
    steps = [
        {"step": 1, **first},
        *({"step": i, "rollout/num_drafts": 96} | {"rollout/acceptance_length": 1.1} for i in range(2, 7)),
    ]
    text = summary(run_config(steps=6), run, [*steps, {"step": 7, "rollout/num_drafts": 0.0}])
    assert f"acceptance   {(4 * 4.0 + 96 * 1.1) / 100:.2f} -> 1.10 " in text


def test_the_summary_tells_what_was_proven_and_decided(run_config, run):
    checks = {"lossless/check": 1.0, "lossless/tokens": 2048.0, "lossless/passed": 1.0}
    checks["lossless/speculated_tokens"] = 1500.0
    steps = [row | ({"gate/publish": float(row["step"] % 4 > 0)} | checks if row["step"] < 9 else {}) for row in rows()]
    steps[6]["drafter/rolled_back"] = 1.0
    text = summary(run_config(steps=20), run, steps)
    assert "swaps        10 drafters put into the running engine, 2 kept back by the gate, 1 times back" in text
    seen = "lossless     verified on 16,384 sampled tokens, 12,000 of them speculated (8 checks in this run)"
    assert f"{seen}; greedy output identical with" in text
    assert "speculation  k=2 at batch 1 (gain 1.21x), off from batch 2: 0.78x at k=1" in text
    steps[3]["lossless/passed"] = 0.0
    assert "lossless     1 of 8 checks FAILED" in summary(run_config(steps=20), run, steps)


def test_the_summary_says_that_speculation_was_not_checked(run_config, run):
    """Without a check, and with checks of rollouts of which nothing was speculated."""
    empty = {"lossless/check": 1.0, "lossless/tokens": 2048.0, "lossless/passed": 1.0}
    for steps in (rows(), rows(**empty), rows(**empty, **{"lossless/speculated_tokens": 0.0})):
        text = summary(run_config(steps=20), run, steps, greedy_identical=None)
        assert "lossless     not checked in this run: no check held 100 speculated tokens (cotrain verify" in text
        assert "verified" not in text and "passed" not in text
    text = summary(run_config(lossless={"every": 0}), run, rows())
    assert "lossless     not checked in this run: lossless.every is 0; greedy output identical with" in text


def test_the_summary_claims_no_speed_that_was_not_measured(run_config, run):
    text = summary(run_config(), run, rows())
    assert "not measured in this run" in text and "times no speculation" not in text
    text = summary(run_config(), run, rows(**{"rollout/speedup_vs_no_speculation": 0.9}))
    assert "decoding 0.90 -> 0.90 times no speculation, by step times measured" in text


def test_the_summary_says_what_went_wrong(run_config, run):
    text = summary(run_config(), run, rows()[:3], greedy_identical=False, stopped_early=True, drafter_uri=None)
    assert "Stopped: 3 of 4 steps" in text and "DIFFERS" in text and "MLflow" not in text


def test_the_summary_of_a_run_without_a_drafter(run_config, run):
    text = summary(run_config(drafter=None), run, [], drafter_uri=None, greedy_identical=None, speculation="")
    assert "drafter" not in text and "acceptance" not in text
