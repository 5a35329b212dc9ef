"""The producer between simulated engines and a simulated scorer, on the reactor that runs use."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cotrain.loop.ledger import LengthHistory
from cotrain.process.failures import RunFailure, TaskFailed
from cotrain.records import RolloutBatch, Segment, Versions
from cotrain.run.rows import read_rows
from cotrain.tasks.prompts import PromptOrder
from tests.cotrain.loop.simulated_ray import Reference
from tests.cotrain.loop.simulated_stream import NUM_PROMPTS, SAMPLES, P, Stream, batch_of


def test_without_lag_the_groups_of_a_step_enter_each_engine_together_in_the_order_of_its_prompts(new: Any) -> None:
    stream = new(num_engines=2)
    order = PromptOrder(NUM_PROMPTS, P, 0)
    for step in (1, 2):
        taken = stream.step()
        names = [f"p{i}" for i in order.step(step)]
        assert [group.prompt.id for group in taken] == names
        assert stream.engines.calls[-2:] == [(0, names[::2]), (1, names[1::2])]
        assert [group.rewards for group in taken] == [[1.0, 2.0]] * P
        rollouts = [rollout for group in taken for rollout in group.rollouts]
        window = stream.producer.windows.take(rollouts)[0]
        assert window.rollouts == rollouts and window.num_generated_tokens == 3 * len(rollouts)
        assert stream.producer.windows.take(rollouts) == (RolloutBatch([], [], 0.0, 0), {})
        stream.producer.release()
    # what one engine wrote, the other drafts from
    assert sorted(stream.engines.shared) == [(0, SAMPLES)] * P + [(1, SAMPLES)] * P
    assert stream.kinds(0) == ["admitted", "dispatched", "finished", "scored", "taken", "released"]


def test_a_group_is_scored_while_others_of_its_step_are_generated_and_the_window_is_the_same(new: Any) -> None:
    """Of the groups of a step, the last one that entered ends first, and each is scored before the next one ends."""
    stream = new(num_engines=2)

    def answer(reference: Reference) -> None:
        under_way = [one for one in stream.cluster.watched if one.what[0] == "generate"]
        scores = any(one.what[0] == "score" for one in stream.cluster.watched)
        if reference.what[0] != "generate" or (reference is under_way[-1] and not scores):
            Stream.answer(stream, reference)

    stream.answer = answer
    stream.step()
    events = [row["event"] for row in read_rows(stream.events.path) if row["event"] in ("finished", "scored")]
    assert events == ["finished", "scored"] * P
    features = stream.producer.windows.take([])[0].features
    assert features == [name for _, names in sorted(stream.engines.calls) for name in names]


def test_hidden_states_of_a_node_that_is_gone_are_counted(new: Any) -> None:
    stream, tapped = new(num_engines=2), {"num_rollouts": 4}
    for engine in (0, 1):
        stream.producer.windows.add(engine, replace(batch_of([]), features=[f"{engine}"], feature_stats=tapped))

    def arrived(coming: tuple[str, str, bool]) -> str:
        path, node, move = coming
        if path == "0":
            raise RunFailure("its node has gone")
        return f"brought {path} to {node}" if move else "copied"

    stream.roles.drafter = SimpleNamespace(node="here")
    stream.roles.nodes = SimpleNamespace(begin_bring=lambda path, node, move: (path, node, move), arrived=arrived)
    window = stream.producer.windows.take([])[0]
    assert (window.features, window.feature_stats) == (["brought 1 to here"], tapped)
    assert stream.producer.losses()["drafter/lost_features"] == 4


def test_with_lag_each_group_is_a_call_and_engines_are_not_overfilled(new: Any) -> None:
    stream = new(lag=2, num_engines=2)
    stream.producer.admit(False)
    assert stream.producer.ledger.admitted == 3 * P
    # 4 requests at once, filled to 5 or more: three groups of 2 samples on each engine; the others wait.
    assert sorted(engine for engine, _ in stream.engines.calls) == [0, 0, 0, 1, 1, 1]
    assert all(len(names) == 1 for _, names in stream.engines.calls)
    metrics = stream.producer.metrics()
    assert (metrics["stream/groups_waiting"], metrics["stream/groups_running"]) == (6, 6)
    taken = stream.step()
    assert len(taken) == P and stream.producer.ledger.count("taken") == P


@pytest.mark.parametrize("lag", [0, 1])
def test_groups_of_an_engine_that_dies_are_generated_elsewhere_until_it_is_back(new: Any, lag: int) -> None:
    stream = new(lag=lag, num_engines=2)
    dead: list[Reference] = []

    def answer(reference: Reference) -> None:
        if reference.what[0] == "start" and stream.producer.ledger.served < 2:
            return  # it is still starting
        if reference.what[0] == "generate" and not dead and reference.engine == 1:
            dead.append(reference)
            reference.result = RunFailure("rollout_1: its process has died")
        elif reference.result is None:
            Stream.answer(stream, reference)

    stream.answer = answer
    taken = []
    for _ in range(4):
        taken += [group.prompt.id for group in stream.step()]
        stream.producer.release()
    order = PromptOrder(NUM_PROMPTS, P, 0)
    assert taken == [f"p{index}" for step in range(1, 5) for index in order.step(step)]
    lost = [row for row in read_rows(stream.events.path) if row["event"] == "lost"]
    assert lost and all(row["engine"] == 1 and row["reason"] == "its engine died" for row in lost)
    again = [
        row
        for row in read_rows(stream.events.path)
        if row["event"] == "dispatched" and row["attempt"] and row["engine"] == 0
    ]
    assert {row["group"] for row in lost} == {row["group"] for row in again}
    assert stream.engines.in_dispatch == [0, 1] and (lag or stream.producer._outstanding == [0, 0])
    assert {engine for engine, _ in stream.engines.calls[-4:]} == {0, 1}


@pytest.mark.parametrize("lag", [0, 1])
def test_a_group_that_failed_ends_the_run_between_steps_when_all_else_is_scored(new: Any, lag: int) -> None:
    """So a step that is under way is finished, and a checkpoint can hold what is scored."""
    stream = new(lag=lag)
    second = [f"p{i}" for i in PromptOrder(NUM_PROMPTS, P, 0).step(2)]

    def answer(reference: Reference) -> None:
        Stream.answer(stream, reference)
        number = next((n for n, begun in stream.begun() if begun is reference), None)
        if number is not None and stream.producer.ledger.groups[number].prompt.id in second[1:3]:
            reference.result = TaskFailed(f"task.reward raised KeyError in group {number}")

    stream.answer = answer
    stream.step()
    if lag:  # the groups of the next step are there already, and the step under way does not mind
        stream.reactor.until(lambda: len(stream.producer.ledger._failed[1]) == 2)
    stream.producer.release()
    with pytest.raises(TaskFailed, match="in group 5"):
        stream.step()
    saved = json.loads(json.dumps(stream.producer.state()))
    assert {row["number"] for row in saved["groups"]} >= {4, 7} and not {5, 6} & {
        row["number"] for row in saved["groups"]
    }
    mended = new(lag=lag, served=1, saved=saved)
    assert [group.prompt.id for group in mended.step()] == second
    begun = [name for _, names in mended.engines.calls for name in names]
    assert set(second) & set(begun) == set(second[1:3])


def test_a_prompt_that_does_not_fit_fails_when_it_is_drawn(new: Any) -> None:
    stream = new()
    third = PromptOrder(NUM_PROMPTS, P, 0).step(1)[2]
    stream.producer._prompts.tokenizer.apply_chat_template = lambda messages, **_: [1] * (600 if messages else 2)
    task = stream.producer._prompts.task
    task[third] = replace(task[third], messages=[{"role": "user", "content": "long"}])
    with pytest.raises(
        TaskFailed, match=rf"prompt p{third} has 600 tokens, rollout\.max_prompt_tokens is 512: raise it"
    ):
        stream.step()
    assert stream.producer.ledger.count("scored") == P - 1


def test_scored_groups_survive_a_resume_and_the_others_start_over(new: Any) -> None:
    stream = new(lag=1)
    stream.step()
    stream.producer.release()
    stream.reactor.until(lambda: stream.producer.ledger.count("scored") == 2)
    scored = [group.number for group in stream.producer.ledger.groups.values() if group.state == "scored"]
    assert scored
    number = scored[0]
    result = stream.producer.ledger.groups[number]
    earlier = (Segment(Versions(0, 0), 0, 1),)
    result.rollouts[0] = replace(
        result.rollouts[0],
        verification_steps=((2, 1), (3, 2)),
        earlier=earlier,
        versions=Versions(1, 1),
    )
    stream.producer.ledger.lost["the scorer died"] += 3
    stream.producer.windows.add(0, replace(batch_of([]), feature_stats={"num_rollouts": 5}))
    saved = json.loads(json.dumps(stream.producer.state()))
    again = new(lag=1, served=1, saved=saved)
    taken = again.step()
    metrics = again.producer.losses()
    assert (metrics["stream/lost_groups"], metrics["drafter/lost_features"]) == (3, 5)
    assert len(taken) == P
    restored = again.producer.ledger.groups[number]
    assert restored.rollouts == result.rollouts and restored.rewards == result.rewards
    assert restored.prompt == result.prompt and again.kinds(number)[0] == "restored"
    asked = [name for _, names in again.engines.calls for name in names]
    assert restored.prompt.id not in asked


def test_a_run_in_which_nothing_happens_any_more_ends_and_says_what_is_under_way(new: Any) -> None:
    stream = new()
    stream.reactor._stalled_after_s = 0.05
    stream.answer = lambda reference: reference.what[0] == "scorer starts" and Stream.answer(stream, reference)
    with pytest.raises(RunFailure, match=r"4 do not answer; groups: 4 dispatched; oldest 0, admitted 4"):
        stream.step()
    idle = new()
    idle.reactor.until(lambda: idle.producer._scoring._scorers[0].ready)
    with pytest.raises(RunFailure, match="deadlock: no task is pending"):
        idle.reactor.until(lambda: False)


def test_seeds_follow_from_the_place_of_a_group_and_not_from_when_it_begins(new: Any) -> None:
    found = []
    for lag in (0, 2):
        stream = new(lag=lag, draft_sample_method="greedy")
        for _ in range(3):
            stream.step()
            stream.producer.release()
        found.append({name: seeds[:SAMPLES] for name, seeds in stream.engines.seeds.items()})
    assert None not in found[0].values() and len(found[0]) == 3 * P
    assert {name: found[1][name] for name in found[0]} == found[0]


def test_the_longest_responses_so_far_begin_first_also_after_a_resume(new: Any) -> None:
    stream = new()
    order = PromptOrder(NUM_PROMPTS, P, 0)
    stream.step()
    names = [f"p{i}" for i in order.step(2)]
    logs = dict(zip(names, (1.0, 3.0, 2.0, 2.5), strict=True))
    stream.producer.lengths = LengthHistory(logs)
    saved = json.loads(json.dumps(stream.producer.state()))
    stream.producer.release()
    longest_first = [names[1], names[3], names[2], names[0]]
    assert [group.prompt.id for group in stream.step()] == names, "the learner is given them as they were drawn"
    assert stream.engines.calls[-1] == (0, longest_first)
    again = new(served=1, saved=saved)
    again.step()
    assert again.engines.calls[-1] == (0, longest_first)


@pytest.mark.parametrize("lag", [0, 2])
def test_steps_begin_one_after_another_and_a_run_can_keep_the_order_drawn(new: Any, lag: int) -> None:
    order = PromptOrder(NUM_PROMPTS, P, 0)
    drawn = [f"p{index}" for step in range(1, lag + 2) for index in order.step(step)]
    for chosen in ("longest_first", "drawn"):
        stream = new(lag=lag, order=chosen)
        stream.producer.lengths = LengthHistory({n: i / 9 for i, n in enumerate(drawn)})
        stream.step()
        stream.reactor.until(lambda ledger=stream.producer.ledger: not ledger.count("admitted"))
        begun = [name for _, names in stream.engines.calls for name in names][: len(drawn)]
        steps = [drawn[i : i + P] for i in range(0, len(drawn), P)]
        assert begun == (drawn if chosen == "drawn" else [name for step in steps for name in reversed(step)])


@pytest.mark.parametrize("lag", [0, 1])
def test_the_lengths_of_every_step_are_learnt(new: Any, lag: int) -> None:
    stream = new(lag=lag)
    names = [f"p{index}" for step in (1, 2) for index in PromptOrder(NUM_PROMPTS, P, 0).step(step)]
    logs = {name: [0.0, 0.1, 0.2, 3.0][i % P] for i, name in enumerate(names)}
    stream.producer.lengths = LengthHistory(logs)
    plain = stream.answer

    def answer(reference: Reference) -> None:
        plain(reference)
        if reference.what[0] == "generate":
            of = [40 if logs.get(rollout.prompt_id) == 3.0 else 10 for rollout in reference.result.rollouts]
            rollouts = [replace(r, token_ids=[5] * n) for r, n in zip(reference.result.rollouts, of, strict=True)]
            reference.result = replace(reference.result, rollouts=rollouts)

    stream.answer = answer
    for _ in range(2):
        stream.step()
        stream.producer.release()
    for name in names[3::P]:
        assert stream.producer.lengths.expected(name) == pytest.approx((np.exp(3) * 40) ** 0.5)
    finished = [row for row in read_rows(stream.events.path) if row["event"] == "finished"]
    assert {row["prompt"]: row["lengths"] for row in finished}[names[3]] == [40, 40]
    assert all(row["prompt_tokens"] > 0 for row in finished)


class WithTools(Stream):
    """Environments pay the trajectories themselves. `failures`: for each call to come, which of its samples fail for good."""

    def __init__(self, *args: Any, **fields: Any):
        self.failures, self.tool_share = list[int](), fields.pop("tool_share", 0.0)
        super().__init__(*args, scorers=0, **fields)
        self.engines.tools = object()

    def answer(self, reference: Reference) -> None:
        assert reference.what[0] == "generate", "no scorer is asked"
        batch, fail = batch_of(reference.what[1]), self.failures.pop(0) if self.failures else 0
        left = batch.rollouts[fail:]
        reference.result = replace(
            batch,
            rollouts=left,
            rewards=[0.5] * len(left),
            failures=("no answer",) * 2 * fail,
            tool_share=self.tool_share,
        )


@pytest.fixture
def with_tools(run_config: Any, tmp_path: Any) -> Any:
    return lambda **fields: WithTools(run_config, tmp_path, **fields)


def test_environments_pay_and_a_trajectory_whose_tools_fail_is_left_out(with_tools: Any) -> None:
    stream = with_tools(samples_per_prompt=3)
    stream.failures = [0, 1]
    taken = stream.step()
    assert [len(group.rollouts) for group in taken] == [3, 2, 3, 3] and taken[1].rewards == [0.5, 0.5]
    losses = stream.producer.losses()
    assert (losses["stream/failed_trajectories"], losses["stream/lost_groups"]) == (2, 0)
    failed = [row for row in read_rows(stream.events.path) if row["event"] == "trajectory failed"]
    assert [(row["group"], row["reason"]) for row in failed] == [(1, "no answer")] * 2
    again = with_tools(served=1, saved=json.loads(json.dumps(stream.producer.state())), samples_per_prompt=3)
    assert again.producer.losses()["stream/failed_trajectories"] == 2


def test_a_group_with_one_trajectory_left_begins_again(with_tools: Any) -> None:
    stream = with_tools(samples_per_prompt=3)
    stream.roles.nodes = SimpleNamespace(remove_all=lambda features: None)
    stream.failures = [2]
    taken = stream.step()
    assert [len(group.rollouts) for group in taken] == [3] * P
    begun_again = ["lost", "dispatched", "finished", "scored", "taken"]
    assert stream.kinds(0) == ["admitted", "dispatched", *["trajectory failed"] * 4, *begun_again]
    assert stream.producer.ledger.lost == {"its tools failed (no answer)": 1}, "a run that ends for it says why"


@pytest.mark.parametrize(("share", "running"), [(0.0, 3), (0.5, 5), (1.0, 10)])
def test_an_engine_whose_trajectories_wait_for_tools_gets_more_of_them(
    with_tools: Any, share: float, running: int
) -> None:
    """4 requests at once, filled to 5 that wait for no tool; a group has 2."""
    stream = with_tools(lag=3, tool_share=share)
    stream.step()
    stream.cluster.happens = lambda references: None
    stream.producer._tick()
    stream.producer.admit(False)
    assert stream.producer.metrics()["stream/groups_running"] == running
