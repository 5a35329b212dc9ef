"""From a configuration or a checkpoint folder to a drafter."""

from pathlib import Path

from drafters.base import Drafter, TargetSpec, read_config
from drafters.config import Eagle3Config
from drafters.eagle3.checkpoint import default_aux_layers
from drafters.eagle3.model import Eagle3Drafter

__all__ = ["DRAFTERS", "build_drafter", "default_aux_layers", "load_drafter"]

DRAFTERS: dict[str, type[Eagle3Drafter]] = {
    "eagle3": Eagle3Drafter,
}

ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "eagle3",
}
"""Type of a checkpoint, by the architecture in its config.json."""


def build_drafter(config: Eagle3Config, target: TargetSpec, seed: int) -> Drafter:
    """A new drafter with random weights, the same for the same seed. Raises ValueError when it cannot fit the target."""
    return DRAFTERS[config.type].from_config(config, target, seed)


def load_drafter(folder: str | Path, target: TargetSpec) -> Drafter:
    """The drafter of a checkpoint folder, in float32.

    Raises ValueError when the folder holds no known drafter, one made for another target, or broken tensors.
    """
    architectures = read_config(folder).get("architectures") or [None]
    if architectures[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{folder} holds {architectures[0]}, not a drafter that can be trained ({known})")
    return DRAFTERS[ARCHITECTURES[architectures[0]]].from_checkpoint(folder, target)
