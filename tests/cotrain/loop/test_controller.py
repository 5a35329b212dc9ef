"""Whole steps of the controller with simulated roles: what it writes, when it stops, and that a resume changes nothing."""

import errno
import os
import shutil
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from typing import Any

import pytest

from cotrain.loop.controller import Controller
from cotrain.loop.ledger import Group
from cotrain.process.calls import Reply
from cotrain.process.failures import RunFailure, SelfCheckFailed, TaskFailed
from cotrain.publish.alarms import DrafterAlarm
from cotrain.records import (
    GainReport,
    Prompt,
    RolloutBatch,
    RolloutRequest,
    SwapReport,
    Versions,
    WeightPayload,
    Window,
)
from cotrain.run.checkpoint import RunState, latest_checkpoint
from cotrain.run.rows import read_rows
from cotrain.trainer import spec
from tests.cotrain.publish.simulated_run import GOOD, PROMPTS, SAMPLES, World
from tests.cotrain.simulated_roles import Drafter, Engines, Policy, go, output

NO_DRAFTS = GainReport(seconds=1.0, seconds_without=1.0)
"""The report of a step in which speculation would not have paid."""


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_every_sample_of_a_run_has_a_seed_of_its_own_where_drafts_allow_it(start: Any, method: str) -> None:
    controller = start(World(), method=method)
    go(controller, 3)
    seeds = controller.roles.engines.seeds
    if method == "greedy":
        assert None not in seeds and len(set(seeds)) == len(seeds) == 3 * PROMPTS * SAMPLES
    else:
        assert set(seeds) == {None}


def test_each_group_has_an_advantage_of_its_own_even_where_two_have_the_same_prompt(start: Any) -> None:
    """Where a group was lost twice, another prompt takes its place, and a small task has no other than those of the step."""
    controller = start(World(GOOD), task={"type": "reasoning_gym", "name": "chain_sum"})
    prompt, rollouts = Prompt("0", [], None), controller.roles.engines.world.generate(1).rollouts[:2]
    rewards = [[0.0, 1.0], [7.0, 5.0]]
    scored = controller._scored([Group(0, prompt=prompt, rollouts=rollouts, rewards=of_group) for of_group in rewards])
    assert [round(one.advantage, 2) for one in scored] == [-0.71, 0.71, 0.71, -0.71]


def test_training_starts_once_from_the_best_registered_drafter(start: Any) -> None:
    world = World(learns=5.0)
    controller = start(world, drafter={"init": "auto"})
    for name in ("one-3", "two-1", ".partial"):
        (controller.run_dir.starts / name).mkdir(parents=True)
    go(controller, 3)
    assert world.calls.count("start_with_best") == 1
    assert world.calls.index("take_in") < world.calls.index("start_with_best") < world.calls.index("train")
    first = read_rows(controller.run_dir.decisions)[0]
    assert (first["step"], first["kind"], first["version"]) == (1, "started", 0)
    lengths = "acceptance lengths of new weights 1.020, one-3 2.500"
    assert first["reason"] == f"starts from one-3: {lengths}; two-1 was not scored: it has no config.json"
    assert output(controller).count("drafter starts from one-3") == 1
    controller.run_dir.close()
    go(start(world, drafter={"init": "auto"}), 4)
    assert world.calls.count("start_with_best") == 1, "a resumed run has chosen"


def test_a_run_publishes_what_passed_the_gate_and_records_why(start: Any) -> None:
    world = World(learns=5.0)
    controller = start(world)
    rows = go(controller, 4)
    assert [row["versions/drafter"] for row in rows] == [0, 0, 1, 2]
    assert [row["drafter/published"] for row in rows[:3]] == [0, 1, 1]
    assert rows[1]["gate/gain"] > 0 and "gate/gain" not in rows[0]
    assert rows[2]["rollout/expected_acceptance_length"] == pytest.approx(rows[2]["rollout/acceptance_length"], abs=0.3)
    published = [row for row in read_rows(controller.records.decisions.path) if row["kind"] == "published"]
    assert [row["step"] for row in published][:2] == [2, 3] and "acceptance length" in published[0]["reason"]
    version, metrics, tags = controller.records.tracker.drafters[0]
    assert version == 1 and metrics["drafter/expected_acceptance_length"] == pytest.approx(
        rows[1]["gate/candidate_length"]
    )
    assert tags["decision"] == published[0]["reason"] and tags["data_fingerprint"].endswith("step 1")
    assert controller.run_dir.drafter(1).is_dir()


