"""Environments as tasks: first messages, factories that cannot be used, and the pieces of chat templates between turns."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from cotrain.config.schema import EnvironmentTask
from cotrain.models.loading import resolve_model
from cotrain.tasks.base import build_task, fingerprint
from cotrain.tasks.environments import EnvironmentPrompts, TurnTemplate, load_factory
from cotrain.tasks.prompts import apply_template, encode_prompt, load_tokenizer

CALCULATOR = "examples.calculator:Calculator"
TEMPLATES = sorted(Path(str(find_spec("trl").submodule_search_locations[0])).glob("chat_templates/*.jinja"))  # type: ignore[union-attr, index]


class Raises:
    def __init__(self, seed: int):
        raise RuntimeError("no such city")


class Counter:
    """For TRL: it has no step, and its tools are methods."""

    def reset(self, prompt: str, start: int) -> str:
        self._count = start
        return f" It is {start} now."

    def add(self, number: int) -> int:
        """
        Add a number.

        Args:
            number: What to add.
        """
        self._count += number
        return self._count

    def get_reward(self) -> int:
        return self._count


class WithoutReward:
    def reset(self, prompt: str) -> None: ...


def task(**fields) -> EnvironmentTask:
    return EnvironmentTask.model_validate({"type": "environment", "factory": CALCULATOR, **fields})


def test_each_row_has_messages_of_its_own_and_the_same_ones_each_time():
    one, other = build_task(task(size=10), 0), build_task(task(size=10, max_turns=3), 0)
    assert len(one) == 10 and one[3] == other[3] and one[3].messages != one[4].messages
    assert one[3].answer.keys() == {"seed"} and one[3].id == "examples.calculator:Calculator-3"
    assert fingerprint(one) == fingerprint(other) != fingerprint(build_task(task(size=10), 1))


def test_rows_of_a_file_are_the_arguments(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"seed": 3}\n{"seed": 4}\n')
    built = build_task(task(path=str(rows)), 0)
    assert len(built) == 2 and built[1].answer == {"seed": 4}


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("examples.calculator:Calculater", "task.factory: examples.calculator:Calculater cannot be imported"),
        ("examples.calculator:RULES", "task.factory: examples.calculator:RULES is no class"),
        (f"{__name__}:Raises", "with row 0: RuntimeError: no such city"),
    ],
)
def test_a_factory_that_cannot_be_used_is_named(factory, message):
    with pytest.raises(ValueError, match=r"task\.factory") as error:
        _ = build_task(task(factory=factory), 0)[0]
    assert message in str(error.value)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_turn_is_appended_as_the_template_would_have_written_it(path):
    """Or the template is refused, because it rewrites earlier turns."""
    tokenizer = load_tokenizer(resolve_model("bundled:smollm2-135m-instruct"))
    tokenizer.chat_template = path.read_text()
    try:
        template = TurnTemplate(tokenizer)
    except ValueError as error:
        assert "chat_template.jinja" in str(error)
        return
    asked = [{"role": "user", "content": "Where?"}]
    prompt, thought = tokenizer.decode(apply_template(tokenizer, asked)), "<think>\nhm\n</think>\n\n"
    sampled = "look(7)" if prompt.endswith("</think>\n\n") else thought.removeprefix(begun_by(prompt)) + "look(7)"
    said = [
        {"role": "assistant", "content": begun_by(prompt) + sampled},
        {
            "role": "assistant",
            "content": "look(7)",
            "reasoning_content": "hm",
        },  # templates read thoughts in one of two ways
    ]
    for role in ("tool", "user"):
        try:
            whole = [apply_template(tokenizer, [*asked, one, {"role": role, "content": "in Bergen"}]) for one in said]
        except Exception:  # it refuses the role
            continue
        eos, of_stop_string = tokenizer.eos_token_id, tokenizer.encode("7)")[-1]
        appended = prompt + sampled + tokenizer.eos_token + tokenizer.decode(template.observation("in Bergen", eos))
        assert appended in map(tokenizer.decode, whole)
        assert prompt + sampled + tokenizer.decode(template.observation("in Bergen", of_stop_string)) == appended
        return


def begun_by(prompt: str) -> str:
    """Return the beginning of a thought that a template writes for the policy."""
    return "<think>\n" if prompt.endswith("<think>\n") else ""


@pytest.mark.parametrize(
    ("said", "answers", "reward"),
    [
        (["calc({a}*{b})", "calc({p}+{c})"], ["= {p}", None], 1.0),
        (["calc({a} * {b})", "{p}", "calc({p}+{c})"], ["= {p}", "error: ask for calc({p}+{c})", None], 0.8),
        (["calc({a}*{b}+{c})", "calc({a}*{b})"], ["error: ask for calc({a}*{b})", "= {p}"], 0.3),
        (["I do not know."], ["error: ask for calc({a}*{b})"], 0.0),
    ],
)
def test_the_calculator_of_the_example(said, answers, reward):
    environment = load_factory(task())(seed=5)
    a, b, c = map(int, re.findall(r"\d+", environment.messages()[-1]["content"]))
    numbers = {"a": a, "b": b, "c": c, "p": a * b, "r": a * b + c}
    for text, answer in zip(said, answers, strict=True):
        found = environment.step(text.format(**numbers))
        assert found == (None if answer is None else answer.format(**numbers))
    assert environment.reward() == pytest.approx(reward)


@pytest.fixture
def counters(tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "Count up.", "start": 3}\n')
    return task(path=str(rows), factory=f"{__name__}:Counter")


def test_an_environment_for_trl_is_played(counters):
    prompt = build_task(counters, 0)[0]
    assert prompt.messages == [{"role": "user", "content": "Count up. It is 3 now."}]
    assert [tool["function"]["name"] for tool in prompt.tools] == ["add"]
    environment = load_factory(counters)(**prompt.answer)
    call = '<tool_call>\n{"name": "%s", "arguments": {"number": %s}}\n</tool_call>'
    assert environment.step(call % ("add", 4)) == "7" and environment.step("And " + 2 * (call % ("add", 1))) == "8\n9"
    assert "KeyError: 'subtract'; the tools are add" in environment.step(call % ("subtract", 4))
    assert "JSONDecodeError" in environment.step("<tool_call>{add}</tool_call>")
    assert environment.step("It is 9.") is None and environment.reward() == 9


def test_the_chat_template_writes_the_tools_or_is_refused(counters):
    tokenizer = load_tokenizer(resolve_model("bundled:smollm2-135m-instruct"))
    prompts = EnvironmentPrompts(counters, 0)
    with pytest.raises(ValueError, match=r"policy\.model: its chat template does not write the tools"):
        encode_prompt(tokenizer, prompts[0], 4096)
    tokenizer.chat_template = next(path for path in TEMPLATES if path.stem == "qwen2_5").read_text()
    text = tokenizer.decode(encode_prompt(tokenizer, prompts[0], 4096))
    assert '"name": "add"' in text and "Add a number." in text and text.endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("factory", "row", "message"),
    [
        ("WithoutReward", '{"prompt": "Count."}', "WithoutReward has no method get_reward"),
        ("Counter", '{"start": 3}', "a row for TRL needs a column prompt, and has start"),
        ("Counter", '{"prompt": "Count.", "begin": 3}', "TypeError"),
    ],
)
def test_what_does_not_fit_trl_is_named(factory, row, message, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(row)
    with pytest.raises(ValueError, match=message):
        _ = build_task(task(path=str(rows), factory=f"{__name__}:{factory}"), 0)[0]
