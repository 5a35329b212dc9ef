"""The decoder layer and final norm of each head against those of the model family in transformers."""

import pytest
import torch
from transformers import Glm4MoeConfig, Qwen2Config, Qwen3NextConfig
from transformers.models.glm4_moe import modeling_glm4_moe as glm4_moe
from transformers.models.qwen2 import modeling_qwen2 as qwen2
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from drafters.alignment import align
from tests.drafters.conftest import GLM, MIMO, QWEN3_NEXT, TARGET, make_batch

COMMON = {
    "hidden_size": TARGET.hidden_size,
    "intermediate_size": TARGET.intermediate_size,
    "num_attention_heads": TARGET.num_attention_heads,
    "num_key_value_heads": TARGET.num_key_value_heads,
    "rms_norm_eps": TARGET.rms_norm_eps,
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
}


def qwen2_parts(weights):
    config = Qwen2Config(**COMMON, rope_parameters=TARGET.rope_parameters, attn_implementation="eager")
    layer, norm = qwen2.Qwen2DecoderLayer(config, 0), qwen2.Qwen2RMSNorm(TARGET.hidden_size, TARGET.rms_norm_eps)
    weights = {name.removeprefix("model.mtp_layers.0."): tensor for name, tensor in weights.items()}
    return layer, norm, qwen2.Qwen2RotaryEmbedding(config), weights, "final_layernorm.weight"


def qwen3_next_parts(weights):
    target = QWEN3_NEXT.target
    config = Qwen3NextConfig(
        **COMMON, head_dim=target.head_dim, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=12,
        shared_expert_intermediate_size=20, norm_topk_prob=True, rope_parameters=target.rope_parameters, attn_implementation="eager",
    )  # fmt: skip
    layer = qwen3_next.Qwen3NextDecoderLayer(config, 0)
    norm = qwen3_next.Qwen3NextRMSNorm(target.hidden_size, target.rms_norm_eps)
    weights = {name.removeprefix("mtp.").removeprefix("layers.0."): tensor for name, tensor in weights.items()}
    fuse_experts(weights)
    return layer, norm, qwen3_next.Qwen3NextRotaryEmbedding(config), weights, "norm.weight"


def glm_parts(weights):
    target = GLM.target
    config = Glm4MoeConfig(
        **{name: value for name, value in COMMON.items() if name != "layer_types"}, head_dim=target.head_dim, n_routed_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=12, n_shared_experts=1, norm_topk_prob=True, routed_scaling_factor=1.5, n_group=1, topk_group=1,
        first_k_dense_replace=0, use_qk_norm=True, attention_bias=True, rope_parameters=target.rope_parameters,
        attn_implementation="eager",
    )  # fmt: skip
    layer = glm4_moe.Glm4MoeDecoderLayer(config, 0)
    layer.mlp.shared_experts = glm4_moe.Glm4MoeMLP(config, intermediate_size=20)
    norm = glm4_moe.Glm4MoeRMSNorm(target.hidden_size, target.rms_norm_eps)
    weights = {name.removeprefix(f"model.layers.{target.num_layers}."): tensor for name, tensor in weights.items()}
    fuse_experts(weights)
    return layer, norm, glm4_moe.Glm4MoeRotaryEmbedding(config), weights, "shared_head.norm.weight"


def fuse_experts(weights):
    for part, names in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
        experts = [torch.cat([weights[f"mlp.experts.{i}.{name}.weight"] for name in names]) for i in range(4)]
        weights[f"mlp.experts.{part}"] = torch.stack(experts)


@pytest.mark.parametrize(
    ("kind", "parts"),
    [(MIMO, qwen2_parts), (QWEN3_NEXT, qwen3_next_parts), (GLM, glm_parts)],
    ids=["mimo", "next", "glm4_moe"],
)
@torch.no_grad()
def test_layer_is_that_of_transformers(kind, parts, target_weights):
    drafter, batch = kind.make(trained_depth=1), make_batch((1, 12, 0))
    alignment = align(batch, 1)
    layer, norm, rotary, weights, output_norm = parts(drafter.state_dict())
    layer.double().load_state_dict({name: weights[name] for name in layer.state_dict()})
    norm.double().load_state_dict({"weight": weights[output_norm]})

    rows, positions = alignment.context_rows, batch.positions[alignment.context_rows]
    embeddings = target_weights.embedding[batch.token_ids[rows + 1]]
    joined = drafter.head.join(embeddings, batch.final_hidden[rows], positions)[None]
    unseen = torch.full((len(rows), len(rows)), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    output = layer(joined, position_embeddings=rotary(joined, positions[None]), attention_mask=unseen)
    expected = norm(output)[0, alignment.starts_in_context]
    assert len(expected) == 11
    (actual,) = drafter.drafts(batch, alignment, target_weights)[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)  # norms and softmax there are in float32
