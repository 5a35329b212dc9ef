"""Engines of a host with the sidecar in them: what is tapped, swapped and noticed, and that the host keeps its law."""

import copy
import random
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from cotrain.run.rows import read_rows
from cotrain.sidecar.launch import trainer_beside
from cotrain.trainer.self_check import relative_error
from cotrain.transport.features import FeatureRecord, read_shard
from cotrain.transport.spool import Description, Finished, Offer, Spool, State, read_json, write_json
from cotrain.weights.payload import write_payload
from drafters.base import Drafter
from tests.engine.conftest import AUX_LAYERS, features_of, make_requests
from tests.engine.sidecar_host import REPORT_SECONDS, RunningHost, running_host
from tests.engine.test_sampling import NUM_SAMPLES, PROMPT, K, Laws, laws, p_values  # noqa: F401
from tests.sidecar_parts import host_environment, make_spool

pytestmark = pytest.mark.engine

IN_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
TOKENS = 48


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    return [request.prompt_token_ids for request in make_requests(number, seed=seed)]


def described(shard: Path) -> Path:
    return shard.with_suffix(".json")


class Sidecar:
    """A host's engine, and the trainer's side of its spool."""

    def __init__(self, host: RunningHost, spool: Spool):
        self.host, self.spool = host, spool
        (self.engine,) = spool.engines()
        self.sent = 0

    @property
    def state(self) -> State:
        return read_json(self.engine.state, State)

    def wave(self, seed: int = 0, number: int = 16, **sampling: Any) -> list[list[int]]:
        return self.host("generate", prompts(number, seed), {"max_tokens": TOKENS, **sampling})

    def greedy(self) -> list[list[int]]:
        return self.wave(1, 8, temperature=0.0)

    def settle(self) -> None:
        """Let the engine make a step, with which it hears of the requests that have ended, and report."""
        time.sleep(1.5 * REPORT_SECONDS)
        self.host("generate", prompts(1, 2), {"max_tokens": 1})

    def acceptance_length(self, seed: int) -> float:
        before = self.host("counts")
        self.wave(seed)
        after = self.host("counts")
        drafts, accepted = (after[name] - before[name] for name in ("drafts", "accepted_tokens"))
        return 1 + accepted / drafts

    def publish(self, state: dict[str, torch.Tensor], **changes: Any) -> int:
        self.sent += 1
        path = self.spool.current.with_name(f"{self.sent}.safetensors")
        payload = write_payload(state, path, torch.float32)
        write_json(self.spool.current, replace(Offer(self.sent, True, payload.path, payload.digests), **changes))
        return self.sent

    def take(self) -> list[tuple[FeatureRecord, Finished]]:
        """The rollouts that wait in the spool, which is emptied."""
        found = []
        for shard in self.engine.shards():
            found += zip(read_shard(shard), read_json(described(shard), Description).rollouts, strict=True)
            shard.unlink()
            described(shard).unlink()
        return found


@pytest.fixture(scope="module")
def sidecar(
    target_folder: Path, untrained_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    """The tests below use one engine, in their order."""
    folder = tmp_path_factory.mktemp("sidecar")
    spool = make_spool(folder / "spool", target_folder, untrained_drafter, max_bytes=2**24)
    with running_host(target_folder, host_environment(folder, spool) | IN_PROCESS, "reports often") as host:
        yield Sidecar(host, spool)


MOST_SECONDS, LEARNT = 420, 1.8
TRAINER = (
    "name=trained", "nice=0", "adaptive=false", "drafter.model.draft_vocab_size=128", "drafter.batch_tokens=2048",
    "drafter.updates_per_step=30", "drafter.optimizer.learning_rate=1e-3",
)  # fmt: skip


@pytest.mark.alone  # its trainer has the lowest priority, and a deadline
@pytest.mark.long  # test_sidecar_server.py has a host in processes of its own
def test_a_drafter_learns_beside_processes_of_a_host(target_folder: Path, mlflow_database: Path) -> None:
    """The engine core and the worker are processes of their own, and so is the trainer.

    The engine is loaded without weights, as verl does it, and gets them before its first request.
    """
    folder = mlflow_database.parents[1]
    spool, tokenizer = Spool(folder / "spool"), AutoTokenizer.from_pretrained(target_folder)
    command = [sys.executable, "-m", "pipelines.cli", "sidecar", "--model", "tiny:llama", "--share", "1", "--spool"]
    command += [str(spool.folder), f"run_root={folder}/runs", *TRAINER]
    environment = host_environment(folder, spool)
    with trainer_beside(command, spool.folder), running_host(target_folder, environment, "dummy") as host:
        host("fill", str(target_folder))
        sidecar, draw = Sidecar(host, spool), random.Random(0)
        texts, length = sidecar.greedy(), 0.0
        deadline = time.monotonic() + MOST_SECONDS  # a quiet machine takes a minute and a half
        while time.monotonic() < deadline:
            asked = ["".join(draw.choice("0123456789 +-=abcdef") for _ in range(8)) for _ in range(16)]
            chats = [[{"role": "user", "content": text}] for text in asked]
            known = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=True)["input_ids"]
            before = sidecar.state
            host("generate", known, {"max_tokens": 64})
            after = sidecar.state
            accepted, drafts = (after.counts[n] - before.counts[n] for n in ("accepted_tokens", "drafts"))
            length = 1 + accepted / max(1, drafts)
            judged = [row for row in read_rows(folder / "runs" / "trained" / "metrics.jsonl") if "canary/bound" in row]
            if length >= LEARNT and judged:
                break
        assert length >= LEARNT and judged and sidecar.greedy() == texts
        assert after.drafter_version > 0 and after.reason is None
    rows = read_rows(folder / "runs" / "trained" / "metrics.jsonl")
    assert all(row["drafter/untrainable_rollouts"] == 0 and row["sidecar/dropped"] == 0 for row in rows)
    assert any(row["versions/drafter"] for row in rows), "a round was judged under a drafter that was trained here"
    served, expected = (
        sum(row["canary/num_drafts"] * row[f"canary/{kind}_length"] for row in judged)
        for kind in ("served", "expected")
    )
    assert abs(expected / served - 1) < 0.05


