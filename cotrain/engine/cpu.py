"""What only vLLM's CPU build (0.32) needs: arguments, and patches of its faults.

A patch of a fault says when it can go. cpu_packing.py is the other file about the CPU build.
"""

import copy
import gc
import pkgutil
import sys
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from cotrain.engine.cpu_packing import unpack
from cotrain.engine.interface import KNOWN_VERSION, RUNNER, WRAPPED, moved_in, wrap
from cotrain.process.children import follow_parent

CPU_ARGUMENTS = {
    "enforce_eager": True,  # compiling takes half a minute at each start
    # A single worker runs inside the engine core, as on one GPU, which saves a process and passing each step's tensors to
    # it. On a CPU vLLM replaces "uni" by processes to set OpenMP up for them; our environment has done that already.
    "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
}

Patch = Callable[..., Any]

PATCHES: dict[Patch, tuple[str, str]] = {}
"""Our function -> (module or class, name) of the function that it replaces and gets as its first argument."""

DRAFTING = "vllm.v1.spec_decode.llm_base_proposer"
PROPOSER = f"{DRAFTING}:SpecDecodeBaseProposer"
SAMPLING = "vllm.v1.sample.rejection_sampler"
EXPERTS = "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod"
LINEAR_ATTENTION = "vllm.model_executor.layers.mamba.ops.cpu.gdn_attention"
BLOCK_DRAFTER = "vllm.model_executor.models.qwen3_dflash:DFlashQwen3Model"
MODEL_CLASS = "vllm.model_executor.models.registry:_LazyRegisteredModel"
KERNELS = "vllm.triton_utils.dispatcher"


def in_place_of(owner: str, name: str) -> Callable[[Patch], Patch]:
    """Decorate a patch of this function of a module or class."""

    def register(patch: Patch) -> Patch:
        PATCHES[patch] = owner, name
        return patch

    return register


class _Forked(ForkProcess):
    def run(self) -> None:
        follow_parent()  # a child that outlives its parent keeps copies of its sockets open, which hides the parent's death
        gc.freeze()  # keeps objects of the parent, such as Ray's references, from being collected here
        if "ray" in sys.modules:  # vLLM cannot set the title of a process whose title Ray has set before
            from ray._raylet import setproctitle  # type: ignore[attr-defined]

            setproctitle(f"VLLM::{self.name}")
        super().run()


class _Forking(ForkContext):
    Process = _Forked


def fork_engine_core() -> None:
    """Make vLLM fork its engine core from this process, which has imported vLLM, instead of importing it once more.

    That saves 9 s of processor time, and as much for each tensor-parallel worker, which is forked from the core. The
    process must have been started with `threads.engine_environment`, because the core inherits its OpenMP runtime;
    libiomp5 can be forked, libgomp only as long as it has started no thread.
    """
    import vllm.v1.engine.utils as cores
    import vllm.v1.executor.multiproc_executor as workers

    # Before vLLM reads a model's configuration, and before a core looks for kernels, which is before it imports our extension.
    for patch in (leave_llvmlite_out, load_without_torchvision, inspect_here):
        apply(patch)
    cores.get_mp_context = workers.get_mp_context = _Forking


@in_place_of(KERNELS, "_rebind_kernels")
def leave_llvmlite_out(original: Any, overrides: Any) -> None:
    """Keep vLLM's search for kernels away from llvmlite, which numba imports.

    The search reads the __dict__ of everything in all modules. llvmlite's library returns a function for any name, even
    for __dict__, and the engine core would not start.
    """
    hidden = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "llvmlite"}
    for name in hidden:
        del sys.modules[name]
    try:
        original(overrides)
    finally:
        sys.modules.update(hidden)


