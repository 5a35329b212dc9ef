"""What vLLM reads from a policy's folder, held against what policies and drafters are trained with.

vLLM's sources are read, so that a field that another version reads makes a test fail which names it.
"""

import ast
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
import vllm
from transformers import AutoConfig, AutoTokenizer
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs

from cotrain.models.loading import resolve_model
from drafters.base import TargetSpec
from drafters.eagle3.model import NESTED, SUPPORTED, Eagle3Drafter
from drafters.files import end_token_ids
from drafters.mtp.model import OF_TARGET
from drafters.target import PLAIN, PLAIN_IN, served_otherwise
from tests.drafters.conftest import EAGLE3

VLLM = Path(vllm.__file__).parent / "model_executor" / "models"
TRANSFORMERS = Path(transformers.__file__).parent / "models"


def fields_read(file: Path, *classes: str) -> set[str]:
    """Fields that the classes of a file, or all of them, read from `config`."""
    found = set()
    bodies = [node for node in ast.parse(file.read_text()).body if isinstance(node, ast.ClassDef)]
    for node in (node for body in bodies if not classes or body.name in classes for node in ast.walk(body)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("config", "self.config"):
            found.add(node.attr)
        if isinstance(node, ast.Call):
            function, first = ast.unparse(node.func), ast.unparse(node.args[0]) if node.args else ""
            if function in ("getattr", "hasattr") and first in ("config", "self.config"):
                found.add(ast.literal_eval(node.args[1]))
            if function == "eagle_config.get":
                found.add(ast.literal_eval(node.args[0]))
    return found


def test_every_field_of_an_eagle3_drafter_is_written_or_refused() -> None:
    layer = fields_read(VLLM / "llama.py", "LlamaAttention", "LlamaDecoderLayer")
    read = fields_read(VLLM / "llama_eagle3.py") | layer
    assert len(read) > 25
    known = Eagle3Drafter.to_config(EAGLE3.make(sliding_window=9).shape).keys() | SUPPORTED.keys() | NESTED.keys()
    ours = {"target_layer_count"}  # vLLM sets it
    ours |= {"num_aux_hidden_states"}  # decides the width of fc, which is compared with the checkpoint
    assert read - known == ours


EXPERTS = {
    "num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers",
}  # fmt: skip
"""What TargetSpec.experts is made of."""


@pytest.mark.parametrize(
    ("head", "layer", "classes"),
    [
        ("mimo_mtp.py", "qwen2.py", ("Qwen2DecoderLayer", "Qwen2Attention")),
        (
            "qwen3_next_mtp.py",
            "qwen3_next.py",
            ("Qwen3NextAttention", "Qwen3NextDecoderLayer", "Qwen3NextSparseMoeBlock"),
        ),
    ],
)
def test_every_field_of_the_target_that_an_mtp_head_is_made_from_is_compared(head, layer, classes) -> None:
    read = fields_read(VLLM / head) | fields_read(VLLM / layer, *classes)
    assert len(read) > 12
    known = {*OF_TARGET, *PLAIN, *EXPERTS, "head_dim", "max_position_embeddings"}
    numbers = {"num_hidden_layers", "num_nextn_predict_layers"}  # numbers of layers, which name them
    assert read - known == numbers


@pytest.mark.parametrize("name", PLAIN_IN)
def test_a_field_that_transformers_does_not_read_is_refused(name: str) -> None:
    bases = {"mistral": ["llama.py"], "qwen3": ["qwen2.py"]}.get(name, [])
    by_vllm = set().union(*(fields_read(VLLM / file) for file in [*bases, f"{name}.py"]))
    by_transformers = fields_read(TRANSFORMERS / name / f"modeling_{name}.py")
    known = PLAIN.keys() | PLAIN_IN[name].keys()
    ours = {"tie_word_embeddings"}  # read by a base class
    ours |= {"target_layer_count", "ada_rms_norm_t_cond_dim"}  # only in a drafter; only beside ada_rms_norm_t_cond
    ours |= {"layer_types", "max_window_layers"}  # windows are compared below
    assert by_vllm - by_transformers - known - ours == set()


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 1,
    "intermediate_size": 48, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "max_position_embeddings": 256, "head_dim": 16,
}  # fmt: skip


def write(folder: Path, family: str, **fields: Any) -> dict[str, Any]:
    config = SIZES | {"model_type": family.lower(), "architectures": [f"{family}ForCausalLM"]} | fields
    (folder / "config.json").write_text(json.dumps(config))
    return config


