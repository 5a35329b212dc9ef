"""Feature shards: hidden states of several rollouts, from the engine to the trainer.

The vLLM worker writes them, so only torch, safetensors and plain data are imported. The rows of the rollouts lie one
after the other. Row t of a rollout belongs to its token t; `feature_mask` is False where the engine has no hidden
state: in holes, and always for the last token, which was sampled but never fed back.

N tokens of R rollouts, A aux layers, H hidden size:

    token_ids [N] int64        aux_hidden [N, A*H], final_hidden [N, H] in the engine's dtype
    feature_mask [N] bool      lengths, prompt_length, policy_version, earlier_tokens, drafter_version [R] int64
"""

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.base import SamplingParams

ROWS = ("token_ids", "aux_hidden", "final_hidden", "feature_mask")
"""Fields of FeatureRecord with a row a token."""

NUMBERS = ("prompt_length", "policy_version", "earlier_tokens", "drafter_version")
"""Fields of FeatureRecord with a number a rollout."""


@dataclass(frozen=True, eq=False)
class FeatureRecord:
    """Features of one rollout of T tokens."""

    token_ids: Tensor  # [T] int64, prompt and response
    aux_hidden: Tensor  # [T, A*H], layers ascending
    final_hidden: Tensor  # [T, H], after the target's final norm
    feature_mask: Tensor  # [T] bool
    prompt_length: int
    policy_version: int
    """What computed the hidden states."""
    sampling: SamplingParams
    aux_layers: tuple[int, ...]
    earlier_tokens: int = 0
    """Response tokens that other versions generated before the last segment: a drafter is not judged by them."""
    drafter_version: int = 0
    """What drafted in the last segment."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        return sum(t.nbytes for t in (self.token_ids, self.aux_hidden, self.final_hidden, self.feature_mask))

    @property
    def is_trainable(self) -> bool:
        """Can at least one draft token be compared with the target?

        Row t is a start when it and row t+1 have features and token t+2 was generated (see drafters/alignment.py).
        """
        starts = self.feature_mask[:-2] & self.feature_mask[1:-1]
        return bool(starts[max(self.prompt_length - 2, 0) :].any())

    def last_segment(self) -> "FeatureRecord":
        """The record with all tokens of earlier versions as part of the prompt."""
        return replace(self, prompt_length=self.prompt_length + self.earlier_tokens) if self.earlier_tokens else self

    @cached_property
    def prompt_key(self) -> str:
        """Digest of the prompt's tokens: the same for all samples of a prompt."""
        prompt = self.token_ids[: self.prompt_length].numpy().tobytes()
        return hashlib.blake2b(prompt, digest_size=8).hexdigest()


def write_records(path: str | Path, records: list[FeatureRecord]) -> None:
    """Write rollouts of one sampling and set of aux layers as one shard."""
    first = records[0]
    joined = {name: torch.cat([getattr(record, name) for record in records]) for name in ROWS}
    numbers = {name: torch.tensor([getattr(record, name) for record in records]) for name in NUMBERS}
    numbers["lengths"] = torch.tensor([record.num_tokens for record in records])
    shared = {"sampling": asdict(first.sampling), "aux_layers": first.aux_layers}
    save_file(joined | numbers, path, metadata={"cotrain": json.dumps(shared)})


def read_shard(path: str | Path) -> list[FeatureRecord]:
    """The rollouts of a shard, copied out of the file, which may then be deleted.

    Raises ValueError naming the file and what is wrong with it: missing, truncated, without a tensor, or with hidden
    states of another width or that are not finite.
    """
    try:
        with safe_open(path, framework="pt") as file:
            shared = json.loads(file.metadata()["cotrain"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return _records(tensors, shared)
    except (FileNotFoundError, SafetensorError, ValueError, RuntimeError, KeyError) as error:
        raise ValueError(f"feature shard {path} cannot be read: {error}") from error


def _records(tensors: dict[str, Tensor], shared: dict[str, Any]) -> list[FeatureRecord]:
    lengths: list[int] = tensors["lengths"].tolist()
    columns: dict[str, list[Any]] = {name: [r.clone() for r in tensors[name].split(lengths)] for name in ROWS}
    columns |= {name: tensors[name].tolist() for name in NUMBERS}
    sampling, aux_layers = SamplingParams(**shared["sampling"]), tuple(shared["aux_layers"])
    width, num_layers = tensors["aux_hidden"].shape[1], len(aux_layers)
    if width != (expected := num_layers * tensors["final_hidden"].shape[1]):
        raise ValueError(f"aux_hidden has {width} columns, {num_layers} layers have {expected}")
    records = [
        FeatureRecord(**dict(zip(columns, row, strict=True)), sampling=sampling, aux_layers=aux_layers)
        for row in zip(*columns.values(), strict=True)
    ]
    for index, record in enumerate(records):
        if record.feature_mask[-1]:
            raise ValueError(f"rollout {index} claims features for its last token, which was never fed back")
        for name in ("aux_hidden", "final_hidden"):
            broken = record.feature_mask & ~getattr(record, name).isfinite().all(-1)
            if broken.any():
                raise ValueError(f"{name} of rollout {index} is not finite at position {int(broken.nonzero()[0])}")
    return records
