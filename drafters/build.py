"""Build a drafter from a configuration, or load it from a checkpoint folder."""

from pathlib import Path

import torch

from drafters.base import Drafter, TargetSpec
from drafters.block.dspark import DSparkDrafter
from drafters.block.model import DFlashDrafter
from drafters.config import DrafterModelConfig
from drafters.draft_model.model import FAMILIES, DraftModel
from drafters.eagle3.model import Eagle3Drafter
from drafters.files import read_config
from drafters.mtp.formats import FORMATS
from drafters.mtp.model import MtpDrafter
from drafters.mtp.native import has_native_head as has_native_head
from drafters.mtp.native import split as split
from drafters.mtp.native import stitched as stitched

DRAFTERS: dict[str, type[Drafter]] = {
    "eagle3": Eagle3Drafter,
    "dflash": DFlashDrafter,
    "dspark": DSparkDrafter,
    "mtp": MtpDrafter,
    "draft_model": DraftModel,
}

ARCHITECTURES = {
    "LlamaForCausalLMEagle3": "eagle3",
    "DFlashDraftModel": "dflash",
    **dict.fromkeys(("Qwen3DSparkModel", "DSparkDraftModel"), "dspark"),
    **{known.architecture: "mtp" for known in FORMATS.values()},
    **dict.fromkeys(FAMILIES.values(), "draft_model"),
}
"""Type of the drafter in a checkpoint, by the architecture in its config.json."""


def build_drafter(config: DrafterModelConfig, target: TargetSpec, seed: int) -> Drafter:
    """Build a drafter in float32 with random weights that depend only on the seed. Call `start_from` next.

    Raises ValueError when it cannot fit the target.
    """
    kind = DRAFTERS[config.type]
    # On the meta device, torch's own initialisation neither costs time nor advances the global random state.
    with torch.device("meta"):
        drafter = kind(kind.shape_of(config, target))
    empty = {name: torch.empty_like(tensor, device="cpu") for name, tensor in drafter.state_dict().items()}
    drafter.load_state_dict(empty, assign=True)
    drafter.initialise(torch.Generator().manual_seed(seed))
    return drafter


def shape_problems(config: DrafterModelConfig, target: TargetSpec) -> list[str]:
    """List the reasons why a drafter of this configuration does not fit the target; empty when it does."""
    try:
        DRAFTERS[config.type].shape_of(config, target)
    except ValueError as error:
        return [str(error)]
    return []


def kind_of(folder: str | Path) -> str:
    """Return the type of the drafter in a checkpoint folder. Raises ValueError when it is of no known type."""
    architectures = read_config(folder).get("architectures") or [None]
    if architectures[0] not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"{folder} holds {architectures[0]}, not a drafter that can be trained ({known})")
    return ARCHITECTURES[architectures[0]]


def load_drafter(
    folder: str | Path,
    target: TargetSpec,
    num_positions: int | None = None,
    config: DrafterModelConfig | None = None,
    depth_if_unstated: int | None = None,
) -> Drafter:
    """Read the drafter of a checkpoint folder, in float32.

    num_positions: positions that the engine needs (longest prompt and response, and the draft after them), or None if the drafter
    will not be served. config: the wanted type and settings, or None to accept any. depth_if_unstated: trained depth where
    neither the checkpoint nor config says it. Raises ValueError when the folder holds no known drafter, one of another type or
    with other settings, one made for another target or for fewer positions, or tensors that are broken or too large to serve.
    """
    kind = kind_of(folder)
    if config is not None and config.type != kind:
        raise ValueError(
            f'{folder} is a drafter of type "{kind}", but drafter.model.type is "{config.type}"; '
            "take over its type, or choose another drafter.init"
        )
    shape, tensors = DRAFTERS[kind].read(folder, target, config.trained_depth if config else depth_if_unstated)
    with torch.device("meta"):
        drafter = DRAFTERS[kind](shape)
    drafter.load_tensors(tensors, folder, assign=True)
    drafter = drafter.float()
    if problems := drafter.overflowing():
        raise ValueError(f"{folder} has weights that no engine can serve: {'; '.join(problems)}")
    positions = shape.sizes.max_position_embeddings
    if num_positions is not None and positions < num_positions:
        raise ValueError(
            f"{folder} has {positions} positions (max_position_embeddings), but {num_positions} are needed "
            "for the longest prompt, its response and the draft after it: beyond its limit an engine stops drafting "
            "for the whole batch. Lower rollout.max_prompt_tokens or rollout.max_new_tokens; or, if it was trained on "
            "such lengths, raise max_position_embeddings in its config.json"
        )
    # The shape of a loaded drafter is that of its checkpoint; a configuration that says otherwise is refused.
    wanted = {} if config is None else config.model_dump(exclude={"type"}, exclude_none=True)
    has = vars(shape.sizes) | vars(shape)
    differing = {name: value for name, value in wanted.items() if value != has[name]}
    if wrong := [
        f"drafter.model.{name} is {value}, the checkpoint has {has[name]}" for name, value in differing.items()
    ]:
        raise ValueError(f"drafter.init {folder} was made with other settings; take them over: " + "; ".join(wrong))
    return drafter
