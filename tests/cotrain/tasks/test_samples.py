"""The readable rollouts of a step."""

import json
from types import SimpleNamespace

import pytest

from cotrain.records import Prompt, Rollout, ScoredRollout, Versions
from cotrain.tasks.prompts import write_samples
from tests.speculation_counts import steps_of


def scored(i: int, steps: tuple[tuple[int, int], ...] = ()) -> ScoredRollout:
    rollout = Rollout(f"p{i}", 0, [1, i], [7, 8], [-0.1, -0.2], f"text {i}", "stop", Versions(4, 2), steps)
    return ScoredRollout(rollout, 1.0, 0.5)


TOKENIZER = SimpleNamespace(decode=lambda ids: f"prompt {ids}")


def prompts(answer) -> dict[str, Prompt]:
    return {f"p{i}": Prompt(f"p{i}", [], answer) for i in range(6)}


def rows(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rollouts_are_written_one_a_line(tmp_path):
    path = tmp_path / "samples" / "step_000004.jsonl"
    drafted = steps_of(2, 3, (2, 1, 0))
    write_samples(path, [scored(0, drafted), *(scored(i) for i in range(1, 4))], prompts("42"), TOKENIZER)
    first, second, *others = rows(path)
    assert len(others) == 2
    assert first == {
        "prompt": "prompt [1, 0]",
        "response": "text 0",
        "answer": "42",
        "reward": 1.0,
        "advantage": 0.5,
        "finish_reason": "stop",
        "versions": "p4-d2",
        "acceptance_length": 2.5,
    }
    assert second["response"] == "text 1"
    assert second["acceptance_length"] is None


@pytest.mark.parametrize(
    ("answer", "written"),
    [
        ("42", "42"),
        (3, 3),
        (None, None),
        ({"question": "?", "answer": "7", "metadata": object()}, "7"),
        ((1, 2), [1, 2]),
        ({"tests": [1]}, {"tests": [1]}),
    ],
)
def test_an_answer_is_written_as_plainly_as_it_goes(tmp_path, answer, written):
    path = tmp_path / "x.jsonl"
    write_samples(path, [scored(0)], prompts(answer), TOKENIZER)
    assert rows(path)[0]["answer"] == written
