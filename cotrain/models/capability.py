"""What vLLM and transformers can do with a policy, read from the sources that are installed: importing them takes seconds.

A policy is accepted when vLLM serves it and transformers trains it. Those refused all the same are refused for a reason by name.
"""

import ast
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from importlib.util import find_spec, resolve_name
from pathlib import Path
from typing import Any

from drafters.config import BLOCK_DRAFTERS, AuxConfig, DrafterModelConfig
from drafters.files import text_fields, unused_token_id

REGISTRY, TABLES = "vllm.model_executor.models.registry", ("TEXT_GENERATION", "MULTIMODAL", "TRANSFORMERS_SUPPORTED")
AUTO, TRAINED = "transformers.models.auto.modeling_auto", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"

STATE_SPOILED = "after an update vLLM serves other weights than were sent, because its reload spoils layers with a state (vLLM pull 48284)"
REFUSED = {
    "nemotron_h": STATE_SPOILED,
    "lfm2": "vLLM's log-probs differ by 0.5 from those of transformers, and why is not known",
}
"""Families that vLLM serves and transformers trains, and that are refused on purpose, by model_type."""

REFUSED_ON_CPU = {"minimax_m2": "the router of experts in vLLM's CPU build takes scores of a softmax only"}


def architecture_of(config: Mapping[str, Any]) -> str:
    return str((config.get("architectures") or ["none"])[0])


def class_in_vllm(architecture: str) -> tuple[str, str] | None:
    """Return module and name of the class with which vLLM generates text of an architecture; None if it has none."""
    for table in TABLES:
        if architecture in (models := _assigned(REGISTRY, f"_{table}_MODELS")):
            module, name = models[architecture]
            return (module if "." in module else f"vllm.model_executor.models.{module}"), name
    return None


def class_in_transformers(model_type: str) -> str | None:
    """Return the class that the learner trains for the model_type of a config.json; None if transformers has none."""
    return dict(_assigned(AUTO, TRAINED)).get(model_type)


def interfaces(architecture: str) -> frozenset[str]:
    """Return the names of all classes that vLLM's class of an architecture is derived from, its own among them."""
    found = class_in_vllm(architecture)
    return frozenset() if found is None else _with_bases(*found)


def refusal(config: Mapping[str, Any]) -> str | None:
    """Say why the policy of a config.json cannot be trained and served; None when it can."""
    architecture, model_type = architecture_of(config), str(config.get("model_type"))
    own, trained = str(text_fields(config).get("model_type")), class_in_transformers(model_type)
    if class_in_vllm(architecture) is None:
        return f"architecture {architecture} is none that vLLM generates text with"
    if trained is None:
        return f"model_type {model_type} is none that transformers trains as a language model"
    if "text_config" in config and trained.endswith("ForConditionalGeneration"):
        return f"transformers trains {model_type} only with its image encoder; save its language model alone"
    if reason := REFUSED.get(own):
        return f"model_type {own} is refused: {reason}"
    if "HasInnerState" in interfaces(architecture) and not has_gated_delta_net(config):
        return f"architecture {architecture} is refused: {STATE_SPOILED}"
    return None


def drafting_refusal(config: Mapping[str, Any], kind: str, on_cpu: bool) -> str | None:
    """Say why vLLM cannot serve a drafter of this kind beside the policy of a config.json; None when it can."""
    architecture = architecture_of(config)
    if kind in ("eagle3", *BLOCK_DRAFTERS) and "SupportsEagle3" not in interfaces(architecture):
        return f"vLLM's class for {architecture} gives no hidden states to a drafter"
    if kind == "dspark" and on_cpu and "TRITON_INTERPRET" not in os.environ:
        return "only vLLM's model runner V2 drafts with it, for which the CPU build has no Triton"
    if on_cpu and kind != "mtp" and text_fields(config).get("kv_lora_rank"):
        return "vLLM's CPU build has no common block size for latent attention (MLA) and a drafter with plain attention"
    return None


def drafter_problems(config: Mapping[str, Any], folder: Path, drafter: DrafterModelConfig, on_cpu: bool) -> list[str]:
    """List why a drafter of this configuration cannot be trained and served beside the policy of a config.json in `folder`."""
    from drafters.base import TargetSpec
    from drafters.build import shape_problems

    if reason := drafting_refusal(config, drafter.type, on_cpu):
        return [f"drafter.model.type: {reason}; `cotrain models {folder}` says what can draft"]
    layers = drafter.num_layers if isinstance(drafter, AuxConfig) else 1
    if layers > 1 and _in_several_groups(config, layers):
        fix = "vLLM would part them into several groups of the KV cache, beside this policy's layers with sliding windows; use 1"
        return [f"drafter.model.num_layers: {layers} layers cannot be served: {fix}"]
    target = TargetSpec.from_config(dict(config), folder)
    knows_tokens = (folder / "tokenizer.json").is_file()  # a policy that is only looked at may have none here
    unused = unused_token_id(folder, target.vocab_size) if knows_tokens else target.vocab_size - 1
    return shape_problems(drafter, replace(target, unused_token_id=unused))


def _in_several_groups(config: Mapping[str, Any], layers: int) -> bool:
    """Return whether vLLM (0.32, `_get_kv_cache_groups_uniform_page_size`) parts a drafter's layers, which see the whole text.

    All groups have as many layers as the kind with the fewest, or as that with the most if it has less than half as many again.
    """
    types = Counter(text_fields(config).get("layer_types") or ())
    if not types["sliding_attention"] or not types["full_attention"]:
        return False
    whole, windows = types["full_attention"] + layers, types["sliding_attention"]
    return whole >= 1.5 * windows


def has_gated_delta_net(config: Mapping[str, Any]) -> bool:
    """Return whether some layers are gated delta nets (as in Qwen3-Next), which keep a state instead of keys and values."""
    return "linear_num_value_heads" in text_fields(config)


@lru_cache
def _assigned(module: str, name: str) -> Any:
    """Return the literal that a module assigns to a name, or that it makes an OrderedDict of."""
    for node in _source(module).body:
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.targets[0] if isinstance(node, ast.Assign) else node.target
        if ast.unparse(target) == name:
            value: Any = node.value
            return ast.literal_eval(value.args[0] if isinstance(value, ast.Call) else value)
    raise ValueError(f"{module} has no {name}; cotrain does not know this version, run `make setup`")


@lru_cache
def _with_bases(module: str, name: str) -> frozenset[str]:
    """Return the names of a class of vLLM's and of all its bases. Imports of a name are followed to where it is defined."""
    found, package = {name}, module if _file(module).name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(_source(module)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            for base in node.bases:
                found |= _with_bases(module, ast.unparse(base))
        if isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("vllm")):
            for alias in node.names:
                if name == (alias.asname or alias.name):
                    found |= _with_bases(resolve_name("." * node.level + (node.module or ""), package), alias.name)
    return frozenset(found)


def _file(module: str) -> Path:
    package, *rest = module.split(".")
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        raise ValueError(f"{package} is not installed; run `make setup`")
    path = Path(spec.origin).parent.joinpath(*rest)
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


@lru_cache
def _source(module: str) -> ast.Module:
    file = _file(module)
    return ast.parse(file.read_bytes() if file.is_file() else b"")
