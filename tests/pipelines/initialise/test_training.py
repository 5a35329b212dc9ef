"""The steps of `cotrain init` with a real tiny drafter; only the engine is a stand-in."""

import asyncio
import io
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cotrain.config.load import write_config
from cotrain.records import Prompt, Rollout, RolloutBatch, RolloutRequest, Versions
from cotrain.run.checkpoint import find_defect, latest_checkpoint, newest_state
from cotrain.run.console import Console
from cotrain.run.rows import read_rows
from cotrain.run.run_dir import RunDir
from cotrain.tasks.prompts import PromptOrder
from cotrain.transport.features import write_records
from pipelines.initialise.pipeline import EXPECTED, TEXT, Initialisation
from tests.cotrain.trainer.conftest import AUX_LAYERS, expected_rates, weights_of

FINGERPRINTS = {"model": "m"}


@dataclass
class Engine:
    """Answers with rollouts whose features were computed beforehand, as many in a step as are asked for, and notes the requests."""

    records: list[Any]
    folder: Any
    asked: list[list[RolloutRequest]] = field(default_factory=list)

    async def set_num_speculative_tokens(self, number: int) -> None:
        assert number == 0

    async def generate(self, requests: list[RolloutRequest]) -> RolloutBatch:
        first = 12 * int(requests[0].prompt_id.removeprefix("p")) // 6
        self.asked.append(requests)
        path = self.folder / f"{len(self.asked)}.safetensors"
        records = self.records[first : first + len(requests)]
        write_records(path, records)
        rollouts = [
            Rollout(q.prompt_id, q.sample_index, ids[: r.prompt_length], ids[r.prompt_length :], [], "", "stop", Versions(0, 0))
            for q, r in zip(requests, records, strict=True)
            for ids in [r.token_ids.tolist()]
        ]  # fmt: skip
        return RolloutBatch(rollouts, [str(path)], 2.0, sum(len(r.token_ids) for r in rollouts))


class Prompts(list):
    """A task whose messages are token ids already."""

    def __getitem__(self, i):
        return Prompt(f"p{i}", [3 + i % 4, i], None)


@dataclass
class Attempt:
    run_dir: RunDir
    trainer: Any
    engine: Engine
    rows: dict[int, dict[str, float]]
    printed: str
    ended: bool


@pytest.fixture
def records(target):
    return target.rollouts(24, 2, seed=1, policy_version=0)


@pytest.fixture
def attempt(records, target, run_config, tmp_path, monkeypatch):
    """Make three steps of 12 rollouts in a run folder of its own; a second attempt of the same name resumes it."""
    monkeypatch.setattr(PromptOrder, "step", lambda self, step: [*range(6 * (step - 1), 6 * step)])

    def run(name: str, stop_after: int = 10**9, max_bytes: int = 2**21, **drafter: Any) -> Attempt:
        model = {"type": "eagle3", "draft_vocab_size": 96, "aux_layers": AUX_LAYERS, "trained_depth": 3}
        config = run_config(
            name=name,
            steps=3,
            checkpoint={"every": 2},
            drafter={
                "model": model, "batch_tokens": 100, "updates_per_step": 6, "buffer": {"max_age": 0},
                "optimizer": {"learning_rate": 3e-3}, **drafter,
            },
            rollout={
                "prompts_per_step": 6, "samples_per_prompt": 2, "num_speculative_tokens": 3, "dtype": "float32",
                "max_prompt_tokens": 32, "max_new_tokens": 32, "features": {"max_bytes": max_bytes},
            },
        )  # fmt: skip
        fresh = not (config.run_root / name).exists()
        run_dir = RunDir(config.run_root, name, resumed=not fresh)
        write_config(config, run_dir.config)
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        engine, printed = Engine(records, scratch), io.StringIO()
        stop = lambda: len(engine.asked) >= stop_after
        tokenizer = SimpleNamespace(apply_chat_template=lambda messages, **_: messages)
        init = Initialisation(config, run_dir, target.folder, Prompts(range(24)), tokenizer, Console(printed), stop)
        state = newest_state(run_dir, config, FINGERPRINTS)
        trainer = init._trainer(state)
        ended = asyncio.run(init.steps(engine, trainer, state))
        run_dir.close()
        assert not list(scratch.iterdir()), "features that were read are deleted"
        rows = {row["step"]: row for row in read_rows(run_dir.metrics) if row["step"] > state.step}
        return Attempt(run_dir, trainer, engine, rows, printed.getvalue(), ended)

    return run


def expected(trainer, records) -> float:
    return 1 + sum(expected_rates(trainer, records))


def test_training_improves_and_reports(attempt, records):
    ended = attempt("first")
    assert ended.ended and list(ended.rows) == [1, 2, 3]
    lengths = [row[EXPECTED] for row in ended.rows.values()]
    assert lengths[0] < lengths[1] and expected(ended.trainer, records[36:]) > lengths[0]
    assert ended.rows[3]["drafter/loss"] < 0.8 * ended.rows[1]["drafter/loss"]
    assert [row["versions/drafter"] for row in ended.rows.values()] == [1, 2, 3], "each step publishes"
    assert "step 3/3" in ended.printed and "p0 d3" in ended.printed and "loss " in ended.printed
    published = expected_rates(ended.trainer, records[36:], ended.trainer._published[3])
    assert 1 + sum(published) == expected(ended.trainer, records[36:])


def test_each_step_has_other_requests_and_its_text_is_written(attempt, records):
    ended = attempt("first")
    requests = [request for step in ended.engine.asked for request in step]
    assert [r.sample_index for r in requests] == [0, 1] * 18
    assert len({r.seed for r in requests}) == 36 and len({r.prompt_id for r in requests}) == 18
    written = [one for row in read_rows(ended.run_dir.path / TEXT) for one in row["rollouts"]]
    assert [one["prompt_token_ids"] + one["token_ids"] for one in written] == [
        r.token_ids.tolist() for r in records[:36]
    ]


def test_it_trains_in_every_nth_step_like_a_run(attempt):
    ended = attempt("rare", train_every=2)
    assert [row["versions/drafter"] for row in ended.rows.values()] == [0, 1, 1]
    assert ["drafter/loss" in row for row in ended.rows.values()] == [False, True, False]


def test_a_stopped_and_resumed_run_equals_one_in_one_go(attempt):
    straight = attempt("straight")
    first = attempt("halves", stop_after=1)
    assert not first.ended and list(first.rows) == [1]
    second = attempt("halves")
    assert list(second.rows) == [2, 3] and second.engine.asked == straight.engine.asked[1:]
    one, two = weights_of(straight.trainer), weights_of(second.trainer)
    assert all(torch.equal(one[name], two[name]) for name in one)
    third = attempt("halves")  # a finished one has nothing left to do
    assert third.ended and not third.engine.asked and third.trainer.drafter_version == 3
    assert all(torch.equal(weights_of(third.trainer)[name], one[name]) for name in one)


def test_a_small_memory_holds_the_newest_rollouts_and_a_checkpoint_is_whole(attempt, records):
    ended = attempt("small", max_bytes=20 * records[0].num_bytes)
    assert [row["drafter/buffer_tokens"] for row in ended.rows.values()] == [12 * 24, 20 * 24, 20 * 24]
    checkpoint = latest_checkpoint(ended.run_dir)
    assert checkpoint is not None and find_defect(checkpoint) is None
    assert {path.name for path in checkpoint.iterdir()} == {"COMPLETE", "state.json", "trainer"}
