"""A prompt's cell: texts, messages with text or parts, JSON text, and what cannot be read."""

import json

import pytest

from cotrain.tasks.prompts import chat_messages, split_question

USER = {"role": "user", "content": "3 + 4?"}
SEVEN = {"role": "assistant", "content": "7"}


@pytest.mark.parametrize(
    ("cell", "messages", "answer"),
    [
        ("3 + 4?", [USER], None),
        ([USER], [USER], None),
        ([USER, SEVEN], [USER], "7"),
        ([USER, SEVEN, USER], [USER, SEVEN, USER], None),
        (json.dumps([USER, SEVEN]), [USER], "7"),
        ([{"role": "user", "content": [{"type": "text", "text": "3 + "}, {"type": "text", "text": "4?", "image": None}]}],
         [USER], None),
        ([USER | {"tool_calls": None, "name": "x"}, SEVEN | {"tool_calls": []}], [USER], "7"),
        ('{"x": 1} or [1]?', [{"role": "user", "content": '{"x": 1} or [1]?'}], None),
        ('What is [{"role": "user", "content": ""}]?',
         [{"role": "user", "content": 'What is [{"role": "user", "content": ""}]?'}], None),
    ],
)  # fmt: skip
def test_a_cell_is_read(cell, messages, answer):
    assert split_question(cell) == (messages, answer)


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("", "it has no prompt"),
        (" ", "it has no prompt"),
        ([], "it has no prompt"),
        ([SEVEN], "it has no prompt"),
        ([USER | {"content": " "}], "it has no prompt"),
        (None, "neither a text nor a list of messages, but None"),
        (7, "neither a text nor a list of messages, but 7"),
        (USER, "neither a text nor a list of messages, but {'content'"),
        (json.dumps(USER), "neither a text nor a list of messages, but {'content'"),
        (str([USER]), "looks like messages, but is not JSON"),
        (json.dumps([USER])[:-2] + ",}]", "looks like messages, but is not JSON"),
        (["3 + 4?"], "message 0 of its prompt needs role and content"),
        ([USER, {"from": "user", "value": "a"}], r"message 1 .* and is {'from': 'user', 'value': 'a'}"),
        ([{"content": "a"}], "message 0 of its prompt needs role and content"),
        ([{"role": "", "content": "a"}], "message 0 of its prompt needs role and content"),
        ([USER, {"role": "user"}], "message 1 of its prompt needs role and content"),
        ([{"role": None, "content": "a"}], "message 0 of its prompt needs role and content"),
        ([USER, SEVEN | {"content": None}], r"message 1 .* and is {'content': None, 'role': 'assistant'}"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "message 0 .* of text alone"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "message 0 .* of text alone"),
        ([{"role": "user", "content": ["a"]}], "message 0 .* of text alone"),
        ([USER, SEVEN | {"tool_calls": [{"id": 1}]}, USER], "message 1 of its prompt has tool calls, which would be lost"),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_be_read_is_refused_with_its_message(cell, message):
    with pytest.raises(ValueError, match=message):
        split_question(cell)


def test_instruction_and_system_prompt_leave_the_rows_own_messages_alone():
    own = [{"role": "system", "content": "Old."}, USER]
    assert chat_messages(own, "One word.", "New.") == [
        {"role": "system", "content": "New."},
        {"role": "user", "content": "3 + 4?\nOne word."},
    ]
    assert own == [{"role": "system", "content": "Old."}, USER]
