"""The built-in rewards, a user's reward by its dotted path, and what is told when that raises."""

import sys
from types import SimpleNamespace

import pytest

from cotrain.actors.rewards import RewardActor
from cotrain.config.schema import DatasetTask
from cotrain.process.failures import TaskFailed
from cotrain.records import Prompt
from cotrain.tasks.rewards import exact, load_reward, math_verify, numeric

PROMPT = [{"role": "user", "content": "What is 3 + 4?"}]


def test_exact_compares_the_final_answer_only():
    assert exact(PROMPT, "Paris is large.\nThe answer is  Paris.", "Paris") == 1.0
    assert exact(PROMPT, "Paris is large.\nThe answer is Lyon.", "Paris") == 0.0


def test_numeric_compares_values_and_counts_one_number_only():
    assert numeric(PROMPT, "3 + 4 = 7.0", "7") == 1.0
    assert numeric(PROMPT, "1,000", "1000") == 1.0
    assert numeric(PROMPT, "5 6 7 8 9", "7") == 0.0
    assert numeric(PROMPT, "seven", "7") == 0.0


@pytest.mark.parametrize("reward", [exact, numeric])
@pytest.mark.parametrize("answer", [None, True, float("nan")])
def test_nothing_is_paid_where_neither_side_is_a_number(reward, answer):
    assert reward(PROMPT, "no number at all", answer) == 0.0


def test_math_verify_knows_equal_expressions():
    assert math_verify(PROMPT, r"So the answer is $\frac{2}{4}$.", "0.5") == 1.0
    assert math_verify(PROMPT, r"\boxed{13}", "12") == 0.0


@pytest.fixture
def rewards_module(tmp_path, monkeypatch, request):
    """A module in the working folder, which a console script would not have on its path; returns its name."""
    name = f"rewards_of_{request.node.name.split('[')[0]}"
    (tmp_path / f"{name}.py").write_text(
        "answer_length = 3\n"
        "def length(prompt, response, answer): return len(response) + len(prompt[0]['content']) + int(answer)\n"
        "def two(prompt, response): return 1.0\n"
        "def text(prompt, response, answer): return 'good'\n"
        "def infinite(prompt, response, answer): return float('inf')\n"
        "async def later(prompt, response, answer): return 1.0\n"
        "def helper(table, key):\n    return table[key]\n"
        "def raising(prompt, response, answer):\n    return helper({}, answer)\n"
        "def leaving(prompt, response, answer): raise SystemExit(3)\n"
    )
    for error in ("raise KeyError('no table')", "import sys; sys.exit(3)", "x = (", "import no_such_package"):
        (tmp_path / f"{name}_{len(list(tmp_path.iterdir()))}.py").write_text(f"y = 1\n{error}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [folder for folder in sys.path if folder])
    return name


@pytest.mark.parametrize("separator", [":", "."])
def test_users_function_gets_prompt_response_and_answer(rewards_module, separator):
    reward = load_reward(f"{rewards_module}{separator}length")
    values = reward(Prompt("p", PROMPT, "2"), ["four", "five5"])
    assert all(isinstance(value, float) for value in values)
    assert values == [4 + len(PROMPT[0]["content"]) + 2, 5 + len(PROMPT[0]["content"]) + 2]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "exakt",
            r"task\.reward: exakt is neither exact, numeric, math_verify nor a function .* package\.module:function",
        ),
        ("no_such_package.module:f", r"task\.reward: no_such_package\.module:f is neither .*No module named"),
        ("{module}:nothing", r"task\.reward: .*:nothing is neither .* has no attribute 'nothing'"),
        ("{module}:answer_length", r"task\.reward: .*:answer_length is neither .*not a callable"),
        ("{module}.two", r"task\.reward: .*\.two is neither .*too many positional arguments"),
        ("{module}:later", r"task\.reward: .*:later is async"),
        ("{module}_1:score", r"KeyError: 'no table'\)\n  File \".*_1\.py\", line 2, in <module>\n    raise KeyError"),
        ("{module}_2:score", r"SystemExit: 3\)\n  File \".*_2\.py\", line 2"),
        ("{module}_3:score", r"SyntaxError: .*_3\.py, line 2\)\)$"),
        ("{module}_4:score", r"No module named 'no_such_package'\)\n  File \".*_4\.py\", line 2"),
    ],
)
def test_unusable_function_is_refused_at_load(rewards_module, name, message):
    with pytest.raises(ValueError, match=message):
        load_reward(name.format(module=rewards_module))


@pytest.mark.parametrize(
    ("function", "message"),
    [("text", "text must return a finite number per response, got 'good'"), ("infinite", "infinite must .*, got inf")],
)
def test_result_must_be_a_finite_number(rewards_module, function, message):
    reward = load_reward(f"{rewards_module}:{function}")
    with pytest.raises(TaskFailed, match=rf"task\.reward: .*:{message}\n.*\n  response: 'hi'$"):
        reward(Prompt("p", PROMPT, "7"), ["hi"])


@pytest.fixture
def scorer(monkeypatch):
    """The scoring process's object in this process, for a reward by its name."""

    def build(reward: str) -> RewardActor:
        actor = RewardActor.__new__(RewardActor)  # whose constructor would take over the output of this process
        task = DatasetTask(type="dataset", path="rows.jsonl", reward=reward)
        actor.start(SimpleNamespace(task=task, seed=0))
        return actor

    return build


def test_what_a_users_function_raises_is_told_by_its_own_lines_and_logged(rewards_module, scorer, capsys):
    answer, long = Prompt("sums-12", PROMPT, "7"), "x" * 1000
    failure = scorer(f"{rewards_module}:raising").score(answer, [long, "never scored"])
    assert isinstance(failure, TaskFailed)
    head, *lines, prompt, response = str(failure).splitlines()
    assert head == "task.reward raised KeyError: '7'"
    frames = [line.strip() for line in lines if line.strip().startswith("File")]
    assert [frame.partition("line ")[2] for frame in frames] == ["10, in raising", "8, in helper"]
    assert all(f"{rewards_module}.py" in frame for frame in frames)
    assert prompt == "  prompt sums-12: 'What is 3 + 4?'"
    assert response.startswith("  response: 'xxx") and "..." in response and len(response) < 450
    log = "".join(capsys.readouterr())
    assert "KeyError: '7'" in log and long in log and str(answer) in log


@pytest.mark.parametrize(
    ("function", "message"),
    [("text", "must return a finite number per response, got 'good'"), ("leaving", "SystemExit: 3\n  File")],
)
def test_whatever_a_users_function_does_is_a_failure_of_the_task(rewards_module, scorer, function, message):
    failure = scorer(f"{rewards_module}:{function}").score(Prompt("p", PROMPT, "7"), ["hi"])
    assert isinstance(failure, TaskFailed) and message in str(failure)
    assert scorer(f"{rewards_module}:length").score(Prompt("p", PROMPT, "7"), ["hi", "four"]) == [23.0, 25.0]
