"""Simulated roles of a run, for whole steps of the real controller."""

from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from cotrain.loop.controller import Controller
from cotrain.lossless.emitted import Draws
from cotrain.models.loading import resolve_model
from cotrain.process.calls import Reply
from cotrain.process.failures import TaskFailed
from cotrain.records import (
    GainReport,
    Prompt,
    RolloutBatch,
    RolloutRequest,
    StepTotal,
    SwapReport,
    Versions,
    WeightPayload,
    Window,
)
from cotrain.run.rows import read_rows
from cotrain.transport.nodes import Coming
from tests.cotrain.publish.simulated_run import PROMPTS, SAMPLES, World


class Engines:
    """The engines of a World, as the controller calls them."""

    def __init__(self, world: World):
        self.world = world
        self.gains: list[GainReport | None] = [None]
        self.seeds: list[int | None] = []
        self.in_dispatch, self.tools = [0], None

    def share_history(self, engine: int, generated: Any) -> None:
        pass

    def begin_generate(
        self, engine: int, requests: list[RolloutRequest], tap: float, together: tuple[int, int], answer: Any
    ) -> RolloutBatch:
        """The first group has what its engine tells of the whole step."""
        place, number = together
        assert (len(requests), number) == (SAMPLES, PROMPTS)
        self.tapped = tap
        self.seeds += [request.seed for request in requests]
        if not place:
            self.batch = self.world.generate(self.world.step + 1)
        own = self.batch.rollouts[place * SAMPLES : (place + 1) * SAMPLES]
        return replace(self.batch, rollouts=own) if not place else RolloutBatch(own, [], 0.0, 0)

    def generate(self, requests: list[RolloutRequest], **sampling: Any) -> list[SimpleNamespace]:
        """As many tokens as the request has a number, of which every third response is cut off."""
        earlier = getattr(self, "validated", [])
        self.validated = [*earlier, (self.world.current.versions.policy, len(requests), sampling)]
        lengths = [3 * int(request.prompt_id.split("-")[-1] or 0) + request.sample_index for request in requests]
        return [
            SimpleNamespace(text=str(n), num_generated=n, finish_reason="stop" if n % 3 else "length") for n in lengths
        ]

    def call_all(self, method: Any) -> dict[int, Window]:
        return {i: Window(gain, [StepTotal(3, 8, "steady", 10, 160, 0.5)]) for i, gain in enumerate(self.gains)}

    def begin_check_policy(self, payload: WeightPayload, node: str) -> None: ...

    def update_policy(self, payload: WeightPayload, version: int) -> SwapReport:
        self.world.current.record_policy(payload, version)
        return SwapReport(0.2, 10)


class Rewards:
    """Every response is worth nothing; what `failing` names is a failure."""

    starting = None

    def __init__(self) -> None:
        self.failing: set[str] = set()

    def begin(self, prompt: Prompt, responses: list[str]) -> list[float] | TaskFailed:
        return TaskFailed("task.reward raised KeyError") if prompt.id in self.failing else [0.0] * len(responses)


class Reactor:
    """What is waited for is there already."""

    def __init__(self) -> None:
        self.pending: deque[tuple[Any, Any]] = deque()

    def add(self, reference: Any, handler: Any, failed: Any = None) -> None:
        self.pending.append((reference, handler))

    def until(self, done: Any) -> Any:
        while not (returned := done()):
            result, handler = self.pending.popleft()
            handler(result)
        return returned

    def wait(self, references: Any) -> None: ...

    def is_there(self, reference: Any) -> bool:
        return True

    def watch(self, tick: Any, describe: Any) -> None: ...


class Learner:
    """A call that has begun holds its result."""

    last_call, node = (0.0, 1.0), "here"
    unsaveable = ""

    def finish(self, begun: Any) -> Any:
        return begun

    def begin(self, method: Any, *args: Any) -> Any:
        return getattr(self, method.__name__)(*args)

    call = begin

    def save(self, folder: Path, weights: bool = True) -> list[Any]:
        folder.mkdir()
        if self.unsaveable:
            raise ValueError(self.unsaveable)
        return []


class Policy(Learner):
    """Updates are counted; its laws are those of the rollouts, or not."""

    log_prob_gap, biased = 0.001, False

    def begin_update(self, rollouts: list[Any]) -> dict[str, float]:
        return {"policy/rollout_log_prob_gap": self.log_prob_gap}

    def write_payload(self, path: Path) -> WeightPayload:
        return WeightPayload(str(path), 10, {})

    def of_rank_0(self, begun: Any) -> Any:
        return self.finish(begun)

    def hidden_states(self, token_ids: list[int], layers: tuple[int, ...]) -> Any:
        raise AssertionError("the checks that ask for them are replaced")

    def response_draws(self, rollouts: list[Any], sampling: Any, logit_tolerance: float) -> list[Draws]:
        """All tokens certain, as they should be, or impossible."""
        draws = []
        for rollout in rollouts:
            n = len(rollout.token_ids)
            ones, zeros = np.ones(n), np.zeros(n)
            wrong = np.full(n, self.biased)
            draws.append(Draws(ones, zeros, zeros[:, None], wrong, wrong))
        return draws


class Drafter(Learner):
    """Trains the drafter of a World."""

    def __init__(self, world: World):
        self.world = world

    def train(self, step: int, num_updates: int) -> list[Reply[Any]]:
        return [Reply((self.world.train(step, num_updates), 0.0, 1.0))]

    def set_target_weights(self, path: str, version: int) -> list[Any]:
        return []

    def save_checkpoint(self, folder: Path, version: int) -> None:
        folder.mkdir(parents=True)

    def drop_earlier_versions(self) -> list[Any]:
        return []

    def start_with_best(self, folders: list[str]) -> tuple[dict[str, float], dict[str, str]]:
        """The first is good, the others cannot be loaded."""
        self.world.calls.append("start_with_best")
        return {"": 1.02, folders[0]: 2.5}, dict.fromkeys(folders[1:], "it has no config.json")


class Nodes:
    """One node."""

    local = "here"

    def __init__(self, scratch: Path):
        self.scratch = {"here": scratch}
        self.model_path = resolve_model("tiny:llama")

    def bring(self, path: str, node: str, move: bool = False) -> str:
        return path

    def begin_bring(self, path: str, node: str, move: bool = False) -> Coming:
        return Coming(path, None)

    def arrived(self, coming: Coming) -> str:
        return coming.path

    def remove_all(self, paths: Iterable[str]) -> None: ...


class Tracker:
    """Notes what it is told."""

    behind = ""

    def __init__(self) -> None:
        self.drafters: list[tuple[int, dict[str, float], dict[str, str]]] = []

    def log_step(self, step: int, row: dict[str, float]) -> None: ...
    def log_drafter(self, folder: Path, versions: Versions, step: int, metrics: Any, tags: Any) -> None:
        self.drafters.append((versions.drafter, metrics, tags))


TOKENIZER = SimpleNamespace(
    eos_token_id=None, decode=lambda token_ids: "", apply_chat_template=lambda *_, **options: [1, 2]
)


def go(controller: Controller, until: int) -> list[dict[str, Any]]:
    """Steps up to `until`; the rows without what a clock decides."""
    controller.run(lambda: controller.step >= until)
    rows = read_rows(controller.run_dir.metrics)
    return [{k: v for k, v in row.items() if not k.startswith(("time/", "idle/"))} for row in rows]


def output(controller: Controller) -> str:
    return controller.records.console._rich.file.getvalue()  # type: ignore[attr-defined]
