"""Feature shards: hidden states of several rollouts, from the engine to the trainer.

The vLLM worker writes them, so this imports only torch, safetensors and plain data. Rollout i of T tokens has the tensors
"i.token_ids" and so on, one for each of ROWS, with the shapes of FeatureRecord. Row t belongs to token t; `feature_mask` is
False where the engine has no hidden state: in holes, and always for the last token, which was sampled but never fed back.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cotrain.weights.payload import header, manifest_of
from drafters.base import SamplingParams

ROWS = ("token_ids", "log_probs", "aux_hidden", "final_hidden", "feature_mask")
"""Fields of FeatureRecord that have one row for each token, or are None. A shard stores the others as JSON."""

ROWS_AT_ONCE = 64  # that are written


@dataclass(frozen=True, eq=False)
class FeatureRecord:
    """Features of one rollout of T tokens. A is the number of aux layers, H the hidden size."""

    token_ids: Tensor  # [T] int64, prompt and response
    aux_hidden: Tensor  # [T, A*H] in the engine's dtype, layers ascending
    final_hidden: Tensor  # [T, H] in the engine's dtype, after the target's final norm
    feature_mask: Tensor  # [T] bool
    prompt_length: int
    policy_version: int  # version of the policy that computed the hidden states
    sampling: SamplingParams
    aux_layers: tuple[int, ...]
    earlier_tokens: int = 0
    """Response tokens before the last segment, which other versions generated: a drafter is not judged by them."""
    drafter_version: int = 0  # version of the drafter that drafted in the last segment
    log_probs: Tensor | None = None  # [T] float32, of this policy's tokens with this sampling; NaN if unknown
    turns: tuple[tuple[int, int], ...] = ()
    """Where each turn of a trajectory begins and ends (exclusive); tokens between them were observed. Empty: one turn after the prompt."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        return sum(rows.nbytes for name in ROWS if (rows := getattr(self, name)) is not None)

    @property
    def response_mask(self) -> Tensor:
        """[T] bool, True for tokens that were generated."""
        at = torch.arange(self.num_tokens)
        mask = at >= self.prompt_length
        if self.turns:
            mask &= torch.stack([(at >= start) & (at < end) for start, end in self.turns]).any(0)
        return mask

    @property
    def num_turns(self) -> int:
        """Number of turns with a generated token."""
        return sum(end > self.prompt_length for _, end in self.turns) if self.turns else 1

    @property
    def is_trainable(self) -> bool:
        """Whether at least one draft token can be compared with the target.

        Drafting can start at row t if rows t and t+1 have features and token t+2 was generated (see drafters/alignment.py).
        """
        starts = self.feature_mask[:-2] & self.feature_mask[1:-1]
        return bool((starts & self.response_mask[2:]).any())

    @property
    def is_scorable(self) -> bool:
        """Whether a drafter can be judged by it: the response has a token that could be drafted, and all features for that.

        The first token of a response has no verification step.
        """
        rows = self.feature_mask[self.prompt_length - 1 : -1]
        return len(rows) > 1 and bool(rows.all())

    def last_segment(self) -> "FeatureRecord":
        """Return the record with the response tokens of earlier versions counted as part of the prompt."""
        return replace(self, prompt_length=self.prompt_length + self.earlier_tokens) if self.earlier_tokens else self

    @cached_property
    def prompt_key(self) -> str:
        """Digest of the prompt's tokens: the same for all samples of a prompt."""
        prompt = self.token_ids[: self.prompt_length].numpy().tobytes()
        return hashlib.blake2b(prompt, digest_size=8).hexdigest()


def write_records(path: str | Path, records: list[FeatureRecord]) -> None:
    """Write rollouts as one shard, in one pass over their memory.

    safetensors' own writer takes only tensors that share no memory, so it would need a copy of aux and final states.
    """
    rows = {f"{i}.{name}": getattr(record, name) for name in ROWS for i, record in enumerate(records)}
    tensors = {name: tensor for name, tensor in rows.items() if tensor is not None}
    others = [{f.name: getattr(record, f.name) for f in fields(record) if f.name not in ROWS} for record in records]
    metadata = {"cotrain": json.dumps(others, default=asdict)}
    with open(path, "wb") as file:
        # By field, with masks last, so that no tensor begins at an odd byte.
        file.write(header(manifest_of(tensors.items()), [*tensors], metadata)[0])
        for tensor in tensors.values():
            for part in tensor.split(ROWS_AT_ONCE):  # rows that lie in those of another tensor are copied in the cache
                file.write(part.contiguous().view(torch.uint8).numpy().data)


def read_shard(path: str | Path) -> list[FeatureRecord]:
    """Return the rollouts of a shard, copied out of the file, which may then be deleted.

    Raises ValueError naming the file and what is wrong with it: missing, truncated, without a tensor, or with hidden
    states that have another width or are not finite.
    """
    try:
        with safe_open(path, framework="pt") as file:
            others, names = json.loads(file.metadata()["cotrain"]), set(file.keys())
            parts = [[name for name in ROWS if f"{i}.{name}" in names] for i in range(len(others))]
            rows = [{name: file.get_tensor(f"{i}.{name}").clone() for name in part} for i, part in enumerate(parts)]
        return [_checked(i, *of_rollout) for i, of_rollout in enumerate(zip(rows, others, strict=True))]
    except (FileNotFoundError, SafetensorError, ValueError, RuntimeError, KeyError, TypeError) as error:
        raise ValueError(f"feature shard {path} cannot be read: {error}") from error


def _checked(index: int, rows: dict[str, Tensor], others: dict[str, Any]) -> FeatureRecord:
    others |= {"sampling": SamplingParams(**others["sampling"]), "aux_layers": tuple(others["aux_layers"])}
    others["turns"] = tuple(map(tuple, others["turns"]))
    record = FeatureRecord(**others | rows)
    width, num_layers = record.aux_hidden.shape[1], len(record.aux_layers)
    if len(lengths := {len(tensor) for tensor in rows.values()}) > 1:
        raise ValueError(f"the tensors of rollout {index} have {sorted(lengths)} rows")
    if width != (expected := num_layers * record.final_hidden.shape[1]):
        raise ValueError(f"aux_hidden has {width} columns, {num_layers} layers have {expected}")
    if record.feature_mask[-1]:
        raise ValueError(f"rollout {index} claims features for its last token, which was never fed back")
    for name in ("aux_hidden", "final_hidden"):
        broken = record.feature_mask & ~rows[name].isfinite().all(-1)
        if broken.any():
            raise ValueError(f"{name} of rollout {index} is not finite at position {int(broken.nonzero()[0])}")
    return record
