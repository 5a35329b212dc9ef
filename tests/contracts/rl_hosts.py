"""The sidecar in the rollout engines of verl and OpenRLHF: make test-contracts.

RL_HOSTS names a folder with both and what they need besides this environment, see tests/contracts/sources.py.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from cotrain.models.loading import resolve_model
from cotrain.transport.features import read_shard
from cotrain.transport.spool import Spool, State, read_json
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config
from tests.engine.sidecar_host import RunningHost, running_host
from tests.sidecar_parts import host_environment, make_spool

MODEL = resolve_model("tiny:llama")
SCRIPT = str(Path(__file__).with_name("rl_host.py"))
PROMPTS = [[40 + (7 * i + 3 * j) % 80 for j in range(12)] for i in range(8)]
TOKENS = 32


@contextmanager
def attached(kind: str, folder: Path) -> Iterator[tuple[RunningHost, Spool]]:
    config = Eagle3Config.model_validate({"type": "eagle3", "draft_vocab_size": 128, "aux_layers": (2, 4, 5)})
    drafter = build_drafter(config, TargetSpec.from_pretrained(MODEL), seed=0)
    spool = make_spool(folder / "spool", MODEL, drafter)
    environment = host_environment(folder / "plugin", spool)
    paths = environment["PYTHONPATH"], str(Path(os.environ["RL_HOSTS"]).resolve()), str(Path(__file__).parent)
    environment |= {"PYTHONPATH": ":".join(paths), "VERL_USE_EXTERNAL_MODULES": "verl_cpu", "VERL_PLATFORM": "cpu"}
    with running_host(MODEL, environment, kind, script=SCRIPT) as host:
        yield host, spool


def greedy(host: RunningHost) -> list[list[int]]:
    return host("generate", PROMPTS, {"temperature": 0.0, "max_tokens": TOKENS})


def state_after_a_second(host: RunningHost, spool: Spool) -> State:
    """The engine's state once it has reported all that came before."""
    time.sleep(1.1)
    greedy(host)
    (engine,) = spool.engines()
    return read_json(engine.state, State)


def of_transformers(state: dict[str, torch.Tensor]) -> list[list[int]]:
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    model.load_state_dict(state, strict=False)
    options = {"do_sample": False, "min_new_tokens": TOKENS, "max_new_tokens": TOKENS, "pad_token_id": 0}
    return model.generate(torch.tensor(PROMPTS), **options)[:, 12:].tolist()


def test_verl(tmp_path: Path) -> None:
    """Its engine is adopted, its updates are noticed and served, nothing is tapped before the first, and it sleeps and wakes."""
    first = load_file(MODEL / "model.safetensors")
    moved = {name: tensor * (1.1 if ".mlp." in name else 1) for name, tensor in first.items()}
    with attached("verl", tmp_path) as (host, spool):
        (engine,) = spool.engines()
        assert read_json(engine.state, State).reason is None
        for number, state in enumerate((first, moved), start=1):
            save_file(state, tmp_path / "sent.safetensors")
            host("send", str(tmp_path / "sent.safetensors"))
            assert greedy(host) == of_transformers(state)
            assert state_after_a_second(host, spool).policy_version == number
        host("sleep_and_wake")
        assert greedy(host) == of_transformers(moved)
        found = state_after_a_second(host, spool)
        assert found.reason is None and found.counts["drafts"] > 100
        records = [record for shard in engine.shards() for record in read_shard(shard)]
        assert len(records) >= 16 and {record.policy_version for record in records} >= {1, 2}
        assert all(record.feature_mask[:-1].all() for record in records)
        assert "wait_for_inflight_requests" in host("pause"), (
            "verl 0.9.1 calls this vLLM with an argument that it has not"
        )


def test_openrlhf(tmp_path: Path) -> None:
    """Its engine is adopted and generates as before. Its updates are written for CUDA alone."""
    with attached("openrlhf", tmp_path) as (host, spool):
        (engine,) = spool.engines()
        assert read_json(engine.state, State).reason is None
        expected = of_transformers(load_file(MODEL / "model.safetensors"))
        assert greedy(host) == expected
        assert host("pause") == "" and greedy(host) == expected
        found = state_after_a_second(host, spool)
        assert found.reason is None and found.counts["drafts"] > 100
        assert len([record for shard in engine.shards() for record in read_shard(shard)]) >= 8
        assert "CUDA" in host("send", "")
