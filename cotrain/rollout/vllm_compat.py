"""vLLM's internals (0.32): patches of its own faults, and access to the weights as they are served.

This file and `vllm_hooks.py` are the only ones that touch them in vLLM's worker processes, and everything in them names
its end condition; `scheduling.py` is their counterpart in the engine core.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

SUPPORTED_VERSION = "0.32"

# ---------------------------------------------------------------------------------------------------------------
# Patches
# ---------------------------------------------------------------------------------------------------------------


def apply_patches() -> list[str]:
    """Apply what this platform needs, once a process. Returns the names, which the worker reports at start."""
    from vllm import __version__
    from vllm.platforms import current_platform

    if not __version__.startswith(SUPPORTED_VERSION):
        raise RuntimeError(f"cotrain supports vLLM {SUPPORTED_VERSION}, this is {__version__}")
    applied = []
    if current_platform.is_cpu():
        patch_sampling_parameters_of_draft_tokens()
        patch_sampling_without_draft_tokens()
        patch_samples_thrown_away()
        patch_sampling_in_target_vocabulary()
        applied += [
            "sampling_parameters_of_draft_tokens",
            "sampling_without_draft_tokens",
            "samples_thrown_away",
            "sampling_in_target_vocabulary",
        ]
    return applied


def patch_sampling_parameters_of_draft_tokens() -> None:
    """Give each draft token its request's temperature, top-p and top-k.

    The CPU build writes them to a temporary and drops it, so every draft token is verified with uninitialised
    parameters: with temperature > 0 the output distribution is wrong, silently.
    https://github.com/vllm-project/vllm/issues/55005; goes when that is fixed in the pinned version.
    """
    import vllm.v1.sample.rejection_sampler as rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Repeat x[b] for each of request b's draft tokens: [B] -> [num_tokens]; cu_num_tokens [B] is a running sum."""
    counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    if replace_from != replace_to:
        x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(x, counts, output_size=num_tokens)


def patch_sampling_without_draft_tokens() -> None:
    """Let a speculative step without draft tokens pass with top-k set.

    vLLM takes the maximum of an empty top-k tensor there, and the engine dies. Same end condition as above (seen in
    vllm/v1/sample/ops/topk_topp_sampler.py of 0.32.0).
    """
    import vllm.v1.sample.rejection_sampler as rejection_sampler

    original = rejection_sampler.apply_sampling_constraints
    if getattr(original, "passes_empty", False):
        return

    def passes_empty(logits: Tensor, cu_num_draft_tokens: Tensor, sampling_metadata: Any) -> Tensor:
        return logits if logits.shape[0] == 0 else original(logits, cu_num_draft_tokens, sampling_metadata)

    passes_empty.passes_empty = True  # type: ignore[attr-defined]
    rejection_sampler.apply_sampling_constraints = passes_empty


