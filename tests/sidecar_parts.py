"""What tests of the sidecar share: a trainer's spool without its trainer, and the environment of a host's processes."""

import os
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch

from cotrain.process import threads
from cotrain.transport.spool import VARIABLE, Settings, Spool
from drafters.base import Drafter

ROOT = Path(__file__).parent.parent
METADATA = "Metadata-Version: 2.1\nName: cotrain-plugin\nVersion: 0\n"


def plugin_path(folder: Path) -> str:
    """PYTHONPATH with which vLLM finds this checkout's plugin; where that is not installed, `folder` will hold its entry."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if not any(entry.name == "cotrain" for entry in entry_points(group="vllm.general_plugins")):
        info = folder / "cotrain_plugin-0.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text(METADATA)
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\ncotrain = cotrain.engine.host.plugin:register\n"
        )
        paths.insert(0, str(folder))
    return os.pathsep.join(paths)


def host_environment(folder: Path, spool: Spool | None, num_threads: int = 1) -> dict[str, str]:
    """Environment of a host's process; plugin_path says what `folder` is for. Without a spool it has no sidecar."""
    environment = os.environ | threads.engine_environment(num_threads) | {"PYTHONPATH": plugin_path(folder)}
    environment.pop(VARIABLE, None)
    return environment if spool is None else environment | {VARIABLE: str(spool.folder)}


def make_spool(folder: Path, model: Path, drafter: Drafter, **changes: Any) -> Spool:
    """A spool as the trainer makes it, which lives as long as the object that is returned. changes: to its Settings."""
    spool = Spool(folder)
    spool.hold()
    drafter.save(spool.initial, torch.float32)
    speculation = {"method": drafter.serving.method, "model": str(spool.initial), "num_speculative_tokens": 3}
    settings = Settings(
        model="tiny:llama", model_path=str(model), aux_layers=drafter.serving.aux_layers, share=1.0, max_bytes=2**28,
        speculative_config=speculation | {"draft_sample_method": "probabilistic"}, adaptive=False,
    )  # fmt: skip
    spool.create(replace(settings, **changes))
    return spool
