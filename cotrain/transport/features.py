"""Feature shards: one safetensors file with the hidden states of several rollouts, from the engine to the trainer.

Written inside the vLLM worker, so only torch, safetensors and plain data are imported. Rollouts lie one after the
other; `offsets` says where each begins. Row t belongs to token t; `feature_mask` is False where the engine has no
hidden state: holes, and always the last token of a rollout, which was sampled but never fed back.

N packed tokens, R rollouts, A aux layers, H hidden size:

    token_ids [N] int64        aux_hidden [N, A*H], final_hidden [N, H] in the engine's dtype
    feature_mask [N] bool      offsets [R+1] int64, prompt_lengths [R] int64
"""

import hashlib
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafters.base import Sampler

FORMAT = "1"
TENSORS = {
    "token_ids": torch.int64,
    "aux_hidden": None,
    "final_hidden": None,
    "feature_mask": torch.bool,
    "offsets": torch.int64,
    "prompt_lengths": torch.int64,
}
"""Name -> dtype; None is any floating-point dtype."""


@dataclass(frozen=True, eq=False)
class FeatureRecord:
    """Features of one rollout of T tokens."""

    token_ids: Tensor  # [T] int64, prompt and response
    aux_hidden: Tensor  # [T, A*H], layers ascending
    final_hidden: Tensor  # [T, H], after the target's final norm
    feature_mask: Tensor  # [T] bool
    prompt_length: int
    policy_version: int
    sampler: Sampler
    aux_layers: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in (self.token_ids, self.aux_hidden, self.final_hidden, self.feature_mask))

    @property
    def is_trainable(self) -> bool:
        """Can at least one draft token be compared with the target?

        Row t is a start when it and row t+1 have features and token t+2 was generated (see drafters/alignment.py).
        """
        starts = self.feature_mask[:-2] & self.feature_mask[1:-1]
        return bool(starts[max(self.prompt_length - 2, 0) :].any())

    @cached_property
    def prompt_key(self) -> str:
        """Digest of the prompt's tokens: the same for all samples of a prompt."""
        prompt = self.token_ids[: self.prompt_length].numpy().tobytes()
        return hashlib.blake2b(prompt, digest_size=8).hexdigest()


def write_shard(
    path: str | Path,
    *,
    token_ids: Tensor,
    aux_hidden: Tensor,
    final_hidden: Tensor,
    feature_mask: Tensor,
    offsets: Tensor,
    prompt_lengths: Tensor,
    metadata: dict[str, str],
) -> None:
    """Write one shard; it appears under its name only when complete.

    metadata: policy_version, temperature, top_p, top_k, draft_sample_method, aux_layers (comma separated) and
    final_norm_applied ("true"). Raises OSError when there is no room.
    """
    tensors = {
        "token_ids": token_ids,
        "aux_hidden": aux_hidden,
        "final_hidden": final_hidden,
        "feature_mask": feature_mask,
        "offsets": offsets,
        "prompt_lengths": prompt_lengths,
    }
    path = Path(path)
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(
            {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()},
            partial,
            metadata={**metadata, "format": FORMAT},
        )
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def write_records(path: str | Path, records: list[FeatureRecord]) -> None:
    """Write rollouts of one policy version, sampler and set of aux layers as one shard."""
    first = records[0]
    lengths = torch.tensor([0, *(record.num_tokens for record in records)])
    write_shard(
        path,
        token_ids=torch.cat([record.token_ids for record in records]),
        aux_hidden=torch.cat([record.aux_hidden for record in records]),
        final_hidden=torch.cat([record.final_hidden for record in records]),
        feature_mask=torch.cat([record.feature_mask for record in records]),
        offsets=lengths.cumsum(0),
        prompt_lengths=torch.tensor([record.prompt_length for record in records]),
        metadata={
            "policy_version": str(first.policy_version),
            "temperature": repr(first.sampler.temperature),
            "top_p": repr(first.sampler.top_p),
            "top_k": str(first.sampler.top_k),
            "draft_sample_method": first.sampler.draft_sample_method,
            "aux_layers": ",".join(map(str, first.aux_layers)),
            "final_norm_applied": "true",
        },
    )


