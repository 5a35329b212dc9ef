"""SidecarConfig: the fields of a sidecar, which trains a drafter beside the engines of another framework. Imports no torch."""

import os
import time
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from cotrain.config.load import load, merge
from cotrain.config.rules import depth_problems
from cotrain.config.schema import (
    AUTO,
    NAME,
    CheckpointConfig,
    DrafterConfig,
    FeatureTapConfig,
    TrackingConfig,
    default_run_root,
)
from drafters.config import Section


class SidecarConfig(Section):
    """A drafter trained beside a host's engines, with the fields and tables of a run that it needs. A step is a training round on
    drafter.batch_tokens new tokens or more."""

    name: Annotated[str, Field(pattern=NAME, json_schema_extra={"default": "sidecar-TIME"})] = Field(
        default_factory=lambda: time.strftime("sidecar-%Y%m%d-%H%M%S")
    )
    """Name of the sidecar: its folder below run_root and its MLflow run. Letters, digits, '.', '_' and '-'."""
    model: Annotated[str, Field(min_length=1)]
    """The host's policy: local folder or hub id, as the host names it."""
    drafter: DrafterConfig
    """The drafter, by default eagle3 and with buffer.max_age = 0: a host may load weights that differ much from the previous ones.
    An alarm stops speculation and training, never a host, whatever on_drafter_failure says."""
    num_speculative_tokens: PositiveInt = 3
    """Draft tokens per verification step (k)."""
    draft_sample_method: Literal["greedy", "probabilistic"] = "probabilistic"
    """How the drafter proposes: its most likely token, or a sample from its distribution."""
    adaptive: bool = True
    """Choose the draft length, 0 included, by speeds measured on the host's own traffic. False: always num_speculative_tokens."""
    share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the host's requests whose text and hidden states the trainer gets. It keeps them in memory only."""
    adapter: str = ""
    """Which requests are trained on where the host's engine serves LoRA adapters: by default those without one; the name of an adapter
    for its requests alone; "*" for all together. The drafter drafts for all requests in any case."""
    features: FeatureTapConfig = FeatureTapConfig()
    spool: Path | None = None
    """Folder through which engines and trainer exchange files. Default: cotrain-NAME in /dev/shm, which is memory."""
    run_root: Path = Field(default_factory=default_run_root, json_schema_extra={"default": "runs"})
    """Folder of all runs. Default: the environment variable COTRAIN_RUN_ROOT, or runs."""
    seed: NonNegativeInt = 0
    """Seed of everything random."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device that trains the drafter. Keep cpu unless a GPU is free besides those of the host's engines."""
    num_threads: Annotated[PositiveInt, Field(json_schema_extra={"default": "half of the cores, at most 8"})] = Field(
        default_factory=lambda: min(8, max(1, len(os.sched_getaffinity(0)) // 2))
    )
    """CPU threads of the trainer, which may share the cores with the host."""
    nice: Annotated[int, Field(ge=0, le=19)] = 19
    """By how much the trainer's priority on the CPU, and its session's, is below that of processes like the host's (0: the same, 19: the most)."""
    tracking: TrackingConfig = TrackingConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    @model_validator(mode="before")
    @classmethod
    def _with_type(cls, fields: Any) -> Any:
        # Another type of model replaces its section.
        return merge({"drafter": {"model": {"type": "eagle3"}, "buffer": {"max_age": 0}}}, fields)

    @property
    def spool_folder(self) -> Path:
        """Absolute path of the folder through which engines and trainer exchange files."""
        return (self.spool or Path("/dev/shm") / f"cotrain-{self.name}").absolute()

    @property
    def sampling(self) -> str:
        """How the host's requests are sampled, in words."""
        return f"as each request asks, {self.draft_sample_method} drafts"


def broken_rules(config: SidecarConfig) -> list[str]:
    """Check the rules that concern several fields. Returns a line with the field and the fix for each broken rule."""
    depth = config.drafter.model.trained_depth
    problems = depth_problems("num_speculative_tokens", config.num_speculative_tokens, depth)
    if (schedule := config.drafter.optimizer.schedule) != "constant":
        end = "needs an end, and a sidecar runs as long as its host"
        problems.append(f'drafter.optimizer.schedule: "{schedule}" {end}; set "constant"')
    if config.drafter.init == AUTO:
        problems.append('drafter.init: "auto" is for `cotrain train`; name a drafter, see `cotrain drafters list`')
    return problems


load_sidecar = partial(load, SidecarConfig, broken_rules)
