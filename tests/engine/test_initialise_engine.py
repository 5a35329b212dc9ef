"""`cotrain init` as a user runs it, Ctrl-C and resume included; and the prefill replay it gets its features from."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cotrain.run.mlflow_store import absolute_uri
from cotrain.run.registry import list_drafters
from cotrain.trainer.self_check import relative_error
from cotrain.transport.features import read_shard
from cotrain.weights.payload import WeightUpdateRefused
from drafters.base import Drafter
from pipelines.engines import send
from pipelines.initialise.sources import Corpus
from tests.engine.conftest import LiveEngine, make_requests

pytestmark = pytest.mark.engine

SETTINGS = (
    "configs/smoke.toml", "name=first", "init.tokens=1500", "init.epochs=2", "drafter.optimizer.learning_rate=3e-3",
)  # fmt: skip
TIMEOUT_S = 300


def test_replayed_features_equal_those_tapped_during_generation(fresh: LiveEngine) -> None:
    requests = make_requests(3, length=280, seed=21)  # two cached blocks each, which a replay must not read
    batch = fresh.generate(requests)
    sequences = [(r.prompt_token_ids + r.token_ids, len(r.prompt_token_ids)) for r in batch.rollouts]
    replayed = [r for s in fresh.run(fresh.engine.tap_sequences(sequences)) for r in read_shard(s)]
    tapped = [r for s in batch.features for r in read_shard(s)]
    for one, two in zip(tapped, replayed, strict=True):
        assert torch.equal(one.token_ids, two.token_ids) and one.prompt_length == two.prompt_length
        assert one.sampling == two.sampling and one.aux_layers == two.aux_layers
        assert two.feature_mask[:-1].all() and not two.feature_mask[-1]
        keep = one.feature_mask
        assert relative_error(two.aux_hidden[keep], one.aux_hidden[keep]) < 1e-4
        assert relative_error(two.final_hidden[keep], one.final_hidden[keep]) < 1e-4


def test_a_replay_keeps_the_taps_bounds(fresh: LiveEngine) -> None:
    bounds = fresh.engine.spec.rollout.features
    requests = make_requests(4, length=100, seed=22)
    sequences = [(r.prompt_token_ids, 90) for r in requests]
    whole = fresh.run(fresh.engine.tap_sequences(sequences))
    tight = bounds.model_copy(update={"max_bytes": 250 * fresh.engine._row_bytes})
    object.__setattr__(fresh.engine.spec.rollout, "features", tight)
    try:
        parts = fresh.run(fresh.engine.tap_sequences(sequences))
        alone = fresh.run(fresh.engine.tap_sequences([(list(range(260)), 4), (list(range(1, 260)), 4)]))
    finally:
        object.__setattr__(fresh.engine.spec.rollout, "features", bounds)
    assert [len(read_shard(shard)) for shard in whole] == [4]
    assert [len(read_shard(shard)) for shard in parts] == [2, 2]
    assert [len(read_shard(shard)) for shard in alone] == [1, 1], "one is held however long it is"


def test_a_drafter_is_served_as_it_was_sent(fresh: LiveEngine, fitted_drafter: Drafter) -> None:
    payload = fresh.payload(fitted_drafter.state_for_serving())
    fresh.run(send(fresh.engine, payload))
    assert fresh.run(fresh.engine.served_digests(sorted(payload.digests), draft=True)) == payload.digests
    payload.digests["fc.weight"] = "0" * 32
    with pytest.raises(WeightUpdateRefused, match=r"fc\.weight"):
        fresh.run(send(fresh.engine, payload))


@pytest.fixture(scope="module")
def stopped_and_resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str, str]:
    """(run folder, output until Ctrl-C, output of the resume)."""
    root = tmp_path_factory.mktemp("runs")
    command = [sys.executable, "-u", "-m", "pipelines.cli", "init"]
    process = subprocess.Popen(
        [*command, *SETTINGS, f"run_root={root}"], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None
    stopped = ""
    for line in process.stdout:
        stopped += line
        if line.startswith("rollouts "):
            break
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: to every process of the command
    rest, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, stopped + rest
    resumed = subprocess.run(
        [*command, "--resume", "first", f"run_root={root}"], capture_output=True, text=True, timeout=TIMEOUT_S
    )
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    return root / "first", stopped + rest, resumed.stdout


def test_ctrl_c_keeps_the_parts_and_a_resume_finishes(stopped_and_resumed: tuple[Path, str, str]) -> None:
    run, stopped, resumed = stopped_and_resumed
    assert "stopping after this part" in stopped and "cotrain init --resume first" in stopped
    corpus = Corpus(run, {})
    assert 1500 <= corpus.num_response_tokens < 1600
    assert len({(r.prompt_id, r.sample_index) for r in corpus.rollouts}) == len(corpus.rollouts)
    assert re.search(r"step (\d+)/\1 .*p0 d\1 .*loss ", resumed)
    assert "covers 100.00% of the held-out response tokens" in resumed
    assert f"drafter.init={run}/drafter" in resumed
    assert "WARNING" not in resumed


def test_the_drafter_is_better_served_and_registered(stopped_and_resumed: tuple[Path, str, str]) -> None:
    run, _, _ = stopped_and_resumed
    figures = json.loads((run / "init.json").read_text())
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lengths = [row["rollout/expected_acceptance_length"] for row in rows]
    assert figures["expected_acceptance_length"] > lengths[0] + 0.05
    assert figures["served_acceptance_length"] > 1.05 and len(figures["served_acceptance_rates"]) == 3
    (row,) = list_drafters(absolute_uri(f"sqlite:///{run.parent}/mlflow.db"))
    assert float(row.tags["expected_acceptance_length"]) == pytest.approx(
        figures["expected_acceptance_length"], abs=1e-4
    )
    assert row.aliases == ["best", "serving"]
    assert [row["step"] for row in rows] == list(range(1, figures["steps"] + 1))