@pytest.mark.parametrize(
    ("family", "fields", "window"),
    [
        ("Llama", {}, None),
        ("Mistral", {}, 4096),  # transformers' default
        ("Mistral", {"sliding_window": None}, None),
        ("Mistral", {"sliding_window": 24}, 24),
        ("Qwen2", {"sliding_window": 24}, None),
        ("Qwen2", {"sliding_window": 24, "use_sliding_window": False, "max_window_layers": 0}, None),
        ("Qwen2", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 0}, 24),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 0}, 4096),
        ("Qwen3", {"sliding_window": 24, "use_sliding_window": True, "max_window_layers": 4}, None),
        ("Qwen3", {"sliding_window": 24, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 4}, 24),
    ],
    ids=str,
)
def test_a_drafters_layer_has_the_window_that_vllm_gives_it(tmp_path: Path, family, fields, window) -> None:
    config = write(tmp_path, family, **fields)
    assert served_otherwise(config) == []
    assert TargetSpec.from_pretrained(tmp_path).sliding_window == window
    engine = EngineArgs(str(tmp_path), skip_tokenizer_init=True, max_model_len=64).create_engine_config()
    assert engine.cache_config.sliding_window == window  # layers without a window of their own have this one
    theirs = AutoConfig.from_pretrained(tmp_path)
    types = getattr(theirs, "layer_types", None) or ["sliding_attention"]
    assert {getattr(theirs, "sliding_window", None) if kind == "sliding_attention" else None for kind in types} == {
        window
    }


@pytest.mark.parametrize(
    ("family", "fields", "named"),
    [
        ("Llama", {"sliding_window": 24}, "sliding_window = 24"),
        ("Mistral", {"layer_types": ["full_attention"] * 4}, "layer_types = ["),
        ("Mistral", {"attention_bias": True}, "attention_bias = True"),
        ("Qwen2", {"use_sliding_window": True, "max_window_layers": 2}, "a sliding_window in some of the layers"),
        ("Qwen2", {"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config = {"),
        ("Qwen3", {"attention_bias": True}, "attention_bias = True"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    ],
    ids=str,
)
def test_what_engine_and_learner_would_compute_differently_is_refused(tmp_path: Path, family, fields, named) -> None:
    [found] = served_otherwise(write(tmp_path, family, **fields))
    assert found.startswith(named)


@pytest.fixture(scope="module")
def tokenizer_files() -> dict[str, str]:
    folder = resolve_model("tiny:llama")
    return {name: (folder / name).read_text() for name in ("tokenizer.json", "tokenizer_config.json")}


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        (7, None, {2, 7}),
        ([7, 9], None, {2, 7, 9}),
        (7, {"eos_token_id": [9, 2, 8]}, {2, 8, 9}),  # vLLM reads no config.json where there is the other file
        ([7, 9], {"eos_token_id": 8}, {2, 8}),
        (7, {"temperature": 0.5}, {2}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stated_as", ["text", "object", "decoder"])
def test_a_response_ends_where_vllm_ends_it(tmp_path, tokenizer_files, config, generation, ends, stated_as) -> None:
    """The tokenizer's own end-of-sequence token is 2."""
    write(tmp_path, "Llama", eos_token_id=config)
    settings = json.loads(tokenizer_files["tokenizer_config.json"])
    if stated_as == "object":
        settings["eos_token"] = {"__type": "AddedToken", "content": settings["eos_token"], "lstrip": False}
    if stated_as == "decoder":  # as older folders of tokenizers without a tokenizer.json have it
        settings["added_tokens_decoder"] = {"2": {"content": settings["eos_token"], "special": True}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "tokenizer.json").write_text(tokenizer_files["tokenizer.json"])
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    asked = SamplingParams()
    engine = EngineArgs(str(tmp_path), max_model_len=64).create_engine_config()
    eos = AutoTokenizer.from_pretrained(tmp_path).eos_token_id
    asked.update_from_generation_config(engine.model_config.try_get_generation_config(), eos)
    assert {*asked.stop_token_ids, asked.eos_token_id} == ends  # what vLLM's own engine does with them
    assert set(end_token_ids(tmp_path)) == set(TargetSpec.from_pretrained(tmp_path).eos_token_ids) == ends
    if stated_as == "decoder":
        (tmp_path / "tokenizer.json").unlink()
        assert set(end_token_ids(tmp_path)) == ends


def test_a_folder_without_a_tokenizer_has_the_ends_of_its_configuration(tmp_path: Path) -> None:
    write(tmp_path, "Llama", eos_token_id=[7, 9])
    assert end_token_ids(tmp_path) == (7, 9)
    write(tmp_path, "Llama")
    assert end_token_ids(tmp_path) == ()
