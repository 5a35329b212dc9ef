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


def load_drafter(folder: str | Path, target: TargetSpec, num_positions: int | None = None) -> Drafter:
    """The drafter of a checkpoint folder, in float32.

    num_positions: positions that the engine is started with (longest prompt and response, and the draft after them);
    None when the drafter is not going to be served. Raises ValueError when the folder holds no known drafter, one made
    for another target or for fewer positions, or broken tensors.
    """
    architectures = read_config(folder).get("architectures") or [None]
    if architectures[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{folder} holds {architectures[0]}, not a drafter that can be trained ({known})")
    drafter = DRAFTERS[ARCHITECTURES[architectures[0]]].from_checkpoint(folder, target)
    if num_positions is not None and drafter.max_positions < num_positions:
        raise ValueError(
            f"{folder} has {drafter.max_positions} positions (max_position_embeddings), but {num_positions} are needed "
            "for the longest prompt, its response and the draft after it: beyond its limit an engine stops drafting for "
            "the whole batch. Lower rollout.max_prompt_tokens or rollout.max_new_tokens; or, if it was trained on such "
            "lengths, raise max_position_embeddings in its config.json"
        )
    return drafter
