"""The report of a run: what it says, and that it can always be drawn."""

import json
from contextlib import nullcontext
from pathlib import Path

import pytest

from cotrain.run.run_dir import RunDir
from pipelines.page.page import Section
from pipelines.page.record import read_run
from pipelines.train.report import run_facts, run_sections, write_run_report
from tests.pipelines.page.conftest import images, row, words, write_run


def facts(folder: Path) -> dict[str, str]:
    return run_facts(read_run(folder))


def plots(folder: Path) -> dict[str, Section]:
    """The sections of a run's page, by the name of their figure."""
    return {section.image.removesuffix(".png"): section for section in run_sections(read_run(folder)) if section.title}


@pytest.fixture
def full(tmp_path: Path) -> Path:
    drafts = {"rollout__num_drafts": 100.0, "rollout__drafted_tokens": 150.0}
    drafts |= {"time__training_cost_s": 2.0, "time__training_return_s": 0.3}
    return write_run(tmp_path / "full", [row(step, **drafts) for step in range(1, 13)])


def test_headline_facts(full: Path) -> None:
    assert facts(full) == {
        "reward": "0.25 -> 1.05   (mean of the first and the last third; higher is better)",
        "acceptance": "1.25 -> 2.05   (tokens per verification step; 1 is no gain, 3 the most)",
        "swaps": "12 drafters put into the running engine",
        "training": "cost 24.0s of this run and saved 3.6s of generation",
        "lossless": "not checked in this run, as no check held 100 speculated tokens (cotrain verify checks the engine)",
        "speed": "decoding 0.93 -> 1.00 times no speculation, by step times measured in this run",
    }
    head, short, *_ = run_sections(read_run(full))
    assert short.table is not None
    assert short.table.to_dict("tight")["data"] == [list(fact) for fact in facts(full).items()]
    assert ", 12 steps in 6m, 12,000 tokens generated\n" in head.text


def test_training_in_every_step_has_no_known_cost(tmp_path: Path) -> None:
    times = {"time__training_cost_s": 0.0, "time__training_return_s": 0.5, "drafter__train_s": 3.0}
    folder = write_run(tmp_path / "run", [row(step, **times) for step in range(1, 5)])
    expected = "took 12.0s beside the run and saved 2.0s of generation; what it added to the run is not known"
    assert facts(folder)["training"].startswith(expected)


def test_held_out_rewards_are_told_and_drawn(tmp_path: Path) -> None:
    scored = {"validation__reward": 0.25, "validation__reward_error": 0.05}, {"validation__reward": 0.5}
    rows = [row(1), row(2, **scored[0]), row(3), row(4, **scored[1], validation__reward_error=0.04)]
    folder = write_run(tmp_path / "run", rows)
    assert facts(folder)["validation"].startswith("0.25 -> 0.50 +- 0.04   (")
    assert "validation: 0.25 first, 0.50 last" in plots(folder)["reward"].numbers


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([None, 1.0, 2.0, None, 4.0, 5.0, 7.0, 9.0], "1.50 -> 8.00"),
        ([3.0], "3.00 -> 3.00"),
        ([None, None], "not measured"),
    ],
)
def test_a_change_is_over_measured_steps(tmp_path: Path, values: list[float | None], expected: str) -> None:
    rows = [row(step, policy__reward=value) for step, value in enumerate(values, 1)]
    assert facts(write_run(tmp_path / "run", rows))["reward"].startswith(f"{expected}   (")


def test_a_step_with_a_handful_of_drafts_counts_for_little(tmp_path: Path) -> None:
    served = [(4, 4.0), *[(96, 1.1)] * 5, (0, None)]
    rows = [
        row(step, rollout__num_drafts=drafts, rollout__acceptance_length=length)
        for step, (drafts, length) in enumerate(served, 1)
    ]
    expected = f"{(4 * 4.0 + 96 * 1.1) / 100:.2f} -> 1.10"
    assert facts(write_run(tmp_path / "run", rows))["acceptance"].startswith(f"{expected}   (")


def test_a_speed_that_was_not_measured_is_not_claimed(tmp_path: Path) -> None:
    rows = [row(step, rollout__speedup_vs_no_speculation=None) for step in range(1, 5)]
    folder = write_run(tmp_path / "run", rows)
    assert facts(folder)["speed"] == "not measured in this run, `cotrain bench` measures it"
    assert plots(folder)["speedup"].figure is None


CHECKED = {"lossless__passed": 1.0, "lossless__tokens": 2048.0, "lossless__speculated_tokens": 1500.0}


def test_what_was_checked_and_decided_is_told(tmp_path: Path) -> None:
    rows = [row(step, gate__publish=float(step % 4 > 0), **CHECKED if step < 9 else {}) for step in range(1, 13)]
    rows[6]["drafter/rolled_back"] = 1.0
    run = read_run(write_run(tmp_path / "run", rows))
    told = run_facts(run, "k=2 at batch 1 (gain 1.21x)", greedy_identical=True)
    assert list(told) == ["reward", "acceptance", "swaps", "lossless", "speculation", "speed"]
    assert told["swaps"].endswith("engine, 3 kept back by the gate, rolled back once")
    checked = "verified on 16,384 sampled tokens, 12,000 of them speculated (8 checks in this run)"
    assert told["lossless"] == f"{checked}; greedy output identical with and without speculation"
    assert told["speculation"] == "k=2 at batch 1 (gain 1.21x)"


