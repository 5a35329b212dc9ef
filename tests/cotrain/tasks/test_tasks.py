"""Tasks: reasoning-gym problems, datasets in three schemas, and the order in which prompts are visited."""

import json
import pickle
from fractions import Fraction

import numpy as np
import pandas as pd
import pytest
from datasets import Dataset

from cotrain.config.schema import DatasetTask, ReasoningGymTask
from cotrain.models.tiny import byte_tokenizer
from cotrain.tasks.answers import number_in
from cotrain.tasks.base import build_score, build_task, fingerprint
from cotrain.tasks.prompts import PromptOrder, encode_prompt, load_tokenizer

ONE_DIGIT_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def reasoning_task(seed=0, name="chain_sum", parameters=ONE_DIGIT_SUMS, **fields):
    config = ReasoningGymTask(type="reasoning_gym", name=name, parameters=parameters, **fields)
    return build_task(config, seed)


def dataset_task(path, **fields):
    return build_task(DatasetTask(type="dataset", path=str(path), **fields), seed=0)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# reasoning-gym


def test_reasoning_prompts_depend_on_the_seed_only():
    first, again, other = reasoning_task(seed=0), reasoning_task(seed=0), reasoning_task(seed=1)
    problems = [first[i] for i in range(50)]
    assert problems == [again[i] for i in reversed(range(50))][::-1]
    shifted = {other[i].messages[0]["content"] for i in range(50)}
    shared = sum(problem.messages[0]["content"] in shifted for problem in problems)
    assert shared < 25  # neighbouring seeds are not the same list moved by one
    assert len({problem.id for problem in problems}) == 50
    assert pickle.loads(pickle.dumps(problems)) == problems


def test_reasoning_prompt_carries_instruction_and_system_prompt():
    task = reasoning_task(size=7, instruction="One number only.", system_prompt="You add.")
    system, user = task[3].messages
    assert system == {"role": "system", "content": "You add."}
    assert len(task) == 7
    assert user["role"] == "user"
    assert user["content"].endswith(" =\nOne number only.")


def test_reasoning_score_is_the_verifiers_score_of_the_final_answer():
    task = reasoning_task()
    prompt = next(task[i] for i in range(100) if task[i].answer["answer"] == "7")
    assert task.score(prompt, "Let me see: 3 + 4 = 7.") == 1.0
    assert task.score(prompt, "The answer is 7, since 9 - 2") == 1.0
    assert task.score(prompt, "7 is wrong, it is 8") == 0.0
    assert task.score(prompt, "") == 0.0
    words = reasoning_task(name="spell_backward", parameters={})
    prompt = words[0]
    assert words.score(prompt, f"Sure!\n{prompt.answer['answer']}") == 1.0


def test_reasoning_verifier_that_raises_scores_zero_and_is_logged(caplog):
    task = reasoning_task(name="prime_factorization", parameters={})
    assert task.score(task[0], "two times two") == 0.0
    assert "the verifier raised on 'two times two'" in caplog.text


def test_reasoning_mixture_scores_each_problem_by_its_own_verifier():
    specs = [
        {"name": "spell_backward", "weight": 1, "config": {}},
        {"name": "chain_sum", "weight": 1, "config": ONE_DIGIT_SUMS},
    ]
    task = reasoning_task(name="composite", parameters={"datasets": specs})
    prompts = [task[i] for i in range(20)]
    assert {prompt.answer["metadata"]["source_dataset"] for prompt in prompts} == {"spell_backward", "chain_sum"}
    assert all(task.score(prompt, f"Answer: {prompt.answer['answer']}") == 1.0 for prompt in prompts)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "chain_sums"}, r"task\.name: reasoning-gym has no task 'chain_sums'; it has chain_sum"),
        (
            {"parameters": {"digits": 1}},
            r"task\.parameters: chain_sum: .*'digits'; parameters are min_terms, max_terms",
        ),
        ({"parameters": {"min_terms": 5, "max_terms": 2}}, r"task\.parameters: chain_sum: max_terms must be"),
        ({"parameters": {"size": 5}}, r"task\.parameters: chain_sum: .*'size'.*set task\.size and seed"),
        ({"parameters": {"seed": 5}}, r"task\.parameters: chain_sum: .*'seed'.*set task\.size and seed"),
    ],
)
def test_reasoning_task_that_is_not_there(fields, message):
    with pytest.raises(ValueError, match=message):
        reasoning_task(**fields)


# datasets


