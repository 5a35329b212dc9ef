"""The target's embedding and head, which a drafter borrows and learns from."""

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
    """Read embedding and head, and nothing else, from a safetensors file in Hugging Face names, or from a model folder.

    Without an lm_head, the target is tied and its head is the embedding. Both are copies: the file may be overwritten.
    Raises ValueError when a file is unreadable, has no embedding, or is of another target.
    """
    path = Path(path)
    # The head in the folder of a tied model is a leftover copy, which no engine loads.
    tied = path.is_dir() and read_config(path).get("tie_word_embeddings")
    suffixes = EMBEDDING if tied else (EMBEDDING, HEAD)
    matrices: dict[str, Tensor] = {}
    try:
        for part in weight_files(path) if path.is_dir() else [path]:
            with safe_open(part, framework="pt") as file:
                wanted = [name for name in file.keys() if name.endswith(suffixes)]  # noqa: SIM118
                matrices |= {name: file.get_tensor(name).to(device, copy=True) for name in wanted}
    except (SafetensorError, FileNotFoundError) as error:
        raise ValueError(f"target weights {path} cannot be read: {error}") from error
    embeddings, heads = ([name for name in matrices if name.endswith(suffix)] for suffix in (EMBEDDING, HEAD))
    if len(embeddings) != 1 or len(heads) > 1:
        raise ValueError(f"{path} has {embeddings} and {heads}; expected one embedding, at most one head")
    expected = (target.vocab_size, target.hidden_size)
    for name, matrix in matrices.items():
        if tuple(matrix.shape) != expected:
            raise ValueError(f"{name} in {path} is {tuple(matrix.shape)}, the target's is {expected}")
    return TargetWeights(matrices[embeddings[0]], matrices[[*heads, *embeddings][0]], policy_version)