def versions_of(record: FeatureRecord) -> tuple[int, int]:
    return record.policy_version, record.drafter_version


def holes(record: FeatureRecord) -> int:
    return int((~record.feature_mask).sum()) - 1


def error(record: FeatureRecord, model: Any) -> float:
    """Relative error of the hidden states of a record against a forward of the model."""
    known, keep = (
        features_of(model, record.token_ids.tolist(), record.prompt_length, 0, AUX_LAYERS),
        record.feature_mask,
    )
    ours, theirs = (torch.cat([r.aux_hidden, r.final_hidden], 1)[keep] for r in (record, known))
    return relative_error(ours, theirs)


def test_requests_are_tapped_whole_and_described(sidecar: Sidecar, target_model: Any, target_state: dict) -> None:
    assert sidecar.state.reason is None and sidecar.state.vllm
    texts = sidecar.wave(3)
    sidecar.settle()
    taken = sidecar.take()
    assert sorted(r.token_ids[12:].tolist() for r, _ in taken) == sorted(texts)
    assert [holes(r) for r, _ in taken] == [0] * 16
    assert max(error(r, target_model) for r, _ in taken) < 1e-4
    for record, told in taken:
        assert (record.prompt_length, record.sampling.temperature) == (told.prompt_length, 1.0) == (12, 1.0)
        assert record.num_tokens == 12 + TOKENS
        assert (told.finish_reason, versions_of(record), told.earlier) == ("length", (0, 0), ())
        drafted = sum(1 + accepted for _, accepted in told.verification_steps)
        assert {num for num, _ in told.verification_steps} == {K} and TOKENS - 1 <= drafted < TOKENS + K
    head = load_file(sidecar.engine.policies / "0.safetensors")
    assert head.keys() == {"model.embed_tokens.weight", "lm_head.weight"}
    assert all(torch.equal(tensor, target_state[name]) for name, tensor in head.items())
    assert sidecar.state.reason is None


def test_requests_may_opt_out_and_others_are_left_out(sidecar: Sidecar) -> None:
    before = sidecar.state
    sidecar.wave(4, 3, extra_args={"cotrain": False})
    sidecar.wave(4, 2, frequency_penalty=0.5)
    sidecar.settle()
    after = sidecar.state
    assert (
        after.dropped == {"opted out": 3, "frequency_penalty is set": 2}
        and after.counts["finished"] - before.counts["finished"] >= 5
    )
    assert len(sidecar.take()) <= 2  # those of `settle`


def test_drafters_are_swapped_checked_and_counted_as_vllm_does(
    sidecar: Sidecar, fitted_drafter: Drafter, untrained_drafter: Drafter
) -> None:
    texts, length = sidecar.greedy(), sidecar.acceptance_length(5)
    good = fitted_drafter.state_for_serving()
    bad = {name: t * torch.nan if t.is_floating_point() else t for name, t in good.items()}
    sidecar.publish(bad)
    assert sidecar.greedy() == texts
    sidecar.settle()
    assert "non-finite" in sidecar.state.refused[1]
    sidecar.publish(good, path="nowhere.safetensors")
    assert sidecar.greedy() == texts
    version = sidecar.publish(good)
    assert sidecar.greedy() == texts and sidecar.acceptance_length(5) > length + 0.3
    sidecar.settle()
    state = sidecar.state
    assert (state.policy_version, state.drafter_version) == (0, version) and list(state.refused) == [2]
    assert "nowhere" in state.refused[2]
    sidecar.take()
    sidecar.wave(6)
    sidecar.settle()
    assert {versions_of(record) for record, _ in sidecar.take()} >= {(0, version)}
    sidecar.settle()
    known = sidecar.host("counts")
    assert {name: sidecar.state.counts[name] for name in known} == known


