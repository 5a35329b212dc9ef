"""Embedding and head of the target, by policy version: what a drafter borrows and never owns."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from drafters.base import TargetSpec, TargetWeights
from drafters.files import read_config, weight_files

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def read_target_weights(
    path: str | Path, policy_version: int, target: TargetSpec, device: str | torch.device
) -> TargetWeights:
    """The two matrices out of a safetensors file in Hugging Face names, or a model folder; nothing else is read.

    Without an lm_head the target is tied and its head is the embedding. They are copies: the file may be overwritten.
    Raises ValueError when a file is unreadable, there is no embedding, or it is of another target.
    """
    path = Path(path)
    # The head in the folder of a tied model is a leftover copy, which no engine loads.
    tied = path.is_dir() and read_config(path).get("tie_word_embeddings")
    found: dict[str, Tensor] = {}
    try:
        for part in weight_files(path) if path.is_dir() else [path]:
            with safe_open(part, framework="pt") as file:
                wanted = (name for name in file.keys() if name.endswith(EMBEDDING if tied else (EMBEDDING, HEAD)))  # noqa: SIM118
                found |= {name: file.get_tensor(name).to(device, copy=True) for name in wanted}
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"target weights {path} cannot be read: {error}") from error
    embeddings, heads = ([name for name in found if name.endswith(suffix)] for suffix in (EMBEDDING, HEAD))
    if len(embeddings) != 1 or len(heads) > 1:
        raise ValueError(f"{path} has {embeddings} and {heads}; expected one embedding, at most one head")
    expected = (target.vocab_size, target.hidden_size)
    for name, matrix in found.items():
        if tuple(matrix.shape) != expected:
            raise ValueError(f"{name} in {path} is {tuple(matrix.shape)}, the target's is {expected}")
    return TargetWeights(found[embeddings[0]], found[[*heads, *embeddings][0]], policy_version)
