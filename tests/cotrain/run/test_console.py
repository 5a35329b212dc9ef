import io

import pytest

from cotrain.records import Versions
from cotrain.run.console import Console, aligned, step_line

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


def test_notes_end_the_line(stream):
    Console(stream).step(2, 2, {}, Versions(2, 1), ["mlflow 3 behind", "", "drafter kept back [5000]"])
    assert stream.getvalue() == "step 2/2  p2 d1  mlflow 3 behind  drafter kept back [5000]\n"


def test_a_line_that_would_be_too_long_goes_on_below(stream):
    lag = {"time/wait_for_rollouts_s": 3.0, "stream/lag_mean": 1.0, "idle/policy": 0.25, "idle/engines": 0.5}
    notes = ["mlflow 3 behind", "drafter kept back, no gain above the margin of 0.02 is certain", "x" * 60]
    Console(stream).step(12, 40, FULL | lag, Versions(12, 5), notes)
    first, *others = stream.getvalue().splitlines()
    assert first == (
        "step 12/40  8.1s  reward 0.41  lag 1.0  len 87  accept 2.31 (exp 2.28)  k 3  gain 1.34x  tok/s 512  kl 0.003"
        "  p12 d5"
    )
    assert others == [f"  eta 4m  idle e50% p25%  {notes[0]}  {notes[1]}", f"  {notes[2]}"]
    assert max(map(len, [first, *others])) <= 120


@pytest.mark.parametrize("kl", [0.0, 0.0004, -0.0004])
def test_a_divergence_that_is_rounding_is_not_shown(kl):
    assert "kl" not in step_line(1, 2, FULL | {"policy/kl": kl}, Versions(1, 0))
    assert "  kl -0.001  " in step_line(1, 2, FULL | {"policy/kl": -0.001}, Versions(1, 0))


def test_texts_are_broken_and_aligned_but_commands_are_whole():
    facts = {"lossless": "word " * 40, "": "", "run folder": "/" + "x" * 90}
    lines = aligned(facts, wraps=True).splitlines()
    assert [line[:14] for line in lines[:2]] == ["  lossless    ", " " * 14]
    assert max(map(len, lines[:2])) <= 120 and lines[2] == "" and lines[3].endswith("x" * 90)
    assert len(aligned({"go on": "word " * 40}).splitlines()) == 1


def test_phases_in_a_log_are_lines_and_those_of_a_step_are_silent(stream):
    console = Console(stream)
    with console.phase("loading the engine"):
        pass
    with console.phase("generating", terminal_only=True):
        pass
    assert stream.getvalue() == "loading the engine ...\nloading the engine: 0.0s\n"