def verl_row(question, truth):
    return {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": question}],
        "ability": "MATH",
        "reward_model": {"ground_truth": truth, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": "9a9b6eb4"},
    }


def test_verl_schema(tmp_path):
    task = dataset_task(write_jsonl(tmp_path / "dapo.jsonl", [verl_row("3 + 4?", "7"), verl_row("2 + 2?", "4")]))
    prompt = task[0]
    assert (len(task), prompt.id, prompt.answer) == (2, "dapo-0", "7")
    assert prompt.messages == [{"role": "user", "content": "3 + 4?"}]
    as_json = verl_row("3 + 4?", "7") | {"prompt": json.dumps(prompt.messages), "reward_model": '{"ground_truth": "7"}'}
    assert dataset_task(write_jsonl(tmp_path / "json.jsonl", [as_json]))[0].answer == "7"


def test_messages_schema_takes_the_last_assistant_message_as_answer(tmp_path):
    conversation = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Capital of France?"},
        {"role": "assistant", "content": "Paris"},
    ]
    path = write_jsonl(tmp_path / "chat.jsonl", [{"messages": conversation, "prompt_id": "x"}])
    prompt = dataset_task(path, reward="exact", instruction="One word.")[0]
    assert [message["role"] for message in prompt.messages] == ["user", "assistant", "user"]
    assert prompt.messages[-1]["content"] == "Capital of France?\nOne word."
    assert prompt.answer == "Paris"


def test_a_system_prompt_takes_the_place_of_the_rows_own(tmp_path):
    row = {"prompt": [{"role": "system", "content": "Old."}, {"role": "user", "content": "3 + 4?"}], "answer": 7}
    path = write_jsonl(tmp_path / "chat.jsonl", [row])
    for given, expected in (("", "Old."), ("New.", "New.")):
        system, user = dataset_task(path, reward="numeric", system_prompt=given)[0].messages
        assert (system["role"], system["content"], user["content"]) == ("system", expected, "3 + 4?")


def test_prompt_answer_schemas(tmp_path):
    gsm8k = write_jsonl(tmp_path / "gsm8k.jsonl", [{"question": "?", "answer": "3+4=<<3+4=7>>7\n#### 1,007"}])
    plain = write_jsonl(tmp_path / "plain.jsonl", [{"prompt": "3 + 4?", "answer": 7}])
    assert dataset_task(gsm8k, reward="numeric")[0].answer == "1,007"
    headings = write_jsonl(tmp_path / "text.jsonl", [{"question": "?", "answer": "#### One\n##### Two #\nthree"}])
    assert dataset_task(headings, reward="exact")[0].answer == "#### One\n##### Two #\nthree"
    prompt = dataset_task(plain, reward="numeric")[0]
    assert prompt.answer == 7
    assert prompt.messages == [{"role": "user", "content": "3 + 4?"}]


def test_other_column_names(tmp_path):
    path = write_jsonl(tmp_path / "math.jsonl", [{"problem": "3 + 4?", "solution": "7", "answer": "seven"}])
    prompt = dataset_task(path, prompt_column="problem", answer_column="solution")[0]
    assert (prompt.messages[0]["content"], prompt.answer) == ("3 + 4?", "7")


def test_json_parquet_and_folders_read_alike(tmp_path):
    rows = [{"prompt": f"{i} + 1?", "answer": str(i + 1)} for i in range(5)]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    Dataset.from_list(rows).to_parquet(tmp_path / "rows.parquet")
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    write_jsonl(tmp_path / "folder" / "train.jsonl", rows)
    write_jsonl(tmp_path / "folder" / "test.jsonl", rows[:2])
    for name in ("rows.json", "rows.parquet", "saved", "folder"):
        task = dataset_task(tmp_path / name)
        assert [task[i].answer for i in range(len(task))] == ["1", "2", "3", "4", "5"], name
    assert len(dataset_task(tmp_path / "folder", split="test")) == 2
    assert len(dataset_task(tmp_path / "rows.json", split="train[:3]")) == 3


def test_a_float_of_32_bits_keeps_its_value(tmp_path):
    Dataset.from_pandas(pd.DataFrame({"prompt": ["?"] * 3, "answer": np.array([0.1, 4, 1e-7], np.float32)})).to_parquet(
        tmp_path / "rows.parquet"
    )
    task = dataset_task(tmp_path / "rows.parquet", reward="numeric")
    assert [number_in(task[i].answer) for i in range(3)] == [Fraction(1, 10), 4, Fraction(1, 10**7)]


def test_users_reward_may_do_without_answers(tmp_path, monkeypatch):
    (tmp_path / "brevity.py").write_text("def score(prompt, response, answer): return -len(response)\n")
    monkeypatch.chdir(tmp_path)
    task = dataset_task(write_jsonl(tmp_path / "prompts.jsonl", [{"prompt": "Hi"}]), reward="brevity:score")
    assert task[0].answer is None
    config = DatasetTask(type="dataset", path=str(tmp_path / "prompts.jsonl"), reward="brevity:score")
    assert build_score(config, seed=0)(task[0], ["four"]) == [-4.0]


