"""Rollouts on disk: parts, the split by prompt, and what is refused."""

import asyncio
import io
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from cotrain.records import Prompt, Rollout, RolloutBatch, RolloutRequest, Versions
from cotrain.run.console import Console
from cotrain.run.rows import read_rows
from pipelines.initialise.pipeline import Initialisation
from pipelines.initialise.sources import (
    FILE,
    Corpus,
    PromptStream,
    StoredRollout,
    split,
)

FINGERPRINTS = {"model": "m", "tokenizer": "t"}


def stored(prompt: int, sample: int = 0, length: int = 5) -> StoredRollout:
    return StoredRollout(f"p{prompt}", sample, [prompt, 1, 2], list(range(length)))


def new_corpus(folder) -> Corpus:
    folder.mkdir(exist_ok=True)
    return Corpus(folder, FINGERPRINTS)


@dataclass
class EchoEngine:
    """Answers a request with as many tokens as its prompt asks for, all equal to its seed."""

    asked: list[RolloutRequest] = field(default_factory=list)

    async def generate(self, requests, tap=True, **overrides):
        self.asked += requests
        rollouts = [
            Rollout(r.prompt_id, r.sample_index, r.prompt_token_ids, [r.seed] * r.prompt_token_ids[0], [], "", "stop",
                    Versions(0, 0), None)
            for r in requests
        ]  # fmt: skip
        return RolloutBatch(rollouts, [], None, 1.0, 0)


class Prompts(list):
    """A task whose messages are token ids already."""

    def prompt(self, i):
        return Prompt(f"p{i}", [3 + i % 4, i], None)


@pytest.fixture
def stream(run_config):
    """A stream of so many prompts, two samples of each."""
    config = run_config(seed=7, rollout={"samples_per_prompt": 2})
    tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **_: messages)
    return lambda num_prompts: PromptStream(Prompts(range(num_prompts)), tokenizer, config)


@pytest.fixture
def run_collect(run_config):
    """Collect `tokens` tokens into a folder; the user asks to stop after `stop_after` parts."""

    def run(folder, prompts, tokens: int, stop_after: int = 10**9) -> tuple[Corpus, bool, list[str]]:
        config = run_config(init={"tokens": tokens}, rollout={"max_new_tokens": 8, "samples_per_prompt": 2})
        corpus, printed, asked = new_corpus(folder), io.StringIO(), iter(range(10**9))
        stop = lambda: next(asked) >= stop_after
        init = Initialisation(config, None, None, corpus, Console(printed), stop)
        return corpus, asyncio.run(init.collect(EchoEngine(), prompts)), printed.getvalue().splitlines()

    return run


def test_parts_are_read_back_and_half_written_ones_are_not(tmp_path):
    corpus = new_corpus(tmp_path)
    corpus.append([stored(1), stored(2)])
    corpus.append([stored(3)])
    with (tmp_path / FILE).open("a") as file:
        file.write('{"step": 3, "rollouts": [{"prompt_id": "p')
    again = new_corpus(tmp_path)
    assert again.rollouts == [stored(1), stored(2), stored(3)] and again.num_response_tokens == 15
    again.append([stored(4)])
    assert [row["step"] for row in read_rows(tmp_path / FILE)] == [0, 1, 2, 3]


def test_a_new_corpus_keeps_what_the_first_run_said_of_its_rollouts(tmp_path):
    new_corpus(tmp_path)
    assert Corpus(tmp_path, {"model": "other"}).fingerprints == FINGERPRINTS


def test_the_fingerprint_is_of_the_tokens(tmp_path):
    def fingerprint(*rollouts):
        corpus = new_corpus(tmp_path / f"{len(list(tmp_path.iterdir()))}")
        corpus.append(rollouts)
        return corpus.fingerprint()

    assert fingerprint(stored(1)) == fingerprint(stored(1, sample=4))
    assert fingerprint(stored(1)) != fingerprint(stored(2))
    assert fingerprint(stored(1), stored(2)) != fingerprint(stored(2), stored(1))


def test_collecting_stops_at_the_tokens_asked_for_and_goes_on_where_it_was_stopped(run_collect, stream, tmp_path):
    straight, done, said = run_collect(tmp_path / "straight", stream(50), tokens=2000)
    assert done and 2000 <= straight.num_response_tokens < 2000 + 2 * 6
    assert len(said) > 2 and f"{straight.num_response_tokens:,}/2,000 tokens" in said[-1]
    assert not run_collect(tmp_path / "halves", stream(50), tokens=2000, stop_after=1)[1]
    resumed, done, _ = run_collect(tmp_path / "halves", stream(50), tokens=2000)
    assert done and resumed.rollouts == straight.rollouts


def test_used_up_prompts_come_again_with_new_samples(run_collect, stream, tmp_path):
    corpus, _, _ = run_collect(tmp_path / "rollouts", stream(4), tokens=60)
    keys = [(r.prompt_id, r.sample_index) for r in corpus.rollouts]
    assert len(set(keys)) == len(keys) > 8
    assert max(sample for _, sample in keys) >= 2
    assert len({(r.prompt_id, r.token_ids[0]) for r in corpus.rollouts}) == len(keys)  # seeds of their own


@pytest.mark.parametrize(("rollouts", "held"), [(6, 3), (60, 6), (90, 9), (100, 9), (9000, 126)])
def test_the_last_tenth_is_held_out_as_whole_prompts(rollouts, held):
    corpus = [stored(number // 3, number % 3) for number in range(rollouts)]
    training, held_out = split(corpus, samples=3)
    assert training + held_out == corpus and len(held_out) == held
    assert not {r.prompt_id for r in training[: len(training) // 3 * 3]} & {
        r.prompt_id for r in held_out[rollouts % 3 :]
    }


def test_too_few_rollouts_to_hold_some_out_are_refused():
    with pytest.raises(ValueError, match=r"init\.tokens: 3 rollouts are too few"):
        split([stored(0, sample) for sample in range(3)], samples=3)