def test_a_failed_check_is_told(tmp_path: Path) -> None:
    rows = [row(step, **CHECKED | {"lossless__passed": float(step > 1)}) for step in (1, 2, 3)]
    told = run_facts(read_run(write_run(tmp_path / "run", rows)), "", False)["lossless"]
    assert told == "1 of 3 checks FAILED; greedy output DIFFERS: please report this"


@pytest.mark.parametrize(
    ("every", "speculated", "reason"),
    [(1, None, "as no check held 100"), (1, 0.0, "as no check held 100"), (0, None, "as lossless.every is 0")],
)
def test_a_check_without_speculated_tokens_verifies_nothing(
    tmp_path: Path, every: int, speculated: float | None, reason: str
) -> None:
    rows = [row(step, **CHECKED | {"lossless__speculated_tokens": speculated}) for step in (1, 2)]
    found = facts(write_run(tmp_path / "run", rows, lossless={"every": every}))["lossless"]
    assert found.startswith(f"not checked in this run, {reason}")


def test_every_figure_of_the_page_is_beside_it_with_its_numbers(full: Path) -> None:
    (full / "report").mkdir()
    (full / "report" / "gone.png").write_bytes(b"")  # of an earlier report
    (full / "decisions.jsonl").write_text('{"step": 3, "kind": "published", "version": 1, "reason": ""}\n')
    page = write_run_report(full)
    assert page == full / "report" / "report.md"
    pngs = {path.name for path in page.parent.glob("*.png")}
    assert pngs == {f"{name}.png" for name, plot in plots(full).items() if plot.figure} == images(page).keys()
    assert len(pngs) == 7 and all(images(page).values())
    assert "served: 1.10 first, 2.20 last" in images(page)["acceptance_length.png"]
    figure = plots(full)["acceptance_length"].figure
    assert figure is not None
    drawn = {line.get_label() for line in figure.axes[0].lines}
    assert drawn >= {"served", "expected on unseen rollouts", "published"}


def test_a_cell_of_a_table_stays_one_cell(full: Path) -> None:
    (full / "decisions.jsonl").write_text('{"step": 3, "kind": "alarm", "version": 1, "reason": "a | b\\nc"}\n')
    assert "| a \\| b c" in write_run_report(full).read_text()


@pytest.mark.parametrize(
    ("steps", "failure", "warning"),
    [
        (12, None, ""),
        (20, None, "This run has made 12 of its 20 steps: it was stopped or killed, or still runs."),
        (
            20,
            "drafter: no <b>",
            "This run failed after step 12, and all below is about the steps before. drafter: no <b>",
        ),
        (12, "the page", "This run failed after step 12, and all below is about the steps before. the page"),
    ],
)
def test_a_run_that_ended_early_says_so_before_all_else(
    tmp_path: Path, steps: int, failure: str | None, warning: str
) -> None:
    folder = write_run(tmp_path / "run", [row(step) for step in range(1, 13)], steps=steps)
    (folder / "run.lock").touch()
    with pytest.raises(RuntimeError) if failure else nullcontext(), RunDir(tmp_path, "run") as run_dir:
        run_dir.start_attempt()
        if failure:
            raise RuntimeError(failure)
    assert read_run(folder).warning == warning
    head, _, _ = write_run_report(folder).read_text().partition("## In short")
    assert (f"**{warning}**" in head) == bool(warning)


