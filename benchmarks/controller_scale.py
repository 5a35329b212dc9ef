"""What does a group cost the controller, however many are in flight? Producer, ledger, reactor and scoring, without Ray.

    python -m benchmarks.controller_scale [--engines 64] [--in-flight 100 1000 10000] [--lags 0 1] [--seed 0]

Engines and the scorer are fakes that answer at once, one call at a time, in random order; their own time is not counted, and
neither is Ray's. Everything else is what a run uses: events are written to a file, prompts are drawn, and steps are taken
in order. A group has 16 responses of 8 tokens, so what tokens cost is not in the first table; the second has the metrics of a
step that are computed over tokens, for 64 responses of 8,192. CPU time is that of this process; wall time includes what else
runs on the machine.
"""

import argparse
import gc
import pickle
import platform
import random
import tempfile
import time
from concurrent.futures import Future
from datetime import date
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cotrain.acceptance_stats import counts_by_depth
from cotrain.config.schema import RunConfig
from cotrain.loop.producer import Producer, Prompts
from cotrain.loop.reactor import Reactor
from cotrain.loop.roles import Roles
from cotrain.process.cluster import Arrival
from cotrain.records import Prompt, Rollout, RolloutBatch, RolloutRequest, Segment, Versions, Window
from cotrain.run.checkpoint import RunState
from cotrain.run.rows import RowFile
from cotrain.run.step_metrics import lag_metrics
from cotrain.tasks.prompts import PromptOrder

SAMPLES, SLOTS, PROMPT_TOKENS, DATASET = 16, 256, 200, 50_000
TOKENS, LOG_PROBS = [5] * 8, [-1.0] * 8

LEAST_GROUPS = 2_000
"""A cell has as many steps as make this many groups, and at least 3, after those that fill the stream."""


class Reference:
    """A call under way: what it generates or scores, as bytes, because Ray keeps no objects of this process either."""

    def __init__(self, what: list[Any]):
        began = time.process_time()
        self.what = pickle.dumps(what)
        Cluster.seconds += time.process_time() - began


class Cluster:
    """Ray as the reactor sees it. Every wait has one result, that of any call under way."""

    seconds = 0.0
    """CPU time of the fakes."""

    def __init__(self, seed: int) -> None:
        self.random, self.most = random.Random(seed), 0
        self.under_way: list[Reference] = []

    def watch(self, reference: Reference) -> None:
        self.under_way.append(reference)
        self.most = max(self.most, len(self.under_way))

    def next_arrival(self, seconds: float) -> Arrival:
        place = self.random.randrange(len(self.under_way))
        self.under_way[place], self.under_way[-1] = self.under_way[-1], self.under_way[place]
        return Arrival(self.under_way.pop(), Future())

    def result(self, arrival: Arrival) -> Any:
        began = time.process_time()
        result = answer(pickle.loads(arrival.reference.what))
        Cluster.seconds += time.process_time() - began
        return result


def answer(what: list[Any]) -> Any:
    """The batch of some requests, or the rewards of some responses."""
    if not what or isinstance(what[0], str):
        return [1.0] * len(what)
    now = Versions(0, 0)
    rollouts = [
        Rollout(r.prompt_id, r.sample_index, r.prompt_token_ids, TOKENS, LOG_PROBS, "x", "stop", now) for r in what
    ]
    return RolloutBatch(rollouts, [], 1.0, len(TOKENS) * len(rollouts))


class Engines:
    """Engines that never die, draft from no history and have no tools."""

    tools = None

    def __init__(self, number: int):
        self.in_dispatch = list(range(number))

    def begin_generate(
        self, engine: int, requests: list[RolloutRequest], tap: float, together: Any, prompt_answer: Any
    ) -> Reference:
        return Reference(requests)

    def share_history(self, engine: int, generated: Any) -> None: ...

    def call_all(self, method: Any) -> dict[int, Window]:
        return {}


class Rewards:
    """A scorer that has started."""

    starting = Reference([])

    def begin(self, prompt: Prompt, responses: list[str]) -> Reference:
        return Reference(responses)


class Task:
    def __len__(self) -> int:
        return DATASET

    def __getitem__(self, index: int) -> Prompt:
        return Prompt(f"p{index}", [], None)


