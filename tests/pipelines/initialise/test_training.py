"""Training of a real tiny drafter on recorded rollouts, as `cotrain init` does it; only the engine is a stand-in."""

import asyncio
import io
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from cotrain.config.load import write_config
from cotrain.run.checkpoint import find_defect, latest_checkpoint, newest_state
from cotrain.run.console import Console
from cotrain.run.rows import read_rows
from cotrain.run.run_dir import RunDir
from cotrain.transport.features import write_records
from pipelines.initialise.pipeline import EXPECTED, Initialisation
from pipelines.initialise.sources import Corpus, StoredRollout
from tests.cotrain.trainer.conftest import AUX_LAYERS, expected_rates, weights_of

FINGERPRINTS = {"model": "m"}


def stored(record) -> StoredRollout:
    ids = record.token_ids.tolist()
    return StoredRollout("p", 0, ids[: record.prompt_length], ids[record.prompt_length :])


@dataclass
class Engine:
    """Writes features that were computed beforehand. It holds the rollouts that it was asked for, and their number by call."""

    records: list[Any]
    folder: Any
    sizes: list[int] = field(default_factory=list)
    tapped: list[list[int]] = field(default_factory=list)

    async def tap_sequences(self, sequences):
        by_tokens = {tuple(r.token_ids.tolist()): r for r in self.records}
        self.sizes.append(len(sequences))
        self.tapped += [ids for ids, _ in sequences]
        path = self.folder / f"{len(self.sizes)}.safetensors"
        write_records(path, [by_tokens[tuple(ids)] for ids, _ in sequences])
        return [str(path)]


class Tracker:
    def __init__(self):
        self.rows = {}

    def log_step(self, step, row):
        self.rows[step] = row


@dataclass
class Attempt:
    run_dir: RunDir
    trainer: Any
    engine: Engine
    rows: dict[int, dict[str, float]]
    printed: str


@pytest.fixture
def records(target):
    return target.rollouts(24, 2, seed=1, policy_version=0)


@pytest.fixture
def attempt(records, target, run_config, tmp_path):
    """Train on the first 36 of 48 rollouts in a run folder of its own; a second attempt of the same name resumes it."""

    def run(name: str, stop_after: int = 10**9, max_bytes: int = 2**21) -> Attempt:
        model = {"type": "eagle3", "draft_vocab_size": 96, "aux_layers": AUX_LAYERS, "trained_depth": 3}
        config = run_config(
            name=name,
            init={"epochs": 2},
            checkpoint={"every": 2},
            drafter={"model": model, "batch_tokens": 100, "optimizer": {"learning_rate": 3e-3}},
            rollout={
                "prompts_per_step": 6, "samples_per_prompt": 2, "num_speculative_tokens": 3, "dtype": "float32",
                "max_prompt_tokens": 32, "max_new_tokens": 32, "features": {"max_bytes": max_bytes},
            },
        )  # fmt: skip
        fresh = not (config.run_root / name).exists()
        run_dir = RunDir.create(config.run_root, name) if fresh else RunDir(config.run_root, name)
        write_config(config, run_dir.config)
        scratch = tmp_path / "scratch"
        scratch.mkdir(exist_ok=True)
        engine, tracker, printed = Engine(records, scratch), Tracker(), io.StringIO()
        stop = lambda: len(engine.sizes) >= stop_after
        corpus = Corpus(run_dir.path, FINGERPRINTS)
        init = Initialisation(config, run_dir, target.folder, corpus, Console(printed), stop)
        state, rollouts = newest_state(run_dir, config, FINGERPRINTS), [stored(r) for r in records[:36]]
        trainer = asyncio.run(init.train(engine, rollouts, state, tracker))
        run_dir.close()
        assert not list(scratch.iterdir()), "features that were read are deleted"
        return Attempt(run_dir, trainer, engine, tracker.rows, printed.getvalue())

    return run


def expected(trainer, records) -> float:
    return 1 + sum(expected_rates(trainer, records))


def test_training_improves_and_reports(attempt, records):
    ended = attempt("first")
    assert ended.engine.sizes == [12] * 3 and list(ended.rows) == [1, 2, 3]
    assert ended.engine.tapped == [r.token_ids.tolist() for r in records[:36]], "each once, in order"
    assert read_rows(ended.run_dir.metrics) == [{"step": step} | row for step, row in ended.rows.items()]
    lengths = [row[EXPECTED] for row in ended.rows.values()]
    assert lengths[0] < lengths[1] and expected(ended.trainer, records[36:]) > lengths[0]
    assert ended.rows[3]["drafter/loss"] < 0.8 * ended.rows[1]["drafter/loss"]
    assert [row["versions/drafter"] for row in ended.rows.values()] == [1, 2, 3], "each step publishes"
    assert "step 3/3" in ended.printed and "p0 d3" in ended.printed and "loss " in ended.printed
    published = expected_rates(ended.trainer, records[36:], ended.trainer._published[3])
    assert 1 + sum(published) == expected(ended.trainer, records[36:])


def test_the_vocabulary_is_chosen_from_all_rollouts_and_not_again(attempt, records):
    trainer = attempt("first").trainer
    counts = torch.cat([r.token_ids[r.prompt_length :] for r in records[:36]]).bincount(minlength=128)
    chosen = trainer.drafter.draft_to_target
    best = counts.sort(descending=True).values[: len(chosen)].sum()
    assert counts[chosen].sum() > 0.99 * best  # prompts count a tenth, and the end token is always in it


def test_a_stopped_and_resumed_training_equals_one_in_one_go(attempt):
    straight = attempt("straight")
    first = attempt("halves", stop_after=1)
    assert first.trainer is None and list(first.rows) == [1]
    second = attempt("halves")
    assert list(second.rows) == [2, 3] and second.engine.sizes == [12, 12]
    one, two = weights_of(straight.trainer), weights_of(second.trainer)
    assert all(torch.equal(one[name], two[name]) for name in one)
    third = attempt("halves")  # a finished one has nothing left to do
    assert not third.engine.sizes and third.trainer.drafter_version == 3
    assert all(torch.equal(weights_of(third.trainer)[name], one[name]) for name in one)


def test_a_small_memory_holds_the_newest_rollouts_and_a_checkpoint_is_whole(attempt, records):
    ended = attempt("small", max_bytes=20 * records[0].num_bytes)
    assert [row["drafter/buffer_tokens"] for row in ended.rows.values()] == [12 * 24, 20 * 24, 20 * 24]
    checkpoint = latest_checkpoint(ended.run_dir)
    assert checkpoint is not None and find_defect(checkpoint) is None
    assert {path.name for path in checkpoint.iterdir()} == {"COMPLETE", "state.json", "trainer"}
