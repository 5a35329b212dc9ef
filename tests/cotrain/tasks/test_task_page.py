"""docs/guide/tasks.md: each cell of its table of answers, and the example of a reward function, which is also in examples/."""

import json
import re
import sys
from pathlib import Path

import pytest

from cotrain.config.schema import DatasetTask
from cotrain.tasks.base import build_score, build_task

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "guide" / "tasks.md").read_text()
REWARDS = ("exact", "numeric", "math_verify")


def table_of_answers() -> list[tuple[str, str, str, str]]:
    """(kind, answer, reward, what it does) of each cell."""
    section = PAGE.partition("## Which answers the built-in rewards take")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    assert rows[0] == ["kind", "the answer", *(f"`{reward}`" for reward in REWARDS)]
    return [(row[0], row[1].strip("`"), *cell) for row in rows[2:] for cell in zip(REWARDS, row[2:], strict=True)]


CELLS = table_of_answers()


def test_the_table_has_every_kind() -> None:
    assert len(CELLS) == 20 * len(REWARDS)
    assert {json.loads(answer) for _, answer, *_ in CELLS[:1]} == {7}


@pytest.mark.parametrize(("kind", "answer", "reward", "does"), CELLS, ids=lambda value: value[:40])
def test_a_cell_of_the_table_of_answers(tmp_path: Path, kind: str, answer: str, reward: str, does: str) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(f'{{"prompt": "?", "answer": {answer}}}\n')
    config = DatasetTask(type="dataset", path=str(rows), reward=reward)
    if does == "refused":
        with pytest.raises(ValueError, match=rf"1 of the 1 rows .*\n +row 0: its answer .* '{reward}' needs"):
            build_task(config, seed=0)
        return
    prompt, score = build_task(config, seed=0)[0], build_score(config, seed=0)
    right, wrong = (re.findall(r"`([^`]+)`", part) for part in does.split("; not "))
    assert right and wrong, does
    responses = [f"Answer: {text}" for text in (*right, *wrong)]
    assert score(prompt, responses) == [1.0] * len(right) + [0.0] * len(wrong), responses


def test_the_example_of_a_reward_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function, calls, _ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert calls.count("assert ") == 3
    assert function == (ROOT / "examples" / "my_rewards.py").read_text()
    (tmp_path / "my_rewards.py").write_text(function)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "What is 3 + 4? Use at most 5 words.", "answer": 7}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    exec(calls, {})
    config = DatasetTask(type="dataset", path="rows.jsonl", reward=re.search(r'task.reward = "(.*)"', function)[1])
    score = build_score(config, seed=0)
    assert score(build_task(config, seed=0)[0], ["3 + 4 = 7, as everybody knows"]) == [0.5]
    del sys.modules["my_rewards"]


def test_the_functions_in_three_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    *_, functions = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "three_rewards.py").write_text(functions)
    row = {"prompt": "3 + 4?", "answer": 7, "solution": "7", "max_words": 3, "data_source": "sums"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rewards = re.findall(r"three_rewards:\w+", PAGE)
    assert len(rewards) == 3
    paid = {}
    for name in rewards:
        config = DatasetTask(type="dataset", path="rows.jsonl", reward=name)
        build_task.cache_clear()
        paid[name.partition(":")[2]] = build_score(config, 0)(build_task(config, 0)[0], ["7", "It is 8, I think"])
    assert paid == {"short": [1, 0], "right": [1, 0], "compute_score": [1, 0]}