def test_a_run_records_its_engine_steps_and_what_its_drafts_were_accepted_at(start: Any) -> None:
    controller = start(World(GOOD))
    controller.roles.engines.gains = [GainReport(3.0, 3.6, 2), GainReport(1.0, 1.1), None]
    rows = go(controller, 2)
    recorded = read_rows(controller.run_dir.steps)
    assert [row["step"] for row in recorded] == [1, 2]
    assert recorded[0]["engines"] == {str(engine): [[3, 8, "steady", 10, 160, 0.5]] for engine in range(3)}
    assert rows[0]["rollout/speedup_vs_no_speculation"] == pytest.approx(4.7 / 4.0), "of those that report one"
    for row, steps in zip(rows, recorded, strict=True):
        drafts, accepted = (sum(n * s[i] for *s, n in steps["acceptance"]) for i in (1, 2))
        assert sum(n for *_, n in steps["acceptance"]) == row["rollout/num_drafts"]
        assert drafts == row["rollout/drafted_tokens"]
        assert 1 + accepted / row["rollout/num_drafts"] == pytest.approx(row["rollout/acceptance_length"])


def test_a_candidate_kept_back_and_a_publication_taken_back_are_on_the_step_line(start: Any) -> None:
    worse = start(World(GOOD, learns=-1.0))
    go(worse, 2)
    line = "  ".join(output(worse).splitlines()[-2:])
    assert "p2 d0" in line and line.endswith("drafter kept back, no gain above the margin of 0.02 is certain")
    world = World(GOOD, learns=1.0)
    world.served_as[1] = -6.0
    bad = start(world, name="second")
    rows = go(bad, 4)
    assert "  rolled back: version 1: " in output(bad)
    assert max(row["drafter/rolled_back"] for row in rows) == 1.0 and any(
        event["kind"] == "rolled back" for event in read_rows(bad.records.decisions.path)
    )
    world = World(learns=9.0)
    world.refuses = {1}
    refused = start(world, name="third")
    go(refused, 2)
    assert "  refused: version 1 refused by the engines, all keep what they serve: engine 1: fc.weight" in output(
        refused
    )
    assert bad.records.tracker.drafters[1][2]["decision"].endswith("back to 0")


def test_an_alarm_ends_the_run_before_anything_of_the_step_is_saved(start: Any) -> None:
    world = World(GOOD)
    controller = start(world)
    go(controller, 3)
    world.served_as[world.serving] = -30.0
    with pytest.raises(DrafterAlarm, match="acceptance_collapsed"):
        go(controller, 4)
    assert [row["step"] for row in read_rows(controller.run_dir.metrics)] == [1, 2, 3]
    assert [row["kind"] for row in read_rows(controller.records.decisions.path)][-1] == "alarm"
    assert latest_checkpoint(controller.run_dir) == controller.run_dir.checkpoint(3)


def test_a_reward_that_fails_ends_the_run_once_what_is_finished_is_saved(start: Any) -> None:
    """Between two checkpoints; once the function is mended, the run continues as if nothing had happened."""
    expected = go(start(World(-2.0, learns=0.8), name="straight"), 6)
    controller = start(World(-2.0, learns=0.8), name="failing")
    go(controller, 4)
    controller.roles.rewards[0].failing = {str(i) for i in range(PROMPTS)}
    shutil.rmtree(controller.run_dir.checkpoint(4))  # stopping had saved it; a run that goes on saves step 3 and 6
    with pytest.raises(TaskFailed) as raised:
        go(controller, 6)
    told = str(raised.value)
    assert told.startswith("step 5: task.reward raised KeyError\n")
    assert "4 steps are saved: mend that, and continue with cotrain train --resume failing run_root=" in told
    assert latest_checkpoint(controller.run_dir) == controller.run_dir.checkpoint(4)
    controller.run_dir.close()
    world = controller.roles.engines.world
    world.step = 4  # which its engines have generated last, now that they have started anew
    assert go(start(world, name="failing"), 6) == expected


