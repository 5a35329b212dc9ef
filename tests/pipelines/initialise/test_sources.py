"""Sources of `cotrain init` on the tiny model's own tokenizer and chat template."""

import json
import re

import pytest
from transformers import AutoTokenizer

from cotrain.models.loading import resolve_model
from pipelines.initialise.sources import open_prompts


@pytest.fixture(scope="module")
def model():
    return resolve_model("tiny:llama")


@pytest.fixture
def open_with(run_config, model):
    """Open an [init.source]; keyword arguments are fields of [rollout]."""

    def build(source: dict, **rollout):
        config = run_config(
            policy={"model": "tiny:llama"}, init={"source": source}, rollout={"samples_per_prompt": 2, **rollout}
        )
        return open_prompts(config, model)

    return build


@pytest.fixture
def dataset(tmp_path):
    def write(rows: list[dict]) -> str:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return str(path)

    return write


def test_the_policys_prompts_come_in_seeded_order(open_with):
    source = open_with({"type": "policy"})
    requests = source.requests(0, 6)
    assert [r.sample_index for r in requests] == [0, 1] * 6
    assert len({r.prompt_id for r in requests}) == 6
    assert [r.prompt_id for r in requests[::2]] != sorted(r.prompt_id for r in requests[::2])
    assert source.requests(4, 2) == requests[8:]
    assert len({r.seed for r in requests}) == len(requests)


def test_the_policy_answers_the_prompts_of_a_dataset(open_with, dataset, model):
    messages = [{"role": "user", "content": "What is 3?"}, {"role": "assistant", "content": "It is 3."}]
    source = open_with({"type": "dataset", "path": dataset([{"messages": messages}])})
    text = AutoTokenizer.from_pretrained(model).decode(source.requests(0, 1)[0].prompt_token_ids)
    assert text.endswith("What is 3?<|im_end|>\n<|im_start|>assistant\n")


def test_what_is_too_long_is_left_out_and_said(open_with, dataset, capsys):
    path = dataset([{"prompt": "short", "reply": "x"}, {"prompt": "long " * 100, "reply": "x"}])
    source = open_with({"type": "dataset", "path": path}, max_prompt_tokens=200)
    assert len(source.task) == 1
    assert re.search(rf"note: left out 1 of the 2 rows of {path}, such as row 1.* 519 tokens", capsys.readouterr().out)
    with pytest.raises(ValueError, match=r"init\.source\.path: 2 of the 2 rows .*cannot be used"):
        open_with({"type": "dataset", "path": path}, max_prompt_tokens=8)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ({}, r"init\.source\.prompt_column: no column messages or prompt or question; name one of these: body, title"),
        ({"prompt_column": "text"}, r"init\.source\.prompt_column: no column text; name one of these: body, title"),
        ({"prompt_column": "body"}, r"init\.source\.path: 1 of the 1 rows .*\n +row 0: its prompt is neither"),
    ],
)
def test_a_wrong_schema_is_named_with_the_columns_found(open_with, dataset, source, message):
    path = dataset([{"body": None, "title": "a"}])
    with pytest.raises(ValueError, match=message):
        open_with({"type": "dataset", "path": path, **source})


def test_a_missing_dataset_names_its_own_field(open_with):
    with pytest.raises(ValueError, match=r"^init\.source\.path: no file or folder '/nowhere\.jsonl'"):
        open_with({"type": "dataset", "path": "/nowhere.jsonl"})
