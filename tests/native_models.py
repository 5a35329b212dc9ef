"""Tiny policies that were trained on the chain of tiny:llama; some bring a random MTP head of their own, as their makers store it."""

import hashlib
import json
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from filelock import FileLock
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from cotrain.models import tiny
from cotrain.models.loading import RANDOM_MODELS
from cotrain.models.tiny import BOS_ID, EOS_ID, PAD_ID, VOCAB_SIZE, byte_tokenizer, train_on_chain
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import MtpConfig
from drafters.mtp.formats import NATIVE_ARCHITECTURES

ROOT = Path(__file__).parents[1]

SIZES = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 2048, "tie_word_embeddings": False, "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID, "pad_token_id": PAD_ID,
}  # fmt: skip


def mimo_model() -> PreTrainedModel:
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_hidden_layers=4))


def qwen3_next_model() -> PreTrainedModel:
    """Two layers of gated linear attention and two of full attention, four experts in each."""
    return Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **SIZES, num_hidden_layers=4, head_dim=64, num_experts=4, num_experts_per_tok=2,
            moe_intermediate_size=64, shared_expert_intermediate_size=64,
            layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=1, linear_num_value_heads=2,
            linear_key_head_dim=128, linear_value_head_dim=128,
        )
    )  # fmt: skip


def qwen3_5_model() -> PreTrainedModel:
    """Two layers of gated linear attention and two of full attention, without experts."""
    return Qwen3_5ForCausalLM(
        Qwen3_5TextConfig(
            **SIZES, num_hidden_layers=4, head_dim=64, layer_types=["linear_attention", "full_attention"] * 2,
            linear_num_key_heads=1, linear_num_value_heads=2, linear_key_head_dim=128, linear_value_head_dim=128,
        )
    )  # fmt: skip


def glm4_moe_model() -> PreTrainedModel:
    """A layer without experts and three with them, chosen by sigmoids; half of each head rotates."""
    return Glm4MoeForCausalLM(
        Glm4MoeConfig(
            **SIZES, num_hidden_layers=4, head_dim=64, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=64,
            n_shared_experts=1, n_group=1, topk_group=1, first_k_dense_replace=1, use_qk_norm=True, attention_bias=True,
            routed_scaling_factor=1.5, rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        )
    )  # fmt: skip


def write_native(folder: Path, model: PreTrainedModel, architecture: str, trained: bool = False) -> Path:
    """The model and a random head as one checkpoint, which says that it is an `architecture`."""
    tokenizer = byte_tokenizer()
    if trained:
        train_on_chain(model, tokenizer, torch.Generator().manual_seed(0))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    head = build_drafter(MtpConfig(type="mtp"), TargetSpec.from_pretrained(folder), seed=3).state_dict()
    weights = load_file(folder / "model.safetensors")
    save_file({**weights, **head}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": [architecture], NATIVE_ARCHITECTURES[architecture].counted_by: 1}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


ARCHITECTURES = {
    "mimo": (mimo_model, "MiMoForCausalLM"),
    "qwen3-next": (qwen3_next_model, "Qwen3NextForCausalLM"),
    "qwen3-5": (qwen3_5_model, "Qwen3_5ForCausalLM"),
    "glm4-moe": (glm4_moe_model, "Glm4MoeForCausalLM"),
}


def trained_native(name: str) -> Path:
    """A trained policy and a random head as one checkpoint, made once for all sessions."""
    make_model, architecture = ARCHITECTURES[name]
    drafters = [ROOT / "drafters/build.py", *sorted((ROOT / "drafters/mtp").glob("*.py"))]
    return made_once(name, drafters, lambda folder: write_native(folder, make_model(), architecture, trained=True))


def trained_policy(family: str) -> Path:
    """The tiny model of this family in tiny.toml, without its random weights but trained; made once for all sessions."""

    def write(folder: Path) -> None:
        tiny.build_random_model(folder, RANDOM_MODELS[family])
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
        train_on_chain(model, byte_tokenizer(), torch.Generator().manual_seed(0))
        model.save_pretrained(folder)

    return made_once(family, [Path(tiny.__file__).with_suffix(".toml")], write)


def made_once(name: str, sources: list[Path], write: Callable[[Path], object]) -> Path:
    """The folder that `write` fills, again when a source has changed."""
    text = b"".join(Path(file).read_bytes() for file in [__file__, tiny.__file__, *sources])
    folder = ROOT / ".pytest_cache/models" / f"{name}-{hashlib.blake2b(text, digest_size=6).hexdigest()}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            torch.manual_seed(0)
            unfinished = Path(tempfile.mkdtemp(dir=folder.parent))
            write(unfinished)
            unfinished.rename(folder)
    return folder