def test_many_decisions_are_told_of_and_not_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [row(step) for step in range(1, 41)])
    lines = [{"step": step, "kind": "kept back", "version": 1, "reason": f"reason {step}."} for step in range(1, 41)]
    (folder / "decisions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = words(run_sections(read_run(folder)))
    assert "All are in decisions.jsonl." in text
    assert "reason 29." in text and "reason 28." not in text


def test_one_step_is_drawn(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "one", [row(1)])
    assert facts(folder)["acceptance"].startswith("1.10 -> 1.10   (")
    assert len(images(write_run_report(folder))) == 7


def test_a_run_without_a_drafter_says_so(tmp_path: Path) -> None:
    metrics = ("policy/reward", "time/step_s", "time/generate_s", "versions/policy")
    rows = [{"step": step} | {name: row(step)[name] for name in metrics} for step in (1, 2, 3)]
    folder = write_run(tmp_path / "plain", rows, drafter=None)
    assert "This run has no drafter" in words(run_sections(read_run(folder))) and list(facts(folder)) == ["reward"]
    assert "acceptance_length" not in plots(folder)
    assert plots(folder)["response_length"].figure is None


def test_a_frozen_drafter_has_no_loss_to_draw(tmp_path: Path) -> None:
    rows = [row(step, drafter__loss=None, drafter__published=0.0, versions__drafter=0) for step in (1, 2, 3)]
    folder = write_run(tmp_path / "frozen", rows, drafter={"model": {"type": "eagle3"}, "train": False})
    assert plots(folder)["drafter_loss"].figure is None
    assert "frozen eagle3" in next(run_sections(read_run(folder))).text


@pytest.mark.parametrize("value", [None, "missing"])
def test_nothing_measured_is_words_not_an_empty_figure(tmp_path: Path, value: str | None) -> None:
    rows = [dict.fromkeys(row(step)) | {"step": step} for step in (1, 2)]
    rows = [{"step": one["step"]} for one in rows] if value == "missing" else rows
    folder = write_run(tmp_path / "empty", rows)
    page = write_run_report(folder)
    assert images(page) == {}
    assert not list(page.parent.glob("*.png"))
    assert all(plot.text or plot.table is not None for plot in plots(folder).values())


def test_metrics_that_are_null_in_some_steps(tmp_path: Path) -> None:
    names = [name for name in row(1) if name != "step"]
    rows = [row(step) | {names[(step + i) % len(names)]: None for i in range(5)} for step in range(1, 60)]
    holes = plots(write_run(tmp_path / "holes", rows)).values()
    assert all(plot.figure.axes[0].has_data() for plot in holes if plot.figure)
    assert sum(plot.figure is not None for plot in holes) == 7


def test_the_stages_of_a_step_add_up_to_it(tmp_path: Path) -> None:
    rows = [row(step, time__generate_s=float(step)) for step in (1, 2, 3)]
    plot = plots(write_run(tmp_path / "run", rows))["time_per_stage"]
    assert plot.figure is not None
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in plot.figure.axes[0].lines}
    assert drawn == {"rollouts": [1, 2, 3], "policy and drafter training": [9, 9, 9], "rest": [20, 19, 18]}
    assert "rollouts 7%, policy and drafter training 30%, rest 63%" in plot.text


def test_decisions_are_marked_and_told(tmp_path: Path) -> None:
    rows = [row(step) for step in range(1, 9)]
    folder = write_run(tmp_path / "run", rows)
    reasons = {
        "published": "published: gain +0.3",
        "kept back": "kept back: no gain",
        "rolled back": "worse than promised",
    }
    for step, kind in ((2, "published"), (4, "kept back"), (5, "published"), (6, "rolled back")):
        line = {"step": step, "kind": kind, "version": 1, "reason": reasons[kind], "numbers": {}}
        with (folder / "decisions.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    text = words(run_sections(read_run(folder)))
    assert all(reason in text for reason in reasons.values())
    figure = plots(folder)["acceptance_length"].figure
    assert figure is not None
    drawn = {str(line.get_label()): list(line.get_xdata()) for line in figure.axes[0].lines}
    assert drawn["published"] == [2, 5]
    assert drawn["kept back"] == [4]
    assert drawn["rolled back"] == [6]


def test_lag_and_idle_shares_are_drawn(tmp_path: Path) -> None:
    lags = {"stream__lag_tokens_0": 30.0, "stream__lag_tokens_1": 70.0}
    rows = [row(1, stream__lag_tokens_0=100.0), row(2, **lags)]
    shares = {"idle/rollout_0": 0.0, "idle/policy": 0.6}
    rows = [one | shares | {"stream/groups_running": 2.0} for one in rows]
    found = plots(write_run(tmp_path / "run", rows, stream={"max_policy_lag": 1}))
    lag, idle = found["policy_lag"].figure, found["idle_time"].figure
    assert lag is not None and idle is not None
    drawn = {str(line.get_label()): list(line.get_ydata()) for line in lag.axes[0].lines}
    assert drawn == {"lag 0": [1.0, 0.3], "lag 1": [0.0, 0.7]}
    assert {str(line.get_label()) for line in idle.axes[0].lines} == {"rollout_0", "policy"}
    assert found.keys() - plots(write_run(tmp_path / "synchronous", rows)).keys() == {"policy_lag"}


def test_acceptance_of_turns_and_contexts_is_drawn(tmp_path: Path) -> None:
    placed = {"rollout__acceptance_turn_1": 1.5, "rollout__acceptance_turn_2": 1.2}
    placed |= {
        "rollout__acceptance_context_0": 1.5,
        "rollout__acceptance_context_512": 1.1,
        "rollout__acceptance_context_8192": 1.0,
    }
    found = plots(write_run(tmp_path / "turns", [row(step, **placed) for step in (1, 2)]))
    of = {
        name: [str(line.get_label()) for line in section.figure.axes[0].lines]
        for name, section in found.items()
        if section.figure
    }
    assert {"1", "2"} <= {*of["acceptance_by_turn"]}
    contexts = [label for label in of["acceptance_by_context"] if label.isdigit()]
    assert contexts == ["0", "512", "8192"]