def test_no_step_waits_for_a_shard_that_is_written(sidecar: Sidecar) -> None:
    sidecar.take()
    sidecar.host("hold_the_disk")
    for seed in (20, 21):
        sidecar.wave(seed)
    sidecar.settle()
    assert sidecar.take() == []
    sidecar.host("free_the_disk")
    sidecar.settle()
    assert len(sidecar.take()) >= 32


def test_switched_off_the_engine_drafts_nothing(sidecar: Sidecar) -> None:
    offer, texts = read_json(sidecar.spool.current, Offer), sidecar.greedy()
    write_json(sidecar.spool.current, replace(offer, on=False))
    drafts = sidecar.host("counts")["drafts"]
    assert sidecar.greedy() == texts and sidecar.host("counts")["drafts"] == drafts
    sidecar.wave(7, top_k=5)  # vLLM's rejection sampler would end a CPU's engine here
    write_json(sidecar.spool.current, offer)
    assert sidecar.greedy() == texts and sidecar.host("counts")["drafts"] > drafts


def test_sampled_text_has_the_policys_distribution(sidecar: Sidecar, laws: Laws) -> None:  # noqa: F811
    """Two tests at 1e-4."""
    assert min(p_values(laws, samples(sidecar.host), 1.0, -1)) > 1e-4


def samples(host: RunningHost) -> torch.Tensor:
    return torch.tensor(host("generate", [PROMPT] * NUM_SAMPLES, {"max_tokens": K + 1}))


@pytest.fixture(scope="module")
def uncorrected(
    target_folder: Path, fitted_drafter: Drafter, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sidecar]:
    """An engine that chooses its draft lengths, and in which nothing is done about the faults of vLLM's CPU build.

    It is loaded without weights, as verl does it, and gets them before its first request.
    """
    folder = tmp_path_factory.mktemp("uncorrected")
    spool = make_spool(folder / "spool", target_folder, fitted_drafter, max_bytes=2**24, adaptive=True)
    options = "without corrections", "reports often", "dummy"
    with running_host(target_folder, host_environment(folder, spool) | IN_PROCESS, *options) as host:
        host("fill", str(target_folder))
        yield Sidecar(host, spool)


def test_without_the_corrections_it_has_not(uncorrected: Sidecar, laws: Laws) -> None:  # noqa: F811
    assert min(p_values(laws, samples(uncorrected.host), 1.0, -1)) < 1e-4


def test_draft_lengths_are_chosen_by_the_speed_of_the_hosts_own_requests(uncorrected: Sidecar) -> None:
    for seed in range(30):
        uncorrected.wave(seed)
        uncorrected.settle()
        gains = [g for shard in uncorrected.engine.shards() for g in read_json(described(shard), Description).gains]
        if gains := [gain for gain in gains if gain.seconds]:
            break
        uncorrected.take()
    assert gains[-1].seconds_at and len(gains[-1].seconds_at[0]) == K + 1, "all lengths were measured"


def test_the_drafter_is_served_again_after_waking_up(sidecar: Sidecar) -> None:
    texts, length = sidecar.greedy(), sidecar.acceptance_length(5)
    sidecar.host("lose_the_drafter")
    assert sidecar.acceptance_length(5) < 1 + 0.6 * (length - 1)
    sidecar.host("wake_up")
    assert sidecar.acceptance_length(5) > length - 0.4 and sidecar.greedy() == texts
    sidecar.settle()
    assert (sidecar.state.policy_version, sidecar.state.reason) == (1, None)
    assert (sidecar.engine.policies / "1.safetensors").exists(), "for the trainer, with the requests that were tapped"


