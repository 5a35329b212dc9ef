"""A producer and what is around it, simulated."""

from collections import deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cotrain.loop.producer import Producer, Prompts
from cotrain.loop.reactor import Reactor
from cotrain.loop.roles import Roles
from cotrain.process.failures import RunFailure
from cotrain.records import Prompt, Rollout, RolloutBatch, RolloutRequest, Versions, Window
from cotrain.run.checkpoint import RunState
from cotrain.run.rows import RowFile, read_rows
from cotrain.tasks.prompts import PromptOrder
from tests.cotrain.loop.simulated_ray import Cluster, Reference

P, SAMPLES, NUM_PROMPTS = 4, 2, 40


class Engines:
    def __init__(self, reactor: Reactor) -> None:
        self.reactor = reactor
        self.calls: list[tuple[int, list[str]]] = []
        self.seeds: dict[str, list[int | None]] = {}
        self.in_dispatch, self.tools = [0], None
        self.shared: list[tuple[int, int]] = []

    def share_history(self, engine: int, generated: Reference) -> None:
        assert generated.engine == engine
        self.shared.append((engine, len(generated.what[1])))

    def begin_generate(
        self, engine: int, requests: list[RolloutRequest], tap: float, together: tuple[int, int], answer: Any
    ) -> Reference:
        """Groups that enter together are one call in `calls`."""
        if not together[0]:
            self.calls.append((engine, []))
        self.calls[-1][1].append(requests[0].prompt_id)
        assert len(self.calls[-1][1]) == together[0] + 1 <= together[1]
        for request in requests:
            self.seeds.setdefault(request.prompt_id, []).append(request.seed)
        reference = Reference(("generate", requests))
        reference.engine = engine
        return reference

    def lose(self, engine: int, failure: RunFailure) -> None:
        if engine in self.in_dispatch:
            self.in_dispatch.remove(engine)
            self.reactor.add(Reference(("start", engine)), lambda _: self.in_dispatch.append(engine))

    def call_all(self, method: Any) -> dict[int, Window]:
        return {}


class Rewards:
    def __init__(self) -> None:
        self.restarts, self.begun = 0, deque[Reference]()
        self.starting = Reference(("scorer starts", None))

    def begin(self, prompt: Prompt, responses: list[str]) -> Reference:
        self.begun.append(Reference(("score", responses)))
        return self.begun[-1]

    def restart(self) -> Reference:
        self.restarts += 1
        return Reference(("scorer starts", None))


class Stream:
    """A producer and what is around it. `answer` decides which of the calls under way get their result."""

    def __init__(self, run_config: Any, folder: Path, served: int = 0, saved: Any = None, **fields: Any):
        scorers = [Rewards() for _ in range(fields.pop("scorers", 1))]
        stream = {"max_policy_lag": fields.pop("lag", 0), "reward_timeout_s": fields.pop("timeout", 60)}
        rollout = {"prompts_per_step": P, "samples_per_prompt": SAMPLES, "vllm": {"max_num_seqs": 4}} | fields
        self.config = run_config(steps=8, rollout=rollout, stream=stream)
        task = [Prompt(f"p{index}", [], None) for index in range(NUM_PROMPTS)]
        prompts = Prompts(
            task, PromptOrder(NUM_PROMPTS, P, 0), SimpleNamespace(apply_chat_template=lambda *_, **__: [1, 2])
        )  # type: ignore[arg-type]
        self.cluster, self.rewards = Cluster(), scorers[0] if scorers else None
        self.reactor = Reactor(self.cluster, 5.0)  # type: ignore[arg-type]
        self.engines = Engines(self.reactor)
        self.events = RowFile(folder / "stream.jsonl")
        self.roles: Any = Roles(self.engines, scorers, None, None, None, self.reactor, None, None)  # type: ignore[arg-type]
        start = RunState(served, Versions(served, 0), {}, {}, stream=saved)
        self.producer = Producer(self.config, self.roles, prompts, self.events, start)
        self.prompts = prompts
        self.engines.in_dispatch = list(range(self.config.rollout.num_engines))
        self.cluster.happens = self._answer_all

    def _answer_all(self, references: list[Reference]) -> None:
        for reference in references:
            self.answer(reference)

    def answer(self, reference: Reference) -> None:
        kind, given = reference.what
        if kind in ("start", "scorer starts"):
            reference.result = "started"
            return
        reference.result = batch_of(given) if kind == "generate" else [float(len(text)) for text in given]

    def begun(self) -> list[tuple[int, Reference]]:
        """The groups that scorers work on, by number, with the references of their rewards."""
        scorers = self.producer._scoring._scorers
        return [(scorer.group.number, scorer.reference) for scorer in scorers if scorer.group is not None]

    def step(self) -> list[Any]:
        self.producer.admit(False)
        return self.reactor.until(self.producer.take)

    def kinds(self, group: int) -> list[str]:
        return [row["event"] for row in read_rows(self.events.path) if row.get("group") == group]


def batch_of(requests: list[RolloutRequest]) -> RolloutBatch:
    rollouts = [
        Rollout(r.prompt_id, r.sample_index, r.prompt_token_ids, [5] * 3, [-1.0] * 3, "x" * (r.sample_index + 1), "stop",
                Versions(0, 0))
        for r in requests
    ]  # fmt: skip
    return RolloutBatch(rollouts, [request.prompt_id for request in requests[:1]], 1.0, 3 * len(rollouts))
