"""A controller whose roles are simulated."""

import io
from pathlib import Path
from typing import Any

import pytest

from cotrain.loop.controller import Controller, Records
from cotrain.loop.producer import Prompts
from cotrain.loop.roles import Roles
from cotrain.loop.validation import Validation
from cotrain.publish.publisher import Publisher, PublisherSpec
from cotrain.records import (
    Prompt,
    Versions,
)
from cotrain.run.checkpoint import RunState, latest_checkpoint, load_state
from cotrain.run.console import Console
from cotrain.run.rows import RowFile
from cotrain.run.run_dir import RunDir
from cotrain.tasks.held_out import HeldOut
from cotrain.tasks.prompts import PromptOrder
from cotrain.weights.versions import CurrentWeights
from tests.cotrain import simulated_roles
from tests.cotrain.publish.simulated_run import PROMPTS, SAMPLES, World
from tests.cotrain.simulated_roles import TOKENIZER, Drafter, Nodes, Policy, Reactor, Rewards, Tracker


@pytest.fixture
def start(run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A controller in a run folder of its own; a second one of the same name resumes it."""
    monkeypatch.setattr("cotrain.loop.checks.check_features", lambda *_: 0.0)
    monkeypatch.setattr("cotrain.loop.checks.check_records", lambda *_: None)
    opened: list[Any] = []

    def build(
        world: World,
        name: str = "first",
        drafter: Any = None,
        method: str = "probabilistic",
        state: RunState | None = None,
        **fields: Any,
    ) -> Controller:
        fields = {"steps": 100, "lossless": {"every": 0}, "checkpoint": {"every": 3}} | fields
        config = run_config(
            name=name,
            rollout={
                "prompts_per_step": PROMPTS,
                "samples_per_prompt": SAMPLES,
                "draft_sample_method": method,
            },
            drafter={"model": {"type": "eagle3"}, "updates_per_step": 1, "train_when": "always"} | (drafter or {}),
            **fields,
        )
        resumes = (config.run_root / name).exists()
        run_dir = RunDir(config.run_root, name, resumes)
        checkpoint = latest_checkpoint(run_dir)
        state = load_state(checkpoint) if checkpoint else state
        order = PromptOrder(PROMPTS, PROMPTS, 0)
        state = state or RunState(0, Versions(0, 0), {}, {})
        task = [Prompt(str(i), [], None) for i in range(PROMPTS)]
        current = world.current = CurrentWeights(state.versions, config.stream.max_policy_lag)
        publisher = Publisher(PublisherSpec(config.drafter, config.steps), world, world, tmp_path, current)
        learners: Any = (Policy(), Drafter(world), publisher)
        roles: Any = Roles(simulated_roles.Engines(world), [Rewards()], *learners, Reactor(), Nodes(tmp_path), current)  # type: ignore[arg-type]
        paths = (run_dir.metrics, run_dir.decisions, run_dir.stream, run_dir.steps)
        if config.validation is not None:
            roles.validation = Validation(config, HeldOut(config, TOKENIZER), Rewards(), roles.reactor)  # type: ignore[arg-type]
        files = [RowFile(path, state.step) for path in paths]
        prompts: Any = Prompts(task, order, TOKENIZER)  # type: ignore[arg-type]
        records: Any = Records(*files, Tracker(), Console(io.StringIO()))  # type: ignore[arg-type]
        opened.append(run_dir)
        return Controller(config, run_dir, roles, prompts, records, state)

    yield build
    for one in opened:
        one.close()