@pytest.mark.parametrize(
    ("rows", "fields", "message"),
    [
        (
            [{"text": "a", "label": "b"}],
            {},
            r"task\.prompt_column: no column messages or prompt or question; .* these: text, label",
        ),
        (
            [{"prompt": "a", "label": "b"}],
            {},
            r"task\.answer_column: no column reward_model or answer; .* these: prompt, label",
        ),
        ([{"prompt": "a"}], {"prompt_column": "x"}, r"task\.prompt_column: no column x; .* these: prompt"),
        ([{"prompt": "a"}], {"answer_column": "x"}, r"task\.answer_column: no column x; .* these: prompt"),
        ([{"prompt": "a", "answer": None}], {}, r"row 0: its answer None is not a text or a number"),
        ([{"prompt": "", "answer": "b"}], {}, "row 0: it has no prompt"),
        ([{"messages": [{"role": "user", "content": "a"}]}], {}, "row 0: its answer None"),
        (
            [{"prompt": "a", "reward_model": "{'ground_truth': '7'}"}],
            {},
            "row 0: its answer is a text with a ground_truth",
        ),
        (
            [{"prompt": "<image> a", "answer": "b", "images": ["x"]}],
            {},
            r"task\.path: policies read text only, .* images",
        ),
        (
            [{"messages": [{"from": "user", "value": "a"}]}],
            {},
            r"row 0: message 0 of its prompt needs role and content, .*'from': 'user', 'value': 'a'",
        ),
    ],
)
def test_rows_that_do_not_fit(tmp_path, rows, fields, message):
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        dataset_task(path, **fields)


SIZE = 20
LONG, EMPTY, WORD = 3, 7, 11


@pytest.fixture
def model(tmp_path):
    """What a check of prompts needs of a policy: a tokenizer of bytes, whose template refuses the role `tool`."""
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def mixed(tmp_path):
    """A dataset of which some rows are bad, each in a way of its own: the path."""
    rows = [{"prompt": [{"role": "user", "content": f"{i} + 1?"}], "answer": str(i + 1)} for i in range(SIZE)]
    rows[LONG]["prompt"][0]["content"] = "9" * 41
    rows[EMPTY]["prompt"] = []
    rows[WORD]["answer"] = "twelve"
    rows[SIZE - 1]["prompt"][0]["role"] = "tool"
    return write_jsonl(tmp_path / "mixed.jsonl", rows)


def checked(path, model, limit=40, **fields):
    return build_task(DatasetTask(type="dataset", path=str(path), reward="numeric", **fields), 0, model, limit)


def test_all_bad_rows_are_listed_at_once_whatever_is_wrong_with_them(mixed, model):
    with pytest.raises(ValueError) as raised:
        checked(mixed, model)
    head, *rows, fix = str(raised.value).splitlines()
    assert head == f"task.path: 4 of the 20 rows of {mixed} cannot be used:"
    assert [row.strip() for row in rows] == [
        "row 3: prompt mixed-3 has 41 tokens, rollout.max_prompt_tokens is 40: raise it, which a resume may do, or leave such "
        "prompts out of the task",
        "row 7: it has no prompt",
        "row 11: its answer 'twelve' is not wholly one number, as task.reward = 'numeric' needs",
        "row 19: the chat template raises TemplateError: no tools",
    ]
    assert "task.skip_bad_rows = true" in fix
    with pytest.raises(ValueError, match=r"\n +row 9: .*\n +and 10 more\n"):
        checked(mixed, model, limit=0)


def test_bad_rows_are_left_out_on_request_and_counted(mixed, model, caplog):
    task = checked(mixed, model, skip_bad_rows=True)
    assert len(task) == SIZE - 4
    assert [task[i].id for i in (2, 3, 15)] == ["mixed-2", "mixed-4", "mixed-18"]
    [said] = caplog.messages
    assert said.startswith(f"left out: 4 of the 20 rows of {mixed}, such as row 3: prompt mixed-3 has 41 tokens")
    with pytest.raises(ValueError, match="20 of the 20 rows"):
        checked(mixed, model, limit=0, skip_bad_rows=True)


def test_the_limit_counts_what_the_run_encodes(tmp_path, model):
    path = write_jsonl(tmp_path / "long.jsonl", [{"prompt": "9" * 41, "answer": 1}])
    assert len(encode_prompt(load_tokenizer(model), checked(path, model, limit=41)[0], 41)) == 41
    with pytest.raises(ValueError, match="1 of the 1 rows"):
        checked(path, model)


