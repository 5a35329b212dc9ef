"""Embedding and head of the target, by policy version: what a drafter borrows and never owns."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cotrain.models.loading import weight_files
from drafters.base import TargetSpec, TargetWeights
from drafters.files import read_config

EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def read_target_weights(
    path: str | Path, policy_version: int, target: TargetSpec, device: str | torch.device
) -> TargetWeights:
    """The two matrices out of a safetensors file in Hugging Face names, or a model folder; nothing else is read.

    Without an lm_head the target is tied and its head is the embedding. They are copies: the file may be overwritten.
    Raises ValueError when a file is unreadable, there is no embedding, or it is of another target.
    """
    path = Path(path)
    found: dict[str, list[str]] = {EMBEDDING: [], HEAD: []}
    matrices: dict[str, Tensor] = {}
    try:
        for part in weight_files(path) if path.is_dir() else [path]:
            with safe_open(part, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    for suffix in filter(name.endswith, found):
                        found[suffix].append(name)
                        matrices[suffix] = file.get_tensor(name).to(device, copy=True)
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"target weights {path} cannot be read: {error}") from error
    if len(found[EMBEDDING]) != 1 or len(found[HEAD]) > 1:
        raise ValueError(f"{path} has {found[EMBEDDING]} and {found[HEAD]}; expected one embedding, at most one head")
    if path.is_dir() and read_config(path).get("tie_word_embeddings"):
        matrices.pop(HEAD, None)  # a leftover copy, which no engine loads
    for suffix, matrix in matrices.items():
        if tuple(matrix.shape) != (target.vocab_size, target.hidden_size):
            raise ValueError(
                f"{found[suffix][0]} in {path} is {tuple(matrix.shape)}, the target's is "
                f"{(target.vocab_size, target.hidden_size)}"
            )
    return TargetWeights(matrices[EMBEDDING], matrices.get(HEAD, matrices[EMBEDDING]), policy_version)