@in_place_of(SAMPLING, "expand_batch_to_tokens")
def expand_batch_to_tokens(
    original: Any, x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Give each draft token its request's temperature, top-p and top-k: x[b] for each of request b's draft tokens.

    The CPU build writes them to a temporary and drops it, so every draft token is verified with uninitialised
    parameters: with temperature > 0 the output distribution is wrong, silently.
    https://github.com/vllm-project/vllm/issues/55005; this can go when that is fixed in the pinned version.

    x [B] -> [num_tokens]; cu_num_tokens [B] is a running sum.
    """
    counts = torch.diff(cu_num_tokens.to(torch.int64), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    x = torch.where(x == replace_from, torch.full_like(x, replace_to), x)
    return torch.repeat_interleave(x, counts, output_size=num_tokens)


@in_place_of(RUNNER, "sample_tokens")
def spare_generators(original: Any, runner: Any, grammar_output: Any) -> Any:
    """Let a seeded request be prefilled in chunks.

    vLLM discards what is sampled after a chunk, and then rewinds the request's generator by an offset. CPU generators have no
    offset, and the engine dies. Here such samples are drawn from the engine's own generator and leave the request's alone.
    This can go when GPUModelRunner._bookkeeping_sync of the pinned version rewinds CPU generators.
    """
    batch = runner.input_batch
    thrown_away = runner.discard_request_mask.np[: batch.num_reqs].nonzero()[0].tolist()
    spared = {i: batch.generators.pop(i) for i in thrown_away if i in batch.generators}
    try:
        return original(runner, grammar_output)
    finally:
        batch.generators.update(spared)


@in_place_of(PROPOSER, "_sample_draft_tokens")
def sample_in_draft_vocabulary(
    original: Any, proposer: Any, hidden: Tensor, sampling_metadata: Any
) -> tuple[Tensor, Tensor | None]:
    """Sample draft tokens in the draft vocabulary, where the drafter's logits are.

    vLLM first spreads the logits over the target's vocabulary (compute_logits of llama_eagle3.py) and then draws from all of
    it, which for a drafter with 8192 of 49152 tokens is six times as many. The distribution and the greedy tokens are the
    same. This can go when vLLM samples before it spreads.

    hidden [B, H] -> (target token ids [B], probabilities [B, V] or None if greedy).
    """
    model = proposer.model
    offsets = getattr(model, "draft_id_to_target_id", None)  # target id - draft id, [V_draft]
    if offsets is None:
        return original(proposer, hidden, sampling_metadata)
    logits = model.logits_processor(model.lm_head, hidden)
    draft_ids, draft_probs = proposer._sample_from_logits(logits, sampling_metadata)
    token_ids = draft_ids + offsets[draft_ids]
    if draft_probs is None:
        return token_ids, None
    targets = offsets + torch.arange(offsets.numel(), device=offsets.device)
    probs = draft_probs.new_zeros(hidden.shape[0], model.config.vocab_size)
    return token_ids, probs.index_copy_(1, targets, draft_probs)


def draw(probs: Tensor, seeds: Tensor | None = None) -> Tensor:
    """Draw one token from each row of unnormalised probabilities [B, V], with the kernel of vLLM's plain sampler.

    seeds [B]: by default, from the default generator. A row of zeros gives any token.
    """
    seeds = torch.randint(2**31, (len(probs),)) if seeds is None else seeds
    return torch.ops._C.fused_gumbel_argmax(probs.log(), seeds)


@in_place_of(SAMPLING, "sample_recovered_tokens")
def draw_recovered_tokens(
    original: Any,
    max_spec_len: int,
    num_draft_tokens: list[int],
    cu_num_draft_tokens: Tensor,
    draft_token_ids: Tensor,
    draft_probs: Tensor | None,
    target_probs: Tensor,
    sampling_metadata: Any,
    *rest: Any,
) -> Tensor:
    """Draw what replaces a rejected draft token, from max(0, p - q) at each of the N draft tokens.

    vLLM draws exponential noise for the tokens of the vocabulary one by one, 10 ms for 16 requests at 49152 tokens. Its plain
    sampler has a kernel for the CPU, which is used here. This can go when sample_recovered_tokens uses it too.

    draft_token_ids [N], draft_probs [N, V] or None (the draft token has all of q), target_probs [N, V] -> [N].
    """
    if draft_probs is None:
        residual = target_probs.scatter(1, draft_token_ids.long()[:, None], 0.0)
    else:
        # Where q is NaN the draft token is always rejected, and the distribution is p.
        residual = torch.where(draft_probs > 0, target_probs - draft_probs, target_probs).clamp_(min=0)
    seeds = torch.randint(2**31, (len(residual),))
    ends = cu_num_draft_tokens.tolist()
    for request, generator in sampling_metadata.generators.items():
        own = seeds[ends[request] - num_draft_tokens[request] : ends[request]]
        own.random_(2**31, generator=generator)
    return draw(residual, seeds).to(draft_token_ids.dtype)


@in_place_of(DRAFTING, "empty_exponential_noise_like")
def no_noise(original: Any, probs: Tensor, *rest: Any) -> Tensor:
    """Leave out the noise that `draw_draft_tokens` has no use for."""
    return probs.new_empty(0)


@in_place_of(DRAFTING, "sample_with_exponential_noise")
def draw_draft_tokens(original: Any, probs: Tensor, noise: Tensor) -> Tensor:
    """Draw draft tokens [B] from probs [B, V] with the plain sampler's kernel, as long as `draw_recovered_tokens` does."""
    return draw(probs)


@in_place_of(SAMPLING, "rejection_sample")
def accept_at_rates(original: Any, *args: Any, **options: Any) -> Tensor:
    """Accept draft tokens at the rates of vLLM's synthetic acceptance, which the kernels of the CPU build refuse.

    The target of each of the N draft tokens becomes that token, or another one if it is to be rejected. This can go when
    _rejection_random_sample_kernel_impl of the pinned version takes SYNTHETIC_MODE.
    """
    if (rates := options.pop("synthetic_conditional_rates", None)) is None:
        return original(*args, **options)
    drafts, counts, most, ends, _, logits, *rest = args
    accepted = torch.rand(len(drafts)) < torch.cat([rates[:count] for count in counts])
    tokens = torch.where(accepted, drafts, (drafts + 1) % logits.shape[1])
    target = torch.full_like(logits, -torch.inf).scatter_(1, tokens.long()[:, None], 0.0)
    return original(drafts, counts, most, ends, None, target, *rest, **options | {"synthetic_mode": False})


@in_place_of(EXPERTS, "_setup_kernel")
def pack_updated_experts(original: Any, method: Any, layer: Any, w13: Tensor, w2: Tensor) -> None:
    """Pack the experts of a mixture after every update, not only after the first load.

    The CPU build packs them when their kernel is made. An update then puts plain weights where the kernel reads packed
    ones, and every token is computed with shuffled experts, silently. This can go when _setup_kernel of the pinned version's
    unquantized_fused_moe_method.py packs in both cases (GPU kernels: https://github.com/vllm-project/vllm/issues/42821).
    """
    is_update = method.moe_kernel is not None
    original(method, layer, w13, w2)
    if is_update:
        method.moe_kernel.fused_experts.process_weights_after_loading(layer)


@in_place_of(LINEAR_ATTENTION, "_spec_forward")
def pad_short_drafts(
    original: Any, layer: Any, metadata: Any, mixed_qkv: Tensor, b: Tensor, a: Tensor, *caches: Any
) -> Tensor:
    """Let models with linear attention (gated delta nets) draft fewer tokens than the maximum.

    The CPU build keeps the inputs of each request's convolution in a row. It appends those of a step in the right place only
    if the maximum number of tokens was drafted. After a shorter step the convolution reads rejected tokens, and the output
    changes silently, or the engine dies. Here every request is padded to the most rows it may have, and what is computed for
    the added rows is dropped, as after a rejection. This can go when _spec_forward of the pinned version's
    layers/mamba/ops/cpu/gdn_attention.py appends after the previous width - 2 inputs.
    """
    *_, width, most_inputs = caches
    count, most_rows = metadata.num_spec_decodes, most_inputs - width + 2
    starts = metadata.spec_query_start_loc[: count + 1]
    firsts = torch.arange(count + 1, dtype=starts.dtype) * most_rows
    num_rows = int(starts[-1])
    places = torch.arange(num_rows) + torch.repeat_interleave(firsts[:-1] - starts[:-1], starts.diff())

    def padded(rows: Tensor) -> Tensor:
        return rows.new_zeros(count * most_rows, *rows.shape[1:]).index_copy_(0, places, rows[:num_rows])

    metadata = copy.copy(metadata)
    metadata.spec_query_start_loc = firsts
    return original(layer, metadata, padded(mixed_qkv), padded(b), padded(a), *caches)[places]


@in_place_of(BLOCK_DRAFTER, "_normalize_context_k")
def norm_context_keys(original: Any, model: Any, keys: Tensor) -> Tensor:
    """Norm the keys of a block drafter's context by the weights of their own layer.

    vLLM norms those of all layers at once. The CPU kernel takes the weights of the first layer for all of them, so that drafts of a
    drafter of several layers are worse, silently. On another platform this was https://github.com/vllm-project/vllm/pull/56431; this
    can go when ops.rms_norm of the pinned version takes a weight for each layer.

    keys [L, C, kv heads, D] -> the same.
    """
    of_layers = zip(keys, model._k_norm_weights, strict=True)
    return torch.stack([rms_norm(rows, rows.shape[-1:], weight, model._rms_norm_eps) for rows, weight in of_layers])


@in_place_of(BLOCK_DRAFTER, "_build_context_kv_buffers")
def copy_packed_projections(original: Any, model: Any, attentions: list[Any], has_bias: bool) -> None:
    """Let a block drafter read its context with the matrices of an update.

    It copies the rows of keys and values from all layers' matrices, which the CPU build empties when it packs them, and the engine
    would die with the next draft. This can go when _build_context_kv_buffers of the pinned version reads packed matrices.
    """
    original(model, attentions, has_bias)
    projections = [attention.qkv_proj for attention in attentions]
    if all(hasattr(projection, "cpu_linear") and not projection.weight.numel() for projection in projections):
        rows = [unpack(a.qkv_proj, a.hidden_size, None, 0)[0][a.q_size :] for a in attentions]
        model._fused_kv_weight = torch.cat(rows).contiguous()


TORCHVISION = (
    "torchvision",
    "torchvision.transforms",
    "torchvision.transforms.v2",
    "torchvision.transforms.v2.functional",
)


@in_place_of(MODEL_CLASS, "load_model_cls")
def load_without_torchvision(original: Any, entry: Any) -> Any:
    """Import one of vLLM's models where torchvision is absent, as beside our CPU build of torch, for which it brings CUDA libraries.

    Classes of language models import that of the whole family, and so its image processor: qwen3_5.py imports qwen3_vl.py, which
    imports image_processing_qwen2_vl.py of transformers, which imports torchvision. Here empty modules stand for it during the
    import, so that text is served, and an image would fail. This can go when qwen3_vl.py of the pinned version, or the image
    processor that it imports, can be imported without torchvision.
    """
    try:
        return original(entry)
    except ModuleNotFoundError as error:
        if error.name != "torchvision":
            raise
    from transformers import image_processing_backends, video_processing_utils  # noqa: F401  so that they find it absent

    empty = {name: ModuleType(name) for name in TORCHVISION}
    empty[TORCHVISION[-2]].functional = empty[TORCHVISION[-1]]  # type: ignore[attr-defined]
    sys.modules.update(empty)
    try:
        return original(entry)
    finally:
        for name in empty:
            del sys.modules[name]


@in_place_of(MODEL_CLASS, "inspect_model_cls")
def inspect_here(original: Any, entry: Any) -> Any:
    """Look at one of vLLM's models in this process, as it is loaded with `load_without_torchvision` and as long as that is needed.

    vLLM starts another process for it, because on a GPU the import may use CUDA. That one does not have our patches.
    """
    from vllm.model_executor.models.registry import _ModelInfo

    return original(entry) if find_spec("torchvision") else _ModelInfo.from_model_cls(entry.load_model_cls())


def apply_patches() -> None:
    """Apply the patches that this platform needs.

    Raises RuntimeError for a vLLM that is not supported, and for one in which a function that we replace has moved.
    """
    import vllm

    version = vllm.__version__
    if not version.startswith(KNOWN_VERSION):
        raise RuntimeError(f"cotrain supports vLLM {KNOWN_VERSION}, this is {version}")
    if problems := moved_in(Path(vllm.__file__).parents[1], WRAPPED):
        raise RuntimeError(f"this vLLM {version} is not the one that cotrain knows: {'; '.join(problems)}")
    correct()


def correct() -> None:
    """Apply the patches if this is a CPU build, whatever its version. Each is applied once a process. Raises AttributeError
    or ImportError when a function that one of them replaces is missing."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    # vLLM searches for kernels since 0.31.
    patches = [patch for patch in PATCHES if patch is not leave_llvmlite_out or find_spec(KERNELS)]
    for owner, name in (PATCHES[patch] for patch in patches):
        getattr(pkgutil.resolve_name(owner), name)  # raises before any patch is applied
    for patch in patches:
        apply(patch)


def apply(patch: Patch) -> None:
    owner, name = PATCHES[patch]
    wrap(pkgutil.resolve_name(owner), name, patch)