def test_an_update_in_mid_generation_leaves_no_mixed_rollout(
    sidecar: Sidecar, moved_target_state: dict, tmp_path: Path
) -> None:
    sidecar.settle()
    sidecar.take()
    before = sidecar.state.policy_version
    save_file(moved_target_state, tmp_path / "moved.safetensors")
    sidecar.wave(9)
    sidecar.host("begin", prompts(4, 8), TOKENS, 6)
    sidecar.host("load", str(tmp_path / "moved.safetensors"))
    sidecar.host("end")
    sidecar.settle()
    told_of = {True: [], False: []}
    for record, told in sidecar.take():
        told_of[bool(told.earlier)].append((record, told))
    assert {r.policy_version for r, _ in told_of[False]} == {before}
    assert all(holes(r) == 0 for r, _ in told_of[False])
    assert len(told_of[True]) == 4
    for record, told in told_of[True]:
        ((versions, start, end),) = told.earlier
        known = versions.policy, start, record.earlier_tokens, record.policy_version
        assert known == (before, 0, end, before + 1) and end >= 6
        # The state of the last token before the update was computed after it.
        assert record.feature_mask.nonzero()[0] == 12 + end - 1 and holes(record) == 12 + end - 1
    head = load_file(sidecar.engine.policies / f"{before + 1}.safetensors")
    assert all(torch.equal(tensor, moved_target_state[name]) for name, tensor in head.items())


def test_every_way_of_an_update_is_noticed(
    sidecar: Sidecar, target_model: Any, moved_target_state: dict, target_folder: Path
) -> None:
    moved = copy.deepcopy(target_model)
    moved.load_state_dict(moved_target_state)
    texts = sidecar.greedy()
    sidecar.settle()
    assert max(error(record, moved) for record, _ in sidecar.take()) < 1e-4, "it serves what the host has loaded"
    sidecar.host("write_into_a_parameter")
    sidecar.wave(10)
    sidecar.settle()
    assert sidecar.state.policy_version == 3
    sidecar.host("load", str(target_folder / "model.safetensors"))
    sidecar.wave(10)
    sidecar.settle()
    taken = [record for record, _ in sidecar.take() if record.policy_version == 4]
    assert len(taken) >= 16 and max(error(record, target_model) for record in taken) < 1e-4
    assert texts != sidecar.greedy()
    names = {path.name for path in sidecar.engine.policies.iterdir()}
    assert names == {"3.safetensors", "4.safetensors"}


def test_a_host_outlives_its_trainer_and_works_with_the_next_one(
    sidecar: Sidecar, fitted_drafter: Drafter, untrained_drafter: Drafter
) -> None:
    texts, settings = sidecar.greedy(), sidecar.spool.settings()
    for seed in range(11, 60):  # nobody reads
        sidecar.wave(seed)
        if sidecar.state.dropped["spool full"]:
            break
    waiting = sum(shard.stat().st_size for shard in sidecar.engine.shards())
    assert sidecar.state.dropped["spool full"] and waiting <= settings.max_bytes + 2**16, (
        "headers of files do not count"
    )
    sidecar.settle()  # a state may be old, and waves be tapped since
    tapped = sidecar.state.counts["tapped"]
    sidecar.spool._held.close()  # as when it is killed
    assert sidecar.greedy() == texts
    length = sidecar.acceptance_length(5)
    sidecar.settle()
    assert length > 1.3 and sidecar.state.counts["tapped"] == tapped, "drafts go on, and nothing is tapped"

    sidecar.spool = Spool(sidecar.spool.folder)
    sidecar.spool.hold()
    assert not sidecar.engine.features.exists() and sidecar.engine.is_held and sidecar.spool.initial.exists()
    sidecar.spool.create(replace(settings, share=0.0))
    sidecar.sent -= 1  # the next trainer counts its drafters again
    sidecar.publish(untrained_drafter.state_for_serving())
    assert sidecar.greedy() == texts and sidecar.acceptance_length(5) < 1.3
    sidecar.settle()
    assert sidecar.state.counts["tapped"] == tapped, "it has asked for no requests"
    sidecar.spool.create(settings)
    version = sidecar.publish(fitted_drafter.state_for_serving())
    sidecar.wave(60)
    sidecar.settle()
    records = sidecar.take()
    assert len(records) >= 16 and {versions_of(record) for record, _ in records} == {(4, version)}
    assert (sidecar.engine.policies / "4.safetensors").exists()


def test_a_host_outlives_the_spool(sidecar: Sidecar) -> None:
    texts, length = sidecar.greedy(), sidecar.acceptance_length(5)
    for folder in (sidecar.engine.features, sidecar.engine.policies):
        shutil.rmtree(folder)  # as on a full disk, nothing can be written into it
    sidecar.wave(61)
    sidecar.host("wake_up")
    assert sidecar.greedy() == texts and sidecar.acceptance_length(5) > length - 0.4
    sidecar.settle()
    state = sidecar.state
    assert (state.policy_version, state.reason, state.dropped["cannot be written"] >= 16) == (5, None, True)
    shutil.rmtree(sidecar.spool.folder)
    sidecar.host("wake_up")
    assert sidecar.greedy() == texts and sidecar.acceptance_length(5) > length - 0.4
