"""What an index of past rollouts gains by learning what tools said, where the policy repeats it.

    python -m benchmarks.history_observations [--prompts 8] [--samples 8] [--temperature 1.0]

SmolLM2-135M-Instruct looks two orders up, adds their quantities, and repeats both records word for word, in up to five turns after two
examples. Two epochs over the same prompts are generated without speculation, turn by turn; each turn of the second is then drafted
for from what an index knows. The text of its own trajectory, tool outputs included, is known in every row. Expected tokens a
verification step of k = 4 drawn drafts, as in suffix_index.py, in all turns and in those that repeat the records; means over prompts
and their standard errors. A step costs the same in all rows, so decoding speeds have the same ratios. Prints a Markdown table.
"""

import argparse
import asyncio
import random
import re
from collections import defaultdict
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.suffix_index import ROOM, acceptances, learn, length, mean

K = 4
RULES = (
    "You have two tools. lookup(ID) shows an order, calc(A+B) adds. Call one tool in each turn, and nothing else. "
    "When you have the sum, report both orders and the total."
)
COLOURS, THINGS = ("blue", "green", "red", "white", "black"), ("lamps", "chairs", "desks", "clocks", "shelves")
TOWNS = ("Leeds", "Lyon", "Turin", "Bergen", "Porto")


class Orders:
    """An environment whose last turn repeats what two look-ups returned."""

    def __init__(self, seed: int):
        shown = [case(random.Random(-1 - i)) for i in range(2)]
        self._records, _ = asked = case(random.Random(seed))
        self._messages = [{"role": "system", "content": RULES}]
        for records, numbers in shown:
            (a, first), (b, second) = records.items()
            total = sum(numbers)
            turns = [f"lookup({a})", first, f"lookup({b})", second, f"calc({numbers[0]}+{numbers[1]})", f"= {total}"]
            turns = [question(records), *turns, f"{first}\n{second}\ntotal {total}"]
            self._messages += [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)]
        self._messages.append({"role": "user", "content": question(asked[0])})

    def messages(self) -> list[dict[str, str]]:
        return self._messages

    def step(self, text: str) -> str | None:
        if found := re.fullmatch(r"\s*lookup\((\d+)\)\s*", text):
            return self._records.get(int(found[1]), f"no order {found[1]}")
        if found := re.fullmatch(r"\s*calc\((\d+)\s*\+\s*(\d+)\)\s*", text):
            return f"= {int(found[1]) + int(found[2])}"
        return None

    def reward(self) -> float:
        return 0.0

    def repeats(self, text: str) -> bool:
        """Whether a turn repeats a record."""
        return any(record in text for record in self._records.values())


def case(rng: random.Random) -> tuple[dict[int, str], list[int]]:
    """Two records by their numbers, and their quantities."""
    ids, numbers = rng.sample(range(10000, 99999), 2), [rng.randint(2, 99) for _ in range(2)]
    places = [(rng.choice(COLOURS), rng.choice(THINGS), rng.choice(TOWNS)) for _ in ids]
    shelves = [f"{rng.choice('ABCDEF')}{rng.randint(1, 40)}" for _ in ids]
    rows = zip(ids, numbers, places, shelves, strict=True)
    return {i: f"order {i}: {n} {c} {t}, warehouse {w}, shelf {s}" for i, n, (c, t, w), s in rows}, numbers


def question(records: dict[int, str]) -> str:
    first, second = records
    return f"How many items are in orders {first} and {second}?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (("prompts", 8, "prompts"), ("samples", 8, "samples of each"), ("seed", 0, "seed")):
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default %(default)s)")
    options = parser.parse_args()
    before, after = asyncio.run(recorded(options))
    turns = [turn for rollout, _ in after for turn in rollout.turns()]
    print(
        f"{len(after)} trajectories and {len(turns)} turns in the second epoch, {sum(len(t.token_ids) for t in turns)} tokens\n"
    )
    print(f"| the index knows | all turns, k={K} | turns that repeat records |\n|---|--:|--:|")
    rows = {
        "own trajectory": [],
        "+ what the policy said in past ones": [(t.prompt_token_ids, t.token_ids) for r, _ in before for t in parts(r)],
        "+ what tools said in them too": [(r.prompt_token_ids, r.token_ids) for r, _ in before],
    }
    for name, known in rows.items():
        print(f"| {name} | {mean(lengths(after, known, False))} | {mean(lengths(after, known, True))} |")


def parts(rollout: Any) -> list[Any]:
    """The turns of a trajectory, each as a response to the trajectory's first prompt."""
    return [replace(turn, prompt_token_ids=rollout.prompt_token_ids) for turn in rollout.turns()]


def lengths(
    epoch: list[tuple[Any, list[bool]]], known: list[tuple[list[int], list[int]]], repeating: bool
) -> np.ndarray:
    """Expected tokens a step of each prompt's turns, or of those that repeat records."""
    from drafters.suffix.index import SuffixIndex

    groups = defaultdict[str, list[np.ndarray]](list)
    for rollout, repeats in epoch:
        index = SuffixIndex(ROOM // 64)
        for prompt, response in known:
            learn(index, prompt, response)
        for turn, does in zip(rollout.turns(), repeats, strict=True):
            if does or not repeating:
                groups[rollout.prompt_id].append(acceptances(index, turn, True))
    return np.array([length(group, K) for group in groups.values()])


async def recorded(options: argparse.Namespace) -> list[list[tuple[Any, list[bool]]]]:
    """Trajectories of two epochs, and which of their turns repeat a record."""
    from cotrain.config.schema import RolloutConfig
    from cotrain.engine.trajectories import Trajectory
    from cotrain.models.loading import resolve_model
    from cotrain.records import RolloutRequest
    from cotrain.tasks.environments import TurnTemplate
    from cotrain.tasks.prompts import apply_template, load_tokenizer
    from pipelines.engines import EngineSetup, one_engine

    model = resolve_model("bundled:smollm2-135m-instruct")
    tokenizer = load_tokenizer(model)
    template, epochs = TurnTemplate(tokenizer), []
    config = RolloutConfig(
        prompts_per_step=options.prompts, samples_per_prompt=options.samples, max_prompt_tokens=1024, max_new_tokens=96,
        temperature=options.temperature, num_speculative_tokens=1, vllm={"max_num_seqs": 16, "block_size": 32},
    )  # fmt: skip
    async with one_engine(EngineSetup(model, [], config, None, None), options.seed, 2) as engine:
        for _ in range(2):
            running = list[tuple[Orders, Trajectory, list[bool]]]()
            for i in range(options.prompts):
                prompt = apply_template(tokenizer, Orders(i).messages())
                for sample in range(options.samples):
                    running.append((Orders(i), Trajectory(RolloutRequest(f"p{i}", sample, prompt, None)), []))
            ended = list[tuple[Any, list[bool]]]()
            for number in range(5):
                if not (requests := [trajectory.turn(number) for _, trajectory, _ in running]):
                    break
                made = (await engine.generate(requests, tap=0.0)).rollouts
                going = []
                for (environment, trajectory, repeats), turn in zip(running, made, strict=True):
                    trajectory.append(turn)
                    repeats.append(environment.repeats(turn.text))
                    answer = environment.step(turn.text) if turn.finish_reason == "stop" else None
                    if answer is None or number == 4:
                        ended.append((trajectory.rollout(), repeats))
                    else:
                        trajectory.observe(template.observation(answer, turn.token_ids[-1]))
                        going.append((environment, trajectory, repeats))
                running = going
            epochs.append(ended)
    return epochs


if __name__ == "__main__":
    main()