def patch_samples_thrown_away() -> None:
    """Let a seeded request be prefilled in chunks.

    What is sampled after a chunk is thrown away, and vLLM then winds the request's generator back by an offset. CPU
    generators have none: the engine dies. Here such samples are drawn from the engine's own generator, so that the
    request's is not used. Goes when GPUModelRunner._bookkeeping_sync of the pinned version winds back CPU generators.
    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    original = GPUModelRunner.sample_tokens
    if getattr(original, "spares_generators", False):
        return

    def sample_tokens(runner: Any, grammar_output: Any) -> Any:
        batch = runner.input_batch
        thrown_away = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
        spared = {i: batch.generators.pop(i) for i in thrown_away if i in batch.generators}
        try:
            return original(runner, grammar_output)
        finally:
            batch.generators.update(spared)

    sample_tokens.spares_generators = True  # type: ignore[attr-defined]
    GPUModelRunner.sample_tokens = sample_tokens


def patch_sampling_in_target_vocabulary() -> None:
    """Sample draft tokens in the draft vocabulary, where the drafter's logits are.

    vLLM spreads them over the target's vocabulary first (compute_logits of llama_eagle3.py) and then draws noise for
    every token of it, which the CPU does one by one: 0.9 ms a draft token at 49152 tokens, 0.15 ms at 8192. Same
    distribution, same greedy tokens. Goes when vLLM samples before it spreads.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer

    original = SpecDecodeBaseProposer._sample_draft_tokens
    if getattr(original, "in_draft_vocabulary", False):
        return

    def sample(proposer: Any, hidden: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
        if getattr(proposer.model, "draft_id_to_target_id", None) is None:
            return original(proposer, hidden, sampling_metadata)
        return sample_in_draft_vocabulary(proposer, hidden, sampling_metadata)

    sample.in_draft_vocabulary = True  # type: ignore[attr-defined]
    SpecDecodeBaseProposer._sample_draft_tokens = sample


def sample_in_draft_vocabulary(proposer: Any, hidden: Tensor, sampling_metadata: Any) -> tuple[Tensor, Tensor | None]:
    """One draft token for each row of hidden [B, H]: (target token ids [B], probabilities [B, V] or None if greedy)."""
    model = proposer.model
    offsets = model.draft_id_to_target_id  # target id - draft id, [V_draft]
    logits = model.logits_processor(model.lm_head, hidden)
    draft_ids, draft_probs = proposer._sample_from_logits(logits, sampling_metadata)
    token_ids = draft_ids + offsets[draft_ids]
    if draft_probs is None:
        return token_ids, None
    targets = offsets + torch.arange(offsets.numel(), device=offsets.device)
    probs = draft_probs.new_zeros(hidden.shape[0], model.config.vocab_size)
    return token_ids, probs.index_copy_(1, targets, draft_probs)


# ---------------------------------------------------------------------------------------------------------------
# Weights as they are served
# ---------------------------------------------------------------------------------------------------------------


def reload_weights(model: nn.Module, model_config: Any, tensors: dict[str, Tensor]) -> None:
    """Load a whole state dict the way vLLM's own update session does (layer-wise reload).

    A plain load_weights fails on CPU, where linear weights live in packed form only. `finalize` runs whatever
    happens: without it the model is left on the meta device and the next step kills the engine.
    """
    from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    initialize_layerwise_reload(model)
    try:
        with disable_mtp_completeness_check():
            model.load_weights(iter(tensors.items()))
    finally:
        finalize_layerwise_reload(model, model_config)
        _repack_tied_weights(model)


def _repack_tied_weights(model: nn.Module) -> None:
    """Pack again what shares its parameter with another module: the output head of a model with tied embeddings.

    The layer-wise reload packs what it loads. Nothing is loaded into a tied head, so on CPU it would go on multiplying
    by its packed copy of the first weights. Ends when vLLM 0.32's layerwise.py is replaced by one that does this.
    """
    packed: set[int] = set()
    for module in model.modules():
        if hasattr(module, "cpu_linear") and module.weight.numel():
            if id(module.weight) in packed:
                module.quant_method.process_weights_after_loading(module)
            packed.add(id(module.weight))


def load_safetensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one file, in memory of their own."""
    from safetensors.torch import load_file

    return {name: tensor.clone() for name, tensor in load_file(str(path)).items()}


def modules_shared_with_target(draft_model: nn.Module, target_model: nn.Module) -> list[str]:
    """Checkpoint-name suffixes of the drafter's modules that are the target's own.

    An update that carried them would overwrite the target through the drafter.
    """
    targets = {id(module) for module in target_model.modules()}
    names = [name for name, module in draft_model.named_modules() if id(module) in targets and name]
    return [f"{_checkpoint_name(name)}.weight" for name in names]


def _checkpoint_name(name: str) -> str:
    """Drafter checkpoints carry no `model.` prefix (except models that are whole checkpoints, matched by suffix)."""
    return name.removeprefix("model.")


def differing_tensors(
    model: nn.Module, expected: dict[str, Tensor], columns: int | None = None, seed: int = 0
) -> list[str]:
    """Names of tensors that the model does not serve exactly as `expected`.

    columns: compare only that many input columns (drawn by `seed`) of matrices that exist in packed form only; None
    compares all. Names that the model does not serve at all are reported too.
    """
    unseen = set(expected)
    differing = []
    for name, served, chosen in _served_tensors(model, set(expected), columns, seed):
        wanted = expected[name] if chosen is None else expected[name][:, chosen]
        if not torch.equal(served.cpu().to(wanted.dtype), wanted):
            differing.append(name)
        unseen.discard(name)
    return sorted({*differing, *unseen})


def served_tensors(model: nn.Module, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors exactly as served, in checkpoint names."""
    return {name: tensor for name, tensor, _ in _served_tensors(model, set(names), None, 0)}


def _served_tensors(
    model: nn.Module, names: set[str], columns: int | None, seed: int
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """(checkpoint name, tensor, chosen columns or None) for each of `names` that the model holds.

    A tied weight comes once for each module that uses it: each may hold a packed copy of its own.
    """
    by_served_name = _by_served_name(model, names)
    first_names: dict[int, str] = {}
    for prefix, module in model.named_modules():
        for leaf, parameter in module.named_parameters(prefix="", recurse=False):
            full_name = f"{prefix}.{leaf}" if prefix else leaf
            if parameter.numel():
                full_name = first_names.setdefault(id(parameter), full_name)
            packed = leaf == "weight" and hasattr(module, "cpu_linear")
            views: list[tuple[Tensor, Tensor | None]] = []
            if parameter.numel():
                views.append((parameter.detach(), None))
            if packed:
                views.append(_unpack(module, columns, seed))
            for tensor, chosen in views:
                for name, part in _unfused(full_name, module, tensor):
                    if name in by_served_name:
                        yield by_served_name[name], part, chosen


def _by_served_name(model: nn.Module, names: Iterable[str]) -> dict[str, str]:
    """Checkpoint name of each tensor, by the name it has in the model.

    Renaming is the model's own, less the fusing of projections, which `_unfused` takes back. Drafters may leave out
    `model.`, and Qwen3-Next's MTP head renames `mtp.` in its load_weights.
    """
    from vllm.model_executor.models.utils import WeightsMapper

    mapper = getattr(model, "hf_to_vllm_mapper", None) or WeightsMapper()
    renaming = WeightsMapper(
        orig_to_new_substr=mapper.orig_to_new_substr,
        orig_to_new_prefix={**mapper.orig_to_new_prefix, "mtp.": "model."},
    )
    found: dict[str, str] = {}
    for name in names:
        served = renaming.apply_list([name])[0]
        found |= {served: name, f"model.{served}": name}
    return found


def _unpack(module: Any, columns: int | None, seed: int) -> tuple[Tensor, Tensor | None]:
    """Read a oneDNN-packed matrix back by multiplying it with unit vectors, which is exact.

    Returns ([out, in], None) or ([out, chosen], chosen).
    """
    width = next(
        getattr(module, name)
        for name in ("embedding_dim", "input_size_per_partition", "input_size")
        if hasattr(module, name)
    )
    chosen = None
    if columns is not None and columns < width:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(width, generator=generator)[:columns].sort().values
    units = torch.eye(width, dtype=module.weight.dtype)
    if chosen is not None:
        units = units[chosen]
    return module.cpu_linear(units, module.weight, None).t(), chosen


def _unfused(name: str, module: Any, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """Split vLLM's fused projections into the checkpoint's tensors and drop vocabulary padding."""
    if ".qkv_proj." in name:
        heads, kv_heads, size = module.total_num_heads, module.total_num_kv_heads, module.head_size
        parts = tensor.split([heads * size, kv_heads * size, kv_heads * size])
        return [(name.replace(".qkv_proj.", f".{p}_proj."), part) for p, part in zip("qkv", parts, strict=True)]
    if ".gate_up_proj." in name:
        parts = tensor.chunk(2)
        return [(name.replace(".gate_up_proj.", f".{p}_proj."), t) for p, t in zip(("gate", "up"), parts, strict=True)]
    if name.endswith("draft_id_to_target_id"):
        return [("d2t", tensor)]
    if hasattr(module, "org_vocab_size"):
        return [(name, tensor[: module.org_vocab_size])]
    return [(name, tensor)]
