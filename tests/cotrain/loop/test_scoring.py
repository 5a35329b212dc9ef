"""Scorers: how groups are handed out, and what one that hangs, dies or cannot start costs."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from cotrain.loop.ledger import reward_queue_s
from cotrain.process.failures import RunFailure
from cotrain.run.rows import read_rows
from cotrain.tasks.prompts import PromptOrder
from tests.cotrain.loop.simulated_ray import Reference
from tests.cotrain.loop.simulated_stream import NUM_PROMPTS, P, Stream


def test_a_scorer_that_does_not_answer_costs_its_group_which_is_generated_again(new: Any) -> None:
    stream = new(timeout=0.05)
    hung: list[Reference] = []

    def answer(reference: Reference) -> None:
        if reference.what[0] == "score" and (not hung or reference in hung):
            hung[:] = [reference]
        else:
            Stream.answer(stream, reference)

    stream.answer = answer
    taken = stream.step()
    assert stream.rewards.restarts == 1 and len(taken) == P
    lost = next(row for row in read_rows(stream.events.path) if row["event"] == "lost")
    assert lost["reason"] == "the scorer did not answer"
    assert stream.kinds(lost["group"]) == [
        "admitted", "dispatched", "finished", "lost", "dispatched", "finished", "scored", "taken",
    ]  # fmt: skip
    assert stream.producer.losses()["stream/lost_groups"] == 1
    assert all(group.rewards == [1.0, 2.0] for group in taken)


def test_of_several_scorers_one_that_hangs_is_replaced_alone_and_the_other_takes_all_that_waits(new: Any) -> None:
    """The first scorer hangs on its first group, and does not start again while the step lasts."""
    stream = new(timeout=0.05, scorers=2)
    first, second = stream.roles.rewards
    order = [f"p{i}" for i in PromptOrder(NUM_PROMPTS, P, 0).step(1)]

    def answer(reference: Reference) -> None:
        starts_again = reference.what[0] == "scorer starts" and reference not in (first.starting, second.starting)
        hangs = reference in first.begun
        if not (starts_again or hangs):
            Stream.answer(stream, reference)

    stream.answer = answer
    taken = stream.step()
    assert [group.prompt.id for group in taken] == order and all(group.rewards == [1.0, 2.0] for group in taken)
    assert (first.restarts, second.restarts) == (1, 0)
    assert (len(first.begun), len(second.begun)) == (1, P)
    assert stream.producer.ledger.lost == {"the scorer did not answer": 1}
    again = [group for group in range(P) if stream.kinds(group).count("dispatched") == 2]
    assert len(again) == 1


@pytest.mark.parametrize("scorers", [1, 4])
def test_a_step_knows_how_long_its_groups_waited_for_busy_scorers(new: Any, scorers: int) -> None:
    """All groups end at once, and each takes a scorer 20 ms."""
    stream = new(scorers=scorers)

    def happens(references: list[Reference]) -> None:
        if references[0].what[0] == "score":
            time.sleep(0.02)
        stream._answer_all([one for one in references if one.what[0] != "score"] or references[:scorers])

    stream.cluster.happens = happens
    waited = reward_queue_s(stream.step())
    assert waited >= 0.02 * (P - 1) if scorers == 1 else waited < 0.02


def test_a_scorer_that_dies_costs_its_group_and_in_the_end_another_prompt_takes_its_place(new: Any) -> None:
    stream = new()
    first = f"p{PromptOrder(NUM_PROMPTS, P, 0).step(1)[0]}"

    def answer(reference: Reference) -> None:
        Stream.answer(stream, reference)
        number = next((n for n, begun in stream.begun() if begun is reference), None)
        if number is not None and stream.producer.ledger.groups[number].prompt.id == first:
            reference.result = RunFailure("rewards: its process has died")

    stream.answer = answer
    taken = stream.step()
    assert stream.rewards.restarts == stream.producer.ledger.lost["the scorer died"] == 2
    assert len(taken) == P and first not in [group.prompt.id for group in taken]
    asked = [name for _, names in stream.engines.calls for name in names]
    assert asked.count(first) == 2


def test_the_time_of_a_scorer_counts_from_when_it_has_started(new: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first scorer hangs once, and each start takes longer than a reward may."""
    stream, now = new(timeout=60), 0.0
    monkeypatch.setattr("cotrain.loop.scoring.time", SimpleNamespace(monotonic=lambda: now, time=lambda: now))
    born, ready = dict[int, tuple[float, Reference]](), list[Reference]()

    def answer(reference: Reference) -> None:
        kind, _ = reference.what
        age = now - born.setdefault(id(reference), (now, reference))[0]
        if kind == "scorer starts" and age > 200:
            ready.append(reference)
        waits = {"scorer starts": age <= 200, "score": len(ready) < 2}  # for the second scorer, as the first one hangs
        if not waits.get(kind):
            Stream.answer(stream, reference)

    def happens(references: list[Reference]) -> None:
        nonlocal now
        now += 10
        stream._answer_all(references)

    stream.answer, stream.cluster.happens = answer, happens
    assert len(stream.step()) == P
    assert stream.producer.ledger.lost == {"the scorer did not answer": 1}
    assert 200 + 60 + 200 < now < 200 + 60 + 200 + 150


@pytest.mark.parametrize("restarts", [0, 1])
def test_a_scorer_that_cannot_start_ends_the_run_with_its_own_error(new: Any, restarts: int) -> None:
    stream = new()

    def answer(reference: Reference) -> None:
        kind, _ = reference.what
        Stream.answer(stream, reference)
        if kind == "score":
            reference.result = RunFailure("rewards: its process has died")
        elif kind == "scorer starts" and stream.rewards.restarts == restarts:
            reference.result = ValueError("task.reward: my.reward cannot be imported")

    stream.answer = answer
    with pytest.raises(ValueError, match=r"task\.reward: my\.reward cannot be imported"):
        stream.step()
    assert stream.rewards.restarts == restarts


def test_what_a_scorer_raises_ends_the_run(new: Any) -> None:
    stream = new()

    def answer(reference: Reference) -> None:
        Stream.answer(stream, reference)
        if reference.what[0] == "score":
            reference.result = ValueError("task.reward: my.reward must return a finite number")

    stream.answer = answer
    with pytest.raises(ValueError, match="must return a finite number"):
        stream.step()
