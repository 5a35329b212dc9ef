"""What an engine is started with."""

from dataclasses import dataclass, field
from typing import Literal

from cotrain.config.schema import RolloutConfig
from cotrain.records import Versions
from drafters.base import ServingSpec


@dataclass(frozen=True)
class EngineSpec:
    """What an engine is started with."""

    rollout: RolloutConfig
    model_path: str
    drafter_folder: str | None
    """Checkpoint folder of the first serving drafter; None runs without a drafter."""
    serving: ServingSpec | None
    """How that drafter is served; None without one."""
    seed: int
    scratch: str
    """Folder in shared memory for features and weights of this engine."""
    versions: Versions = field(default_factory=lambda: Versions(0, 0))
    speculation: Literal["drafter", "ngram"] = "drafter"
    """What proposes draft tokens: the drafter, if there is one, or a look-up of n-grams in the request's own text."""