def read_shard(path: str | Path) -> list[FeatureRecord]:
    """The rollouts of a shard, copied out of the file, which may then be deleted.

    Raises ValueError naming the file and what is wrong with it: missing, truncated, a tensor or metadata that does
    not fit the layout, or a hidden state that is not finite.
    """
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError as error:
        raise ValueError(f"feature shard {path} does not exist") from error
    except SafetensorError as error:
        raise ValueError(f"feature shard {path} is truncated or corrupt: {error}") from error
    try:
        policy_version, sampler, aux_layers = _parse_metadata(metadata)
        _check_tensors(tensors, len(aux_layers))
        bounds = tensors["offsets"].tolist()
        records = [
            FeatureRecord(
                token_ids=tensors["token_ids"][begin:end].clone(),
                aux_hidden=tensors["aux_hidden"][begin:end].clone(),
                final_hidden=tensors["final_hidden"][begin:end].clone(),
                feature_mask=tensors["feature_mask"][begin:end].clone(),
                prompt_length=prompt_length,
                policy_version=policy_version,
                sampler=sampler,
                aux_layers=aux_layers,
            )
            for begin, end, prompt_length in zip(
                bounds[:-1], bounds[1:], tensors["prompt_lengths"].tolist(), strict=True
            )
        ]
        for index, record in enumerate(records):
            _check_record(record, index)
    except ValueError as error:
        raise ValueError(f"feature shard {path}: {error}") from error
    return records


def _parse_metadata(metadata: dict[str, str]) -> tuple[int, Sampler, tuple[int, ...]]:
    def required(name: str) -> str:
        if name not in metadata:
            raise ValueError(f"its metadata has no {name}")
        return metadata[name]

    if required("format") != FORMAT:
        raise ValueError(f"it has format {metadata['format']}, this version reads {FORMAT}")
    if required("final_norm_applied") != "true":
        # The teacher's logits are head @ final_hidden; without the norm they would be wrong with no other sign.
        raise ValueError(f"final_norm_applied is {metadata['final_norm_applied']}, expected true")
    sampler = Sampler(
        temperature=float(required("temperature")),
        top_p=float(required("top_p")),
        top_k=int(required("top_k")),
        draft_sample_method=required("draft_sample_method"),
    )
    aux_layers = tuple(int(layer) for layer in required("aux_layers").split(",") if layer)
    return int(required("policy_version")), sampler, aux_layers


def _check_tensors(tensors: dict[str, Tensor], num_aux_layers: int) -> None:
    if tensors.keys() != TENSORS.keys():
        raise ValueError(f"it holds the tensors {sorted(tensors)}, expected {sorted(TENSORS)}")
    for name, dtype in TENSORS.items():
        found = tensors[name].dtype
        fits = found.is_floating_point if dtype is None else found == dtype
        if not fits:
            raise ValueError(f"{name} is {found}, expected {dtype or 'floating point'}")
        dimensions = 2 if name.endswith("_hidden") else 1
        if tensors[name].dim() != dimensions or not len(tensors[name]):
            raise ValueError(f"{name} is {tuple(tensors[name].shape)}, expected {dimensions} dimensions, not empty")
    offsets, num_tokens = tensors["offsets"], len(tensors["token_ids"])
    if offsets[0] != 0 or offsets[-1] != num_tokens or (offsets.diff() <= 0).any():
        raise ValueError(f"offsets do not split {num_tokens} tokens into rollouts")
    width = tensors["final_hidden"].shape[-1]
    expected = {
        "aux_hidden": (num_tokens, num_aux_layers * width),
        "final_hidden": (num_tokens, width),
        "feature_mask": (num_tokens,),
        "prompt_lengths": (len(offsets) - 1,),
    }
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(f"{name} is {tuple(tensors[name].shape)}, expected {shape}")


def _check_record(record: FeatureRecord, index: int) -> None:
    if not 0 < record.prompt_length <= record.num_tokens:
        raise ValueError(f"rollout {index} has prompt length {record.prompt_length} of {record.num_tokens} tokens")
    if record.feature_mask[-1]:
        raise ValueError(f"rollout {index} claims features for its last token, which was never fed back")
    for name in ("aux_hidden", "final_hidden"):
        broken = record.feature_mask & ~getattr(record, name).isfinite().all(-1)
        if broken.any():
            raise ValueError(f"{name} of rollout {index} is not finite at position {int(broken.nonzero()[0])}")