def measure(in_flight: int, lag: int, engines: int, seed: int, folder: Path) -> list[float]:
    """Return CPU ms and wall ms a group, CPU seconds a step, and the most calls under way at once."""
    groups = in_flight // (lag + 1)
    steps = max(3, LEAST_GROUPS // groups)
    rollout = {"prompts_per_step": groups, "samples_per_prompt": SAMPLES, "num_engines": engines}
    policy = {"model": "tiny:llama"}
    if lag:
        policy |= {"old_log_probs": "recomputed", "behaviour_correction": "truncate"}
    config = RunConfig(
        name="controller",
        steps=steps + 2 * lag + 2,
        run_root=folder,
        policy=policy,
        drafter={"model": {"type": "eagle3"}},
        task={"type": "reasoning_gym", "name": "chain_sum"},
        rollout=rollout | {"vllm": {"max_num_seqs": SLOTS}},
        stream={"max_policy_lag": lag},
    )
    cluster = Cluster(seed)
    reactor = Reactor(cluster, 60.0)
    tokenizer = SimpleNamespace(apply_chat_template=lambda *_, **__: [1] * PROMPT_TOKENS)
    prompts = Prompts(Task(), PromptOrder(DATASET, groups, seed), tokenizer)
    roles = Roles(Engines(engines), [Rewards()], None, None, None, reactor, None, None)
    start = RunState(0, Versions(0, 0), {}, {})
    producer = Producer(config, roles, prompts, RowFile(folder / "stream.jsonl"), start)
    gc.collect()
    gc.freeze()  # as in a run
    for _ in range(lag + 1):
        one_step(producer, reactor)
    Cluster.seconds, began, began_cpu = 0.0, time.perf_counter(), time.process_time()
    for _ in range(steps):
        one_step(producer, reactor)
    wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu - Cluster.seconds
    number = groups * steps
    return [1000 * cpu / number, 1000 * wall / number, cpu / steps, cluster.most]


def one_step(producer: Producer, reactor: Reactor) -> None:
    """What the controller does with the stream in one step."""
    producer.admit(False)
    producer.metrics()
    taken = reactor.until(producer.take)
    producer.windows.take([rollout for group in taken for rollout in group.rollouts])
    producer.release()


def time_tokens(seed: int) -> None:
    """Print what metrics over tokens cost, in CPU time."""
    rng, rollouts = random.Random(seed), []
    for i in range(64):
        steps = [(3, rng.randint(0, 3)) for _ in range(8192)]
        last = next(n for n, end in enumerate(accumulate(1 + accepted for _, accepted in steps)) if end >= 8191)
        earlier = (Segment(Versions(2, 1), 0, 1000),)
        ids, taken = [5] * 8192, tuple(steps[: last + 1])
        rollouts.append(Rollout("p", i, [1], ids, [-1.0] * 8192, "", "stop", Versions(3, 1), taken, earlier))
    print("\n| metric | ns CPU a token |\n|---|---|")
    for name, compute in (("lags", lambda: lag_metrics(rollouts, 3)), ("depths", lambda: counts_by_depth(rollouts))):
        began = time.process_time()
        compute()
        print(f"| {name} | {1e9 * (time.process_time() - began) / (64 * 8192):.1f} |")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=64, help="default %(default)s")
    parser.add_argument("--in-flight", type=int, nargs="+", default=[100, 1000, 10_000], help="default %(default)s")
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1], help="default %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default %(default)s")
    args = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, {date.today()}, {args}\n")
    print("| lag | groups in flight | groups a step | ms CPU a group | ms wall a group | s CPU a step | most calls |")
    print("|---|---|---|---|---|---|---|")
    for lag in args.lags:
        for in_flight in args.in_flight:
            with tempfile.TemporaryDirectory() as folder:
                cpu, wall, step, most = measure(in_flight, lag, args.engines, args.seed, Path(folder))
            cells = f"{cpu:.3f} | {wall:.3f} | {step:.2f} | {most:.0f}"
            print(f"| {lag} | {in_flight} | {in_flight // (lag + 1)} | {cells} |", flush=True)
    time_tokens(args.seed)


if __name__ == "__main__":
    main()