def test_generated_problems_are_checked_too(model):
    config = ReasoningGymTask(type="reasoning_gym", name="chain_sum")
    longest = max(len(build_task(config, 0)[i].messages[0]["content"]) for i in range(64))
    build_task(config, 0, model, longest)
    with pytest.raises(
        ValueError, match=rf"^prompt chain_sum-\d+ has {longest} tokens, rollout\.max_prompt_tokens is {longest - 1}"
    ):
        build_task(config, 0, model, longest - 1)


def test_a_tokenizer_that_cannot_be_loaded_is_refused(mixed, model):
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=rf"policy\.model: the tokenizer in {model} cannot be loaded"):
        checked(mixed, model)


def test_the_fingerprint_tells_prompts_and_answers_from_others(tmp_path):
    found = set()
    for rows in (
        [("a", 1), ("b", 2)],
        [("a", 1), ("b", 3)],
        [("a", 1), ("c", 2)],
        [("b", 2), ("a", 1)],
        [("a", 1)],
        [("a", "1"), ("b", "2")],
    ):
        path = tmp_path / f"{len(found)}" / "rows.jsonl"
        path.parent.mkdir()
        write_jsonl(path, [{"prompt": prompt, "answer": answer} for prompt, answer in rows])
        found.add(fingerprint(dataset_task(path, reward="numeric")))
        assert fingerprint(dataset_task(path, reward="exact")) in found
    assert len(found) == 6
    assert (
        fingerprint(reasoning_task(seed=0))
        == fingerprint(reasoning_task(seed=0))
        != fingerprint(reasoning_task(seed=1))
    )


def test_a_dataset_is_read_once(tmp_path, model):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"prompt": "1 + 1?", "answer": 2}])
    assert checked(path, model) is checked(path, model)


@pytest.mark.parametrize(
    ("path", "asked"), [("openai/gsm8k", ("openai/gsm8k",)), ("openai/gsm8k/main", ("openai/gsm8k", "main"))]
)
def test_a_hub_id_may_name_a_configuration(monkeypatch, path, asked):
    rows = Dataset.from_list([{"question": "?", "answer": "#### 7"}])
    monkeypatch.setattr("datasets.load_dataset", lambda *source, split: {(asked, "test"): rows}[source, split])
    assert dataset_task(path, split="test")[0].answer == "7"


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        ("missing.jsonl", {}, r"task\.path: no file or folder 'missing\.jsonl'"),
        ("./missing", {}, r"task\.path: no file or folder '\./missing'"),
        ("notes.txt", {}, r"task\.path: notes\.txt must end in \.json, \.jsonl, \.parquet"),
        ("empty.jsonl", {}, r"task\.path or task\.split: cannot read empty\.jsonl"),
        ("none.json", {}, r"task\.path or task\.split: cannot read none\.json: .* no data"),
        ("split", {"split": "test[:0]"}, r"task\.path or task\.split: cannot read split: .* no data"),
        ("broken.jsonl", {}, r"cannot read broken\.jsonl: JSON parse error"),
        ("folder", {}, r"task\.path or task\.split: cannot read folder"),
        ("split", {"split": "train"}, r"task\.path or task\.split: cannot read split: .*\['test'\]"),
        ("openai/gsm8k", {}, r"cannot read openai/gsm8k: .* Give a json, jsonl or parquet file"),
    ],
)
def test_dataset_that_is_not_there(tmp_path, monkeypatch, path, fields, message):
    monkeypatch.chdir(tmp_path)
    for name, text in {"notes.txt": "x", "empty.jsonl": "", "none.json": "[]", "broken.jsonl": "{no"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "folder").mkdir()
    (tmp_path / "split").mkdir()
    write_jsonl(tmp_path / "split" / "test.jsonl", [{"prompt": "a", "answer": "b"}])
    with pytest.raises(ValueError, match=message):
        dataset_task(path, **fields)


# order


def test_every_prompt_comes_once_an_epoch_in_another_order_each_time():
    order = PromptOrder(num_prompts=12, prompts_per_step=4, seed=0)
    epochs = [[index for step in range(3 * e + 1, 3 * e + 4) for index in order.step(step)] for e in range(3)]
    assert all(sorted(epoch) == list(range(12)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3


def test_no_step_mixes_two_epochs():
    order = PromptOrder(num_prompts=10, prompts_per_step=4, seed=0)
    steps = [order.step(step) for step in range(1, 7)]
    assert all(len(set(one + two)) == 8 for one, two in zip(steps[::2], steps[1::2], strict=True))


def test_the_order_depends_on_seed_and_step_only():
    one, again, other = (PromptOrder(100, 5, seed) for seed in (1, 1, 2))
    steps = [one.step(step) for step in range(1, 31)]
    assert steps == [again.step(step) for step in range(30, 0, -1)][::-1]
    assert steps != [other.step(step) for step in range(1, 31)]
