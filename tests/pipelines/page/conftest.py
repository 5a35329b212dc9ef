"""Folders of runs and studies as `cotrain train` and `cotrain ablate` leave them, with metrics given by hand."""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from cotrain.config.load import write_config
from cotrain.config.schema import RunConfig
from pipelines.page.page import Section

Row = dict[str, Any]


def row(step: int, **changes: Any) -> Row:
    """A step of a run whose drafter is published in every step; `__` in a name stands for `/`."""
    full = {
        "step": step,
        "policy/reward": 0.1 * step,
        "rollout/response_length": 20.0,
        "rollout/generated_tokens": 1000,
        "rollout/tokens_per_s": 50.0,
        "rollout/speedup_vs_no_speculation": 0.9 + 0.01 * step,
        "rollout/acceptance_length": 1.0 + 0.1 * step,
        "rollout/acceptance_rate_pos_1": 0.08 * step,
        "rollout/acceptance_rate_pos_2": 0.02 * step,
        "rollout/expected_acceptance_length": 1.0 + 0.1 * step,
        "drafter/loss": 5.0 / step,
        "drafter/lag_versions": 0.5,
        "drafter/published": 1.0,
        "versions/policy": step - 1,
        "versions/drafter": step - 1,
        "time/generate_s": 20.0,
        "time/learn_s": 9.0,
        "time/step_s": 30.0,
    }
    return full | {name.replace("__", "/"): value for name, value in changes.items()}


def write_run(folder: Path, rows: Sequence[Row], **changes: Any) -> Path:
    """`changes`: top-level fields of its configuration."""
    fields: dict[str, Any] = {
        "name": folder.name,
        "steps": max(len(rows), 1),
        "policy": {"model": "tiny:llama"},
        "rollout": {"num_speculative_tokens": 2},
        "drafter": {"model": {"type": "eagle3"}},
        "task": {"type": "reasoning_gym", "name": "chain_sum"},
    }
    folder.mkdir(parents=True)
    write_config(RunConfig(**fields | changes), folder / "config.json")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in rows))
    return folder


def arm(name: str, **config: Any) -> dict[str, Any]:
    """An arm of study.json whose seeds 0 and 1 are finished. `config`: top-level fields of its configuration."""
    runs = [{"seed": seed, "folder": f"runs/{name}-s{seed}", "status": "finished", "error": None} for seed in (0, 1)]
    return {"name": name, "config": config, "runs": runs}


def write_study(folder: Path, arms: Sequence[dict[str, Any]], lengths: dict[str, Sequence[float]]) -> Path:
    """Six steps; `lengths`: acceptance length of each seed over the last third (1.0 before it), by arm.

    An arm without speculation generates 40 tokens/s, the others 40 times their acceptance length.
    """
    folder.mkdir(parents=True, exist_ok=True)
    told = [{"name": one["name"], "runs": one["runs"]} for one in arms]
    content = {"name": folder.name, "steps": 6, "seeds": [0, 1], "arms": told}
    (folder / "study.json").write_text(json.dumps(content))
    for one in arms:
        for run, length in zip(one["runs"], lengths.get(one["name"], [1.0, 1.0]), strict=True):
            if run["status"] != "finished":
                continue
            served, drafts = [1.0] * 4 + [length] * 2, one["config"].get("drafter", True)
            rows = [
                row(i, rollout__acceptance_length=value if drafts else None, rollout__tokens_per_s=40 * value)
                for i, value in enumerate(served, start=1)
            ]
            write_run(folder / run["folder"], rows, seed=run["seed"], **one["config"])
    return folder


def words(sections: Iterable[Section]) -> str:
    """All text of a page."""
    found = []
    for section in sections:
        found += [section.title, section.text, section.numbers]
        if section.table is not None:
            found += [str(cell) for row in section.table.itertuples(index=False) for cell in row]
    return "\n".join(found)


def images(page: Path) -> dict[str, str]:
    """Numbers in short of each figure of a report, by the name of its file."""
    return {name: numbers for numbers, name in re.findall(r"!\[([^]]*)\]\((.*)\)", page.read_text())}
