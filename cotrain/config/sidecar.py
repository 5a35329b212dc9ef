"""SidecarConfig: what a user sets of a drafter that is trained beside engines of somebody else. Imports no torch."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cotrain.config.load import load, merge
from cotrain.config.rules import depth_problems
from cotrain.config.schema import (
    NAME,
    CheckpointConfig,
    DrafterBufferConfig,
    DrafterConfig,
    FeatureTapConfig,
    TrackingConfig,
)
from drafters.config import Section


class SidecarBufferConfig(DrafterBufferConfig):
    """Bound of the drafter trainer's feature buffer."""

    max_age: NonNegativeInt = 0
    """Oldest policy version trained on, counted back from the newest in the buffer (0: only the newest). A host may load
    weights that are far from those before, whose text then teaches the drafter what is wrong now."""


class SidecarDrafterConfig(DrafterConfig):
    """The drafter and how it is trained."""

    buffer: SidecarBufferConfig = SidecarBufferConfig()


class SidecarConfig(Section):
    """A drafter that is trained beside a host's engines. Its steps are rounds of drafter.batch_tokens tokens or more."""

    name: Annotated[str, Field(pattern=NAME, json_schema_extra={"default": "sidecar-TIME"})] = Field(
        default_factory=lambda: time.strftime("sidecar-%Y%m%d-%H%M%S")
    )
    """Name of the sidecar: its folder below run_root and its MLflow run. Letters, digits, '.', '_' and '-'."""
    model: Annotated[str, Field(min_length=1)]
    """The host's policy: local folder or hub id, as the host names it."""
    drafter: SidecarDrafterConfig
    """The drafter, eagle3 where no type is given. An alarm switches speculation and training off, and never ends a host, whatever on_drafter_failure says."""
    num_speculative_tokens: PositiveInt = 3
    """Draft tokens per verification step (k)."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """How the drafter proposes: its most likely token, or a sample from its distribution."""
    adaptive: bool = True
    """Choose the draft length by speeds measured on the host's own traffic, 0 included. False always drafts the most."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the host's requests whose text and hidden states the trainer gets. It keeps them in memory only."""
    replicas: bool = False
    """Let several hosts join, which all serve the same policy and get the same drafter."""
    features: FeatureTapConfig = FeatureTapConfig()
    spool: Path | None = None
    """Folder through which engines and trainer exchange files. Default: cotrain-NAME in /dev/shm, which is memory."""
    run_root: Path = Path("runs")
    """Folder of all runs."""
    seed: NonNegativeInt = 0
    """Seed of everything random."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where the drafter is trained. The host's engines have the GPUs unless one is spare."""
    tracking: TrackingConfig = TrackingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="before")
    @classmethod
    def _with_type(cls, fields: Any) -> Any:
        return merge({"drafter": {"model": {"type": "eagle3"}}}, fields)  # another type replaces the section

    @property
    def spool_folder(self) -> Path:
        """Where the spool is."""
        return (self.spool or Path("/dev/shm") / f"cotrain-{self.name}").absolute()

    @property
    def sampling(self) -> str:
        """How the host's requests are sampled, in words."""
        return f"as each request asks, {self.draft_sample_method} drafts"


def broken_rules(config: SidecarConfig) -> list[str]:
    """Rules between its fields, each broken one with the field and the fix."""
    problems = [*depth_problems("num_speculative_tokens", config.num_speculative_tokens, config.drafter)]
    if (schedule := config.drafter.optimizer.schedule) != "constant":
        end = "needs an end, and a sidecar runs as long as its host"
        problems.append(f'drafter.optimizer.schedule: "{schedule}" {end}; set "constant"')
    return problems


def load_sidecar(
    files: Sequence[str | Path], overrides: Sequence[str] = (), resume: str | None = None
) -> SidecarConfig:
    """As `load_config` for a run. Raises ConfigError listing all problems."""
    return load(SidecarConfig, broken_rules, files, overrides, resume)
