"""vLLM's own models, loaded in this process without an engine, from random checkpoints of four layers."""

import inspect
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from cotrain.engine import cpu as vllm_compat
from cotrain.process import threads
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import Eagle3Config

SHAPE = {
    "vocab_size": 500,  # vLLM pads it to 512 rows
    "hidden_size": 128,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}


def qwen3_next(moe_intermediate_size: int) -> Qwen3NextConfig:
    """vLLM's CPU kernels compute with experts whose size is a multiple of 32."""
    return Qwen3NextConfig(
        **SHAPE | {"head_dim": 64}, tie_word_embeddings=False, **EXPERTS,
        moe_intermediate_size=moe_intermediate_size, shared_expert_intermediate_size=64,
        layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=1, linear_num_value_heads=2,
        linear_key_head_dim=128, linear_value_head_dim=128,
    )  # fmt: skip


ARCHITECTURES: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, tie_word_embeddings=False),
    "llama, tied embeddings": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "mistral": MistralConfig(**SHAPE, tie_word_embeddings=False),
    "qwen2, with biases": Qwen2Config(**SHAPE, tie_word_embeddings=False),
    "qwen3, with query and key norms": Qwen3Config(**SHAPE, tie_word_embeddings=False),
    "qwen3-next, with linear attention and experts": qwen3_next(moe_intermediate_size=64),
    "qwen3-next, with experts that are padded": qwen3_next(moe_intermediate_size=48),
    "qwen3-moe": Qwen3MoeConfig(**SHAPE, tie_word_embeddings=False, **EXPERTS, moe_intermediate_size=64),
    "phi3, whose checkpoints are fused": Phi3Config(**SHAPE, tie_word_embeddings=False, pad_token_id=0),
    "gpt-oss, which copies into itself": GptOssConfig(
        **SHAPE | {"intermediate_size": 64}, tie_word_embeddings=False, num_local_experts=4, num_experts_per_tok=2
    ),
    "deepseek-v3, with latent attention": DeepseekV3Config(
        **SHAPE | {"num_key_value_heads": 4, "head_dim": 64}, tie_word_embeddings=False, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=64, n_group=1, topk_group=1, topk_method="noaux_tc",
        first_k_dense_replace=1, n_shared_experts=1, q_lora_rank=64, kv_lora_rank=512, qk_rope_head_dim=64,
        qk_nope_head_dim=32, v_head_dim=32, num_nextn_predict_layers=0,
    ),
}  # fmt: skip


@dataclass
class Served:
    """A model as vLLM serves it, and the state dict it was loaded from."""

    model: nn.Module
    model_config: Any
    vllm_config: Any
    state: dict[str, Tensor]


def moved(state: dict[str, Tensor], seed: int = 1) -> dict[str, Tensor]:
    """The state dict after a training step: every floating-point tensor differs in every element."""
    generator = torch.Generator().manual_seed(seed)

    def other(tensor: Tensor) -> Tensor:
        return tensor + (0.5 + torch.rand(tensor.shape, generator=generator)).to(tensor.dtype)

    return {name: other(tensor) if tensor.is_floating_point() else tensor for name, tensor in state.items()}


@pytest.fixture(scope="package")
def vllm_process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """This process as a vLLM worker: one rank, no accelerator. Afterwards it is what it was before."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel

    rendezvous = tmp_path_factory.mktemp("rendezvous") / "store"
    environment = threads.engine_environment(1) | {"VLLM_LOGGING_LEVEL": "ERROR"}
    with (
        mock.patch.dict(os.environ, environment),  # vLLM's platform adds to it
        mock.patch.object(torch.accelerator, "empty_cache", lambda: None),  # as vLLM's CPU worker does
    ):
        with set_current_vllm_config(VllmConfig()):
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
            initialize_model_parallel(1, 1)
        yield
        cleanup_dist_env_and_memory()


@pytest.fixture(scope="package")
def serve(vllm_process: None, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Served]:
    """Load a random checkpoint of one of ARCHITECTURES the way vLLM's worker does."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    def build(
        architecture: str, dtype: str, drafter: Path | None = None, seed: int = 0, method: str = "eagle3"
    ) -> Served:
        folder = tmp_path_factory.mktemp("target")
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            AutoModelForCausalLM.from_config(ARCHITECTURES[architecture]).save_pretrained(folder)
        speculation = {"method": method, "model": str(drafter), "num_speculative_tokens": 2} if drafter else None
        config = EngineArgs(
            model=str(folder),
            dtype=dtype,
            max_model_len=64,
            enforce_eager=True,
            skip_tokenizer_init=True,
            speculative_config=speculation,
            attention_backend="CPU_MLA" if "latent attention" in architecture else None,  # as cotrain's engines
        ).create_engine_config()
        with set_current_vllm_config(config):
            model = get_model(vllm_config=config)
        state = {
            name: tensor.to(config.model_config.dtype)
            for name, tensor in load_file(folder / "model.safetensors").items()
        }
        return Served(model, config.model_config, config, state)

    return build


@pytest.fixture
def experts_as_shipped(vllm_process: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of experts as vLLM ships them, for one test, whatever another test has patched."""
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod as Method

    monkeypatch.setattr(Method, "_setup_kernel", inspect.unwrap(Method._setup_kernel))


@pytest.fixture
def experts_are_packed(experts_as_shipped: None) -> None:
    """The patch of updates of experts, for one test."""
    vllm_compat.apply(vllm_compat.pack_updated_experts)


@pytest.fixture(scope="package")
def drafter_folder(serve: Callable[..., Served], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoint of an untrained drafter for the shape above."""
    target = tmp_path_factory.mktemp("shape")
    ARCHITECTURES["llama"].save_pretrained(target)
    config = Eagle3Config(type="eagle3", draft_vocab_size=100, aux_layers=(1, 2, 3))
    drafter = build_drafter(config, TargetSpec.from_pretrained(target), seed=0)
    tokens = torch.arange(0, 500, 5)
    drafter.d2t.copy_(tokens - torch.arange(100))
    folder = tmp_path_factory.mktemp("drafter") / "v0"
    drafter.save(folder, torch.float32)
    return folder


@pytest.fixture(scope="package")
def target_and_drafter(serve: Callable[..., Served], drafter_folder: Path) -> tuple[Served, Served]:
    """A target and a drafter that borrows its embedding, put together by vLLM's own code."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model
    from vllm.v1.spec_decode.eagle import EagleProposer

    target = serve("llama", "float32", drafter_folder)
    config = target.vllm_config
    draft_config = config.speculative_config.draft_model_config
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config, model_config=draft_config)
        proposer = SimpleNamespace(model=model, vllm_config=config, use_local_argmax_reduction=False)
        EagleProposer._maybe_share_embeddings(proposer, target.model)
        EagleProposer._maybe_share_lm_head(proposer, target.model)
    state = load_file(drafter_folder / "model.safetensors")
    del state["t2d"]
    return target, Served(model, draft_config, config, state)
