"""Users' reward functions in the three forms, several rewards with weights, and columns of the data, by a real module and real rows."""

import json
import sys

import pytest

from cotrain.config.schema import DatasetTask
from cotrain.process.failures import TaskFailed
from cotrain.tasks.base import build_score, build_task

MODULE = """
calls = []


def ours(prompt, response, answer, level, bonus=0):
    calls.append((prompt, response, answer))
    return 100 * level + len(response) + bonus


def with_options(prompt, response, answer, **options):
    return len(options)


def trls(prompts, completions, level, **kwargs):
    calls.append({"prompts": prompts, "completions": completions, "level": level, **kwargs})
    return [100 * one + len(messages[0]["content"]) for one, messages in zip(level, completions, strict=True)]


def trls_few(completions, answer):
    return [float(one) for one in answer]


def trls_some(completions, **kwargs):
    return [None if len(messages[0]["content"]) < 3 else 5 for messages in completions]


def trls_by_environment(completions, trainer_state):
    return [0.0] * len(completions)


def trls_raising(completions):
    raise KeyError(len(completions))


def verls(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    calls.append((data_source, solution_str, ground_truth, extra_info))
    return {"score": len(solution_str), "acc": True} if ground_truth == "7" else len(solution_str) / 2


def verls_few(solution_str, ground_truth):
    return float(solution_str == ground_truth)


def too_few(completions):
    return [1.0]


def scalar(completions):
    return 1.0


def not_finite(completions):
    return [1.0, float("nan")]


def text(completions):
    return [1.0, "x"]


def no_score(solution_str):
    return {"acc": 1.0}


def nothing(solution_str):
    return None
"""

ROWS = [
    {"prompt": "3 + 4?", "answer": "7", "level": 1, "data_source": "sums", "extra_info": {"index": 0}},
    {"prompt": "1 + 1?", "answer": "2", "level": 2, "data_source": "pairs", "extra_info": {"index": 1}},
]
MESSAGES = [[{"role": "user", "content": row["prompt"]}] for row in ROWS]