def test_a_step_that_busy_scorers_hold_up_names_the_field(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    controller = start(World(GOOD))
    go(controller, 1)
    assert "num_scorers" not in output(controller)
    take, queue = controller.producer.take, [0.3, 100.0]

    def slowly() -> Any:
        taken = take()
        if taken is not None:
            time.sleep(0.3)
            waited = queue.pop(0)
            for group in taken:
                group.scorer_began_at = group.finished_at + waited
        return taken

    monkeypatch.setattr(controller.producer, "take", slowly)
    go(controller, 3)
    rows = list(read_rows(controller.run_dir.metrics))[1:]
    assert [row["time/reward_queue_s"] for row in rows] == pytest.approx([0.3, rows[1]["time/generate_s"]])


def test_a_reward_that_fails_in_the_first_step_has_nothing_to_save(start: Any) -> None:
    controller = start(World(GOOD))
    controller.roles.rewards[0].failing = {"0"}
    with pytest.raises(TaskFailed, match=r"step 1: .*\n  See .*/logs/latest\. 0 steps are saved: mend"):
        go(controller, 1)
    assert latest_checkpoint(controller.run_dir) is None


def test_no_more_is_tapped_than_rounds_train_on_and_judge_by(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the first step is, whose lengths are not known and from which a new drafter's vocabulary is chosen."""
    monkeypatch.setattr(spec, "MAX_ROLLOUTS", 2)
    controller = start(World(GOOD), drafter={"batch_tokens": 40, "updates_per_step": 2})
    go(controller, 1)
    assert controller.roles.engines.tapped == 1.0
    tokens = [len(one.rollout.prompt_token_ids) + len(one.rollout.token_ids) for one in controller.last_rollouts]
    go(controller, 2)
    assert controller.roles.engines.tapped == pytest.approx(1.5 * 80 / sum(tokens))
    assert controller.roles.engines.tapped < 0.9


def test_without_speculation_every_line_says_so_also_after_a_resume(start: Any) -> None:
    world = World(GOOD)
    world.served_as[0] = -30.0
    controller = start(world, drafter={"on_drafter_failure": "continue"})
    go(controller, 3)
    said = "without speculation since step 1 (acceptance_collapsed)"
    assert output(controller).count(said) == 3 and not controller.roles.engines.tapped
    controller.run_dir.close()
    resumed = start(world, drafter={"on_drafter_failure": "continue"})
    go(resumed, 5)
    assert output(resumed).count(said) == 2 and resumed.mode == said and world.num_speculative_tokens == 0


def test_three_steps_and_a_resume_equal_six_in_one_go(start: Any) -> None:
    straight = World(-2.0, learns=0.8)
    expected = go(start(straight, name="straight"), 6)
    world = World(-2.0, learns=0.8)
    controller = start(world, name="halves")
    go(controller, 3)
    controller.run_dir.close()
    resumed = start(world, name="halves")
    assert go(resumed, 6) == expected
    assert read_rows(resumed.records.decisions.path) == read_rows(
        resumed.config.run_root / "straight" / "decisions.jsonl"
    )


def test_a_finished_run_that_is_extended_records_the_rounds_of_one_that_was_planned_so(start: Any) -> None:
    """The last round of a run ends with it, and its metrics are those of the step after, as of every round."""

    def updates(controller: Controller) -> list[tuple[int, int]]:
        rows = read_rows(controller.run_dir.metrics)
        return [(row["step"], row["drafter/updates"]) for row in rows if "drafter/updates" in row]

    planned = start(World(GOOD), name="planned", steps=6)
    planned.run()
    first = start(World(GOOD), name="extended", steps=3)
    first.run()
    first.run_dir.close()
    extended = start(World(GOOD), name="extended", steps=6)
    extended.roles.engines.world.step = 3
    extended.run()
    assert updates(extended) == updates(planned) == [(step, 1) for step in range(2, 7)]


def test_rollouts_of_another_law_are_an_alarm(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(GOOD)
    controller = start(world, lossless={"every": 2, "max_share": 1.0})
    controller.state = replace(controller.state, seconds=1e6)  # checks are affordable, however long the first one takes
    rows = go(controller, 3)
    assert [row.get("lossless/passed") for row in rows] == [1.0, None, 1.0]
    monkeypatch.setattr(Policy, "biased", True)
    go(controller, 4)
    with pytest.raises(DrafterAlarm, match="not_lossless: rollouts do not have the policy's distribution"):
        go(controller, 5)


def test_steps_without_drafts_are_no_passed_check(start: Any) -> None:
    """The first check waits for the first step in which speculation was on."""
    world = World(GOOD)
    controller = start(world, lossless={"every": 2, "max_share": 1.0})
    world.num_speculative_tokens, controller.roles.engines.gains = 0, [NO_DRAFTS]
    rows = go(controller, 2)
    assert all(row["rollout/generated_tokens"] > 500 and row["rollout/num_drafts"] == 0 for row in rows)
    assert [name for row in rows for name in row if name.startswith("lossless/")] == []
    world.num_speculative_tokens, controller.roles.engines.gains = 3, [None]
    found = go(controller, 3)[-1]
    assert (found["lossless/check"], found["lossless/passed"]) == (1.0, 1.0)
    assert 100 <= found["lossless/speculated_tokens"] < found["lossless/tokens"]


class SlowEngines(Engines):
    """With lag: no group has ended yet when the next step is taken."""

    def begin_generate(self, engine: int, requests: list[RolloutRequest], *rest: Any) -> RolloutBatch:
        return RolloutBatch([], [], 1.0, 0)

    def call_all(self, method: Any) -> dict[int, Window]:
        raise AssertionError("what the engines have measured belongs to the window in which their groups end")


@pytest.fixture
def resume_with_scored_groups(start: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Begin step 4 of a run with lag, after a resume from a checkpoint that holds all groups of this step as scored."""

    def build(world: World, **fields: Any) -> Controller:
        batch = world.generate(4)
        rows = []
        for index in range(PROMPTS):
            rollouts = [asdict(rollout) for rollout in batch.rollouts if rollout.prompt_id == str(index)]
            number = 3 * PROMPTS + index
            rows.append({"number": number, "index": index, "rollouts": rollouts, "rewards": [0.0] * SAMPLES})
        stream = {"groups": rows, "lost": {}, "lost_features": 0}
        state = RunState(3, Versions(3, 0), {}, {}, stream=stream, seconds=1e6)
        monkeypatch.setattr("tests.cotrain.simulated_roles.Engines", SlowEngines)
        lossless = {"every": 1, "max_share": 1.0}
        return start(world, state=state, stream={"max_policy_lag": 1}, lossless=lossless, **fields)

    return build


def test_an_alarm_is_raised_where_no_group_has_ended_since_the_last_step(
    resume_with_scored_groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "biased", True)
    monkeypatch.setattr(Policy, "begin_update", lambda *_: pytest.fail("the policy must not learn from another law"))
    controller = resume_with_scored_groups(World(GOOD))
    with pytest.raises(DrafterAlarm, match="step 4 raised not_lossless"):
        go(controller, 4)
    [event] = read_rows(controller.records.decisions.path)
    assert (event["step"], event["kind"]) == (4, "alarm")


def test_or_such_a_step_switches_speculation_off(
    resume_with_scored_groups: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Policy, "biased", True)
    world = World(GOOD)
    controller = resume_with_scored_groups(world, drafter={"on_drafter_failure": "continue"})
    rows = go(controller, 4)
    assert controller.mode == "without speculation since step 4 (not_lossless)" and world.num_speculative_tokens == 0
    assert rows[-1]["alarms/not_lossless"] == 1.0 and world.calls == []
    said = output(controller)
    assert "without speculation since step 4 (not_lossless)" in said and "  alarm: not_lossless: rollouts" in said


def test_a_step_that_waited_for_nothing_tells_no_speed(resume_with_scored_groups: Any) -> None:
    """Its rollouts were generated before, and what the engines do meanwhile counts when the groups end."""
    controller = resume_with_scored_groups(World(GOOD))
    go(controller, 4)
    [row] = read_rows(controller.run_dir.metrics)
    assert row["rollout/generated_tokens"] > 0 and row["lossless/passed"] == 1.0
    assert not {"rollout/tokens_per_s", "idle/rollout_0"} & row.keys() and row["idle/policy"] >= 0


@pytest.mark.parametrize("lost", [True, False])
def test_a_step_without_ended_groups_still_reads_the_weights_back_and_trains(
    resume_with_scored_groups: Any, monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    monkeypatch.setattr("cotrain.publish.publisher.DELIVERY_CHECK_STEPS", 4)
    world = World(GOOD)
    controller = resume_with_scored_groups(world)
    world.current.record_drafter(WeightPayload("", 0, {"fc.weight": "0"}), 0)
    world.lost = lost
    with pytest.raises(DrafterAlarm, match="weights_differ") if lost else nullcontext():
        go(controller, 4)
    assert world.calls == ["take_in", *([] if lost else ["train"])]


def test_what_cannot_be_saved_ends_the_run_before_its_first_step(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the first checkpoint, hours later and with nothing to go on from."""
    controller = start(World(GOOD), steps=2)
    monkeypatch.setattr(Policy, "unsaveable", "generation_config.json contradicts itself")
    with pytest.raises(RunFailure, match=r"cannot be saved.*: generation_config\.json contradicts itself"):
        go(controller, 2)
    assert controller.step == 0 and read_rows(controller.run_dir.metrics) == []
    monkeypatch.undo()
    monkeypatch.setattr(controller.checks.monitor, "state", lambda: {"tokens": object()})
    with pytest.raises(RunFailure, match=r"cannot be saved.*: .*object is not JSON serializable"):
        go(controller, 2)
    monkeypatch.undo()
    assert list(controller.run_dir.checkpoints.iterdir()) == []
    controller.run(lambda: True)
    assert list(controller.run_dir.checkpoints.iterdir()) == [], "what was tried is no checkpoint"


def test_a_checkpoint_is_written_beside_the_next_step_and_its_time_is_in_the_metrics(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = start(World(GOOD), steps=7)
    there: list[tuple[int, bool]] = []
    written = {"now": False}

    generate = Engines.begin_generate

    def begin_generate(
        engines: Engines, engine: int, requests: Any, tap: float, together: tuple[int, int], answer: Any
    ) -> RolloutBatch:
        """What a step finds when its generation begins; the roles have written their parts when the one after it does."""
        if not together[0]:
            there.append((controller.step, latest_checkpoint(controller.run_dir) is not None))
            written["now"] = controller.step >= 4
        return generate(engines, engine, requests, tap, together, answer)

    monkeypatch.setattr(Engines, "begin_generate", begin_generate)
    monkeypatch.setattr("tests.cotrain.simulated_roles.Reactor.is_there", lambda *_: written["now"])
    monkeypatch.setattr(Policy, "save", lambda self, folder, weights=True: (folder.mkdir(), [Reply(None)])[1])
    dropped: list[int] = []
    monkeypatch.setattr(Drafter, "drop_earlier_versions", lambda _: dropped.append(controller.step))
    controller.run()
    assert dropped == [3, 6], "not where a run ends or is stopped in between"
    assert there == [(step, step >= 5) for step in range(7)], "begun after step 3, and whole in step 5"
    rows = read_rows(controller.run_dir.metrics)
    assert [row["step"] for row in rows if "time/checkpoint_s" in row] == [3, 6, 7]
    assert [row["step"] for row in rows if "time/checkpoint_written_s" in row] == [5, 7]
    assert all(row["time/step_s"] > row["time/checkpoint_s"] for row in rows if "time/checkpoint_s" in row)
    assert latest_checkpoint(controller.run_dir) == controller.run_dir.checkpoint(7)


def test_the_drafter_trains_while_the_next_step_generates(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the policy's swap nor generation waits for it, and what it has become is scored before it trains on."""
    controller = start(World(GOOD))
    generate, swap, trains = Engines.begin_generate, Engines.update_policy, list[tuple[str, bool]]()

    def begin_generate(engines: Engines, *args: Any) -> RolloutBatch:
        trains.append(("generate", controller._training.left > 0))
        return generate(engines, *args)

    def update_policy(engines: Engines, *args: Any) -> SwapReport:
        trains.append(("swap", controller._training.left > 0))
        return swap(engines, *args)

    monkeypatch.setattr(Engines, "begin_generate", begin_generate)
    monkeypatch.setattr(Engines, "update_policy", update_policy)
    go(controller, 2)
    groups = [name for name, _ in trains].index("swap")
    assert trains == [("generate", False)] * groups + [("swap", True)] + [("generate", True)] * groups + [
        ("swap", True)
    ]


def test_a_role_that_cannot_save_ends_the_run_and_leaves_the_checkpoint_before(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    controller = start(World(GOOD), steps=9)
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    finish = Policy.finish

    def fail(policy: Policy, begun: Any) -> Any:
        if begun == [] and controller.step >= 6:
            raise full
        return finish(policy, begun)

    monkeypatch.setattr(Policy, "finish", fail)
    with pytest.raises(OSError, match=r"disk full while saving step 6 in .*continue with --resume first"):
        controller.run()
    assert controller.step == 6 and latest_checkpoint(controller.run_dir) == controller.run_dir.checkpoint(3)
    assert [path.name for path in controller.run_dir.checkpoints.iterdir()] == ["step_000003"]


def test_log_probs_of_other_tokens_stop_the_first_step(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Policy, "log_prob_gap", 1.3)
    with pytest.raises(SelfCheckFailed, match=r"differ from the learner's by 1\.300 nats"):
        go(start(World(GOOD)), 1)


def test_features_of_other_layers_stop_it_before_anything_is_trained(
    start: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(GOOD)
    controller = start(world)

    def fail(*_: Any) -> None:
        raise SelfCheckFailed("configured [2, 4, 5], they look like layers [3, 5, 5]")

    monkeypatch.setattr("cotrain.loop.checks.check_features", fail)
    with pytest.raises(SelfCheckFailed, match="they look like layers"):
        go(controller, 1)
    assert world.calls == []
