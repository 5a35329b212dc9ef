"""One family's policy and drafters on a real engine, for benchmarks.models."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from cotrain.config.schema import RolloutConfig
from cotrain.engine.arguments import EngineSpec
from cotrain.engine.loading import differing_tensors
from cotrain.engine.worker import EngineWorker
from cotrain.models.capability import drafter_problems
from cotrain.policy.sharding import whole_tensors
from cotrain.process.scratch import scratch_folder
from cotrain.transport.features import read_shard
from drafters.base import TargetSpec
from drafters.build import build_drafter
from drafters.config import DFlashConfig, DrafterModelConfig, DraftModelConfig, Eagle3Config, MtpConfig
from drafters.files import read_config
from tests.engine.conftest import LiveEngine, make_requests, tokens

KINDS = (
    Eagle3Config(type="eagle3", draft_vocab_size=128), DFlashConfig(type="dflash", draft_vocab_size=128), MtpConfig(type="mtp"),
    DraftModelConfig(type="draft_model"),
)  # fmt: skip


def kinds_for(folder: Path, limits: list[tuple[str, str]]) -> list[DrafterModelConfig]:
    """Return the drafters that can be trained and served for the policy in `folder`. The others are added to limits, with the reason."""
    config, found = read_config(folder), list[DrafterModelConfig]()
    for kind in KINDS:
        if problems := drafter_problems(config, folder, kind, on_cpu=True):
            limits.append(
                (kind.type, problems[0].removeprefix("drafter.model.").removeprefix("type: ").partition(";")[0])
            )
        else:
            found.append(kind)
    return found


def check_policy(folder: Path, dtype: str, kind: DrafterModelConfig | None) -> dict[str, Any]:
    """Compare an engine with transformers, before and after an update. Returns the columns of the page."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    EngineWorker.unnoticed = unnoticed  # type: ignore[attr-defined]  # the engine core is forked from this process
    with running(folder, dtype, kind) as live:
        loaded, tap = compared(live, model)
        moved_by_a_step(model)
        state = {name: tensor.clone() for name, tensor in whole_tensors(model, torch.float32)}
        live.send_policy(state)
        updated, tap_later = compared(live, model)
        missed = live.run(live.engine.on_workers(EngineWorker.unnoticed))  # type: ignore[attr-defined]
        if kind is not None:
            check_greedy(live, kind.type)
    taps = [value for value in (tap, tap_later) if value is not None]
    found = len(state) - len(missed)
    return {"log_probs": [loaded, updated], "tap": max(taps, default=None), "found": found, "tensors": len(state)}


def check_drafter(folder: Path, dtype: str, kind: DrafterModelConfig) -> None:
    """Raise AssertionError when drafts change greedy text, or an updated drafter is not served as it was sent."""
    drafter = build_drafter(kind, TargetSpec.from_pretrained(folder), seed=1)
    drafter.start_from(folder)
    with running(folder, dtype, kind) as live:
        live.send_drafter(drafter.state_for_serving())
        check_greedy(live, kind.type)


def check_greedy(live: LiveEngine, kind: str) -> None:
    speculated = live.greedy(make_requests(8))
    live.run(live.engine.set_num_speculative_tokens(0))
    plain = live.greedy(make_requests(8))
    assert speculated.speculation, "no token was drafted"
    same = sum(a == b for a, b in zip(tokens(plain), tokens(speculated), strict=True))
    # In bfloat16 two tokens can be equally likely up to rounding, which depends on what is verified together.
    assert same >= (8 if live.dtype == torch.float32 else 6), (
        f"{8 - same} of 8 greedy texts differ with drafts of {kind}"
    )


@contextmanager
def running(folder: Path, dtype: str, kind: DrafterModelConfig | None) -> Iterator[LiveEngine]:
    """An engine on the policy in this folder, with a new drafter of this kind."""
    rollout = RolloutConfig(
        max_prompt_tokens=64, max_new_tokens=48, num_speculative_tokens=3, dtype=dtype, ignore_eos=True
    )
    with scratch_folder("family") as scratch:
        drafter, checkpoint = None, Path(scratch) / "drafter"
        if kind is not None:
            drafter = build_drafter(kind, TargetSpec.from_pretrained(folder), seed=0)
            drafter.start_from(folder)
            drafter.save(checkpoint, torch.float32)
        of_drafter = (str(checkpoint), drafter.serving) if drafter else (None, None)
        live = LiveEngine(EngineSpec(rollout, str(folder), *of_drafter, 0, str(scratch)))
        try:
            yield live
        finally:
            live.stop()


@torch.no_grad()
def compared(live: LiveEngine, model: Any) -> tuple[float, float | None]:
    """Return what 9 of 10 log-probs of sampled text differ by at most, and the same of its tapped hidden states, relative.

    In bfloat16 a router may choose another expert for single tokens, whose states are then other ones.
    """
    batch, errors = live.generate(make_requests(8)), list[Tensor]()
    for rollout in batch.rollouts:
        text, first = torch.tensor([rollout.prompt_token_ids + rollout.token_ids]), len(rollout.prompt_token_ids)
        law = model(text).logits[0, first - 1 : -1].log_softmax(-1)
        own = law.gather(1, text[0, first:, None]).squeeze(1)
        errors.append((own - torch.tensor(rollout.log_probs)).abs())
    taps = [tap_errors(record, model) for shard in batch.features for record in read_shard(shard)]
    return torch.cat(errors).quantile(0.9).item(), torch.cat(taps).quantile(0.9).item() if taps else None


def tap_errors(record: Any, model: Any) -> Tensor:
    keep, states = record.feature_mask, model(record.token_ids[None], output_hidden_states=True).hidden_states
    difference = record.final_hidden[keep].float() - states[-1][0][keep]
    return difference.norm(dim=-1) / states[-1][0][keep].norm(dim=-1)


@torch.no_grad()
def moved_by_a_step(model: Any) -> None:
    """Change every parameter, as if a large training step did."""
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        spread = parameter.std().item() if parameter.numel() > 1 else 0.0
        parameter.add_(max(0.1 * spread, 1e-3) * torch.randn(parameter.shape, generator=generator))


def unnoticed(worker: EngineWorker) -> list[str]:
    """Return the tensors of the policy in which one wrong element is not found. A method of the worker, in the engine's process."""
    weights, generator = worker.weights[False], torch.Generator().manual_seed(5)
    assert differing_tensors(weights.model, weights.last_good()) == []
    wrong: dict[str, Tensor] = {name: tensor.clone() for name, tensor in weights.last_good().items()}
    for tensor in wrong.values():
        tensor.view(-1)[torch.randint(tensor.numel(), (), generator=generator)] += 1
    return sorted(wrong.keys() - set(differing_tensors(weights.model, wrong)))
