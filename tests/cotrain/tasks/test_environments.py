"""Environments as tasks: first messages, factories that cannot be used, and the pieces of chat templates between turns."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from cotrain.config.schema import EnvironmentTask
from cotrain.models.loading import resolve_model
from cotrain.tasks.base import build_task, fingerprint
from cotrain.tasks.environments import TurnTemplate
from cotrain.tasks.prompts import apply_template, load_tokenizer

CALCULATOR = "examples.calculator:Calculator"
TEMPLATES = sorted(Path(str(find_spec("trl").submodule_search_locations[0])).glob("chat_templates/*.jinja"))  # type: ignore[union-attr, index]


class Raises:
    def __init__(self, seed: int):
        raise RuntimeError("no such city")


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