@pytest.fixture
def task(tmp_path, monkeypatch, request):
    """Build a task of these rows and rewards of the module, with a name of its own for each test: (prompts, score, module's calls)."""
    module = f"forms_of_{request.node.name.split('[')[0]}"
    (tmp_path / f"{module}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)

    def build(*rewards, rows=ROWS, **fields):
        (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        names = [f"{module}{reward}" if reward.startswith(":") else reward for reward in rewards]
        config = DatasetTask(type="dataset", path=str(tmp_path / "rows.jsonl"), reward=names, **fields)
        build_task.cache_clear()
        prompts = build_task(config, seed=0)
        score = build_score(config, seed=0)
        return prompts, score, sys.modules[module].calls if module in sys.modules else []

    return build


def test_our_form_gets_the_columns_that_it_names(task):
    prompts, score, calls = task(":ours")
    assert [prompt.columns for prompt in prompts] == [{"level": 1}, {"level": 2}]
    assert score(prompts[1], ["a", "bcd"]) == [201, 203]
    assert calls == [(MESSAGES[1], "a", "2"), (MESSAGES[1], "bcd", "2")]
    prompts, score, _ = task(":ours", rows=[row | {"bonus": 0.5} for row in ROWS])
    assert score(prompts[0], ["a"]) == [101.5]


def test_our_form_has_no_columns_beyond_those_it_names(task):
    prompts, score, _ = task(":with_options")
    assert [prompt.columns for prompt in prompts] == [{}, {}]
    assert score(prompts[0], ["a"]) == [0]


def test_trls_form_is_called_once_for_all_responses_to_a_prompt(task):
    prompts, score, calls = task(":trls")
    assert score(prompts[1], ["a", "bcd"]) == [201, 203]
    [call] = calls
    assert call["prompts"] == [MESSAGES[1]] * 2
    assert call["completions"] == [[{"role": "assistant", "content": text}] for text in ("a", "bcd")]
    columns = {"answer": ["2"] * 2, "level": [2] * 2, "data_source": ["pairs"] * 2, "extra_info": [{"index": 1}] * 2}
    assert {name: call[name] for name in columns} == columns
    assert "prompt" not in call


def test_trls_form_gets_only_what_it_names_and_its_answer_is_the_column(task):
    prompts, score, _ = task(":trls_few")
    assert prompts[0].columns == {"answer": "7"}
    assert score(prompts[0], ["a", "b"]) == [7.0, 7.0]
    prompts, score, _ = task(":trls_few", rows=[{"prompt": "?", "answer": "8\n#### 7"}])
    assert (prompts[0].answer, prompts[0].columns) == ("7", {"answer": "8\n#### 7"})
    with pytest.raises(TaskFailed, match=r"could not convert string to float: '8\\n#### 7'"):
        score(prompts[0], ["a"])
    prompts, score, _ = task(":trls_few", rows=[{"prompt": "?", "solution": "8"}], answer_column="solution")
    assert (prompts[0].columns, score(prompts[0], ["a"])) == ({}, [8.0])


def test_a_function_of_trl_itself_works(task):
    pytest.importorskip("trl")
    prompts, score, _ = task("trl.rewards:think_format_reward", rows=ROWS)
    assert score(prompts[0], ["<think>\nso\n</think>\n7", "7"]) == [1.0, 0.0]


def test_verls_form_is_called_for_each_response(task):
    prompts, score, calls = task(":verls")
    assert score(prompts[0], ["a", "bcd"]) == [1, 3]
    assert score(prompts[1], ["bcd"]) == [1.5]
    assert calls == [
        ("sums", "a", "7", {"index": 0}),
        ("sums", "bcd", "7", {"index": 0}),
        ("pairs", "bcd", "2", {"index": 1}),
    ]


def test_verls_form_on_verls_columns_and_without_what_the_data_lacks(task):
    rows = [{"prompt": MESSAGES[0], "reward_model": {"style": "rule", "ground_truth": "7"}}]
    prompts, score, calls = task(":verls", rows=rows)
    assert score(prompts[0], ["a"]) == [1]
    assert calls == [(None, "a", "7", None)]
    prompts, score, _ = task(":verls_few", rows=rows)
    assert (prompts[0].columns, score(prompts[0], ["7", "8"])) == ({}, [1.0, 0.0])


def test_the_reward_is_the_weighted_sum_of_built_in_ones_and_functions(task):
    prompts, score, _ = task("numeric", ":ours", ":trls_some", reward_weights=[10, -0.5, 1])
    assert score(prompts[0], ["7", "8", "It is 7"]) == [10 - 50.5, -50.5, 10 - 53.5 + 5]
    prompts, score, _ = task("numeric", "exact")
    assert score(prompts[0], ["7", "7.0", "8"]) == [2, 1, 0]
    assert task(":trls_some")[1](prompts[0], ["a", "bcd"]) == [0, 5]


def test_columns_are_read_for_functions_only(task):
    prompts, _, _ = task("exact", "numeric")
    assert [prompt.columns for prompt in prompts] == [{}, {}]


def test_an_answer_must_suit_every_built_in_reward(task):
    with pytest.raises(
        ValueError, match=r"row 0: its answer 'Paris' is not wholly one number, as task.reward = 'numeric'"
    ):
        task(":verls", "exact", "numeric", rows=[{"prompt": "?", "answer": "Paris"}])
    with pytest.raises(ValueError, match=r"task\.answer_column: no column reward_model or answer"):
        task(":verls", "exact", rows=[{"prompt": "?"}])


@pytest.mark.parametrize(
    ("function", "missing"), [("ours", "level"), ("trls", "level"), ("trls_by_environment", "trainer_state")]
)
def test_a_column_that_a_function_needs_and_the_data_lacks(task, function, missing):
    message = (
        rf"task\.reward: \w+:{function}: missing a required argument: '{missing}'; the columns are prompt, answer$"
    )
    with pytest.raises(ValueError, match=message):
        task("exact", f":{function}", rows=[{"prompt": "?", "answer": "7"}])


@pytest.mark.parametrize(
    ("function", "got"),
    [
        ("too_few", r"\[1\.0\]"),
        ("scalar", r"1\.0"),
        ("not_finite", r"\[1\.0, nan\]"),
        ("text", r"\[1\.0, 'x'\]"),
        ("no_score", r"\{'acc': 1\.0\}"),
        ("nothing", "None"),
    ],
)
def test_what_a_function_returns_must_be_a_finite_number_for_each_response(task, function, got):
    prompts, score, _ = task(f":{function}")
    with pytest.raises(
        TaskFailed, match=rf"task\.reward: \w+:{function} must return a finite number per response, got {got}\n"
    ):
        score(prompts[0], ["a", "b"])


def test_what_a_function_of_all_responses_raises_is_told_by_its_own_lines(task):
    prompts, score, _ = task(":trls_raising")
    with pytest.raises(TaskFailed) as raised:
        score(prompts[0], ["first", "second", "third"])
    head, *lines, prompt, response = str(raised.value).splitlines()
    assert head == "task.reward raised KeyError: 3"
    assert [line.strip() for line in lines][-1] == "raise KeyError(len(completions))"
    assert (prompt, response) == ("  prompt rows-0: '3 + 4?'", "  response: 'first' and 2 more")
