"""Prompts as token ids, with a real tokenizer and its chat template."""

import pytest
from transformers import AutoTokenizer

from cotrain.models.loading import resolve_model
from cotrain.records import Prompt
from cotrain.tasks.prompts import encode_prompt

PROMPT = Prompt("sum-1", [{"role": "user", "content": "1+2=?"}], "3")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(resolve_model("tiny:llama"))


def test_the_chat_template_is_applied_and_the_assistants_turn_opened(tokenizer):
    token_ids = encode_prompt(tokenizer, PROMPT, max_prompt_tokens=64)
    assert tokenizer.decode(token_ids) == "<|im_start|>user\n1+2=?<|im_end|>\n<|im_start|>assistant\n"
    assert type(token_ids) is list
    assert {type(token) for token in token_ids} == {int}


def test_a_prompt_over_the_limit_is_an_error_that_names_it(tokenizer):
    length = len(encode_prompt(tokenizer, PROMPT, 64))
    assert encode_prompt(tokenizer, PROMPT, length)
    with pytest.raises(
        ValueError, match=rf"prompt sum-1 has {length} tokens, rollout\.max_prompt_tokens is {length - 1}"
    ):
        encode_prompt(tokenizer, PROMPT, length - 1)
