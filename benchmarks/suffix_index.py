"""What an index of past rollouts accepts, and what it costs a token.

    python -m benchmarks.suffix_index [--prompts 24] [--samples 8] [--tokens 128] [--temperature 1.0]
    python -m benchmarks.suffix_index --sizes 250000 1000000 3000000        # costs alone, in large indexes, without a model

SmolLM2-135M-Instruct answers word problems (reasoning-gym's gsm_symbolic) twice, without speculation; the second epoch is
then drafted for from the first. Each row adds to what the one above knows. A recorded token x was drawn from the policy's
law p, so that a draft drawn from q is accepted there with probability min(1, q(x) / p(x)), and the likeliest token with
probability 1 if it is x, and 0 otherwise. Means over prompts and their standard errors, of tokens a verification step.
Prints Markdown tables; microseconds are of one core, after compilation. With --sizes, an index grows by responses of 4,096 tokens to
128 prompts, parts of a random chain in which each of 20,000 tokens has three successors; processor time, medians of 60 drafts at k = 4.
"""

import argparse
import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

LENGTHS = (2, 4, 8)
ROOM = 2**28


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, text in (
        ("prompts", 24, "prompts"), ("samples", 8, "samples of each"), ("tokens", 128, "longest response"),
        ("seed", 0, "seed"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{text} (default %(default)s)")
    parser.add_argument("--temperature", type=float, default=1.0, help="sampling temperature (default %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="N", help="tokens of indexes whose costs are printed")
    args = parser.parse_args()
    if args.sizes:
        return print_costs_by_size(args.sizes)
    epochs = asyncio.run(recorded(args))
    print(f"{sum(len(r.token_ids) for r in epochs[1])} tokens in the second epoch\n")
    print("| index | " + " | ".join(f"likeliest, k={k} | drawn, k={k} | accepted, ratio" for k in LENGTHS) + " |")
    print("|---|" + "---|" * 3 * len(LENGTHS))
    for name, known in knowledge(epochs).items():
        print(f"| {name} | {' | '.join(cells(epochs[1], known, args.samples))} |")
    print("\n" + cost(epochs))


async def recorded(args: argparse.Namespace) -> list[list[Any]]:
    """Rollouts of two epochs over the same prompts, a prompt's samples in a row."""
    from cotrain.config.schema import ReasoningGymTask
    from cotrain.records import RolloutRequest
    from pipelines.engines import one_engine, prepare_engine

    task = ReasoningGymTask(type="reasoning_gym", name="gsm_symbolic")
    options = argparse.Namespace(
        model="bundled:smollm2-135m-instruct", drafter=None, dtype="bfloat16", tokens=args.tokens, seed=args.seed,
        tensor_parallel_size=None,
    )  # fmt: skip
    sampling = {"temperature": args.temperature}
    setup = prepare_engine(options, task, args.prompts, 16, Path(), num_speculative_tokens=1, **sampling)
    async with one_engine(setup, args.seed, 2) as engine:
        requests = [
            RolloutRequest(f"p{i}", j, prompt, None)
            for i, prompt in enumerate(setup.prompts)
            for j in range(args.samples)
        ]
        return [(await engine.generate(requests, tap=False)).rollouts for _ in range(2)]


Known = Callable[[Any, list[Any]], list[Any]]


def knowledge(epochs: list[list[Any]]) -> dict[str, Known]:
    """What an index has been given when it drafts for a rollout whose group has these other samples."""
    before = epochs[0]

    def same_prompt(rollout: Any, _: list[Any]) -> list[Any]:
        return [r for r in before if r.prompt_id == rollout.prompt_id]

    return {
        "own text": lambda rollout, siblings: [],
        "+ the prompt's previous epoch": same_prompt,
        "+ all prompts of that epoch": lambda rollout, siblings: before,
        "+ finished siblings": lambda rollout, siblings: [*before, *siblings],
    }


def cells(rollouts: list[Any], known: Known, samples: int) -> list[str]:
    from drafters.suffix.index import SuffixIndex

    shares: dict[bool, list[list[np.ndarray]]] = {True: [], False: []}
    for start in range(0, len(rollouts), samples):
        group = rollouts[start : start + samples]
        found: dict[bool, list[np.ndarray]] = {True: [], False: []}
        for rollout in group:
            index = SuffixIndex(ROOM // 64)
            for other in known(rollout, [r for r in group if r is not rollout]):
                learn(index, other.prompt_token_ids, other.token_ids)
            for draws in found:
                found[draws].append(acceptances(index, rollout, draws))
        for draws in found:
            shares[draws].append(found[draws])
    texts = []
    for k in LENGTHS:
        lengths = {draws: [length(group, k) for group in groups] for draws, groups in shares.items()}
        likeliest, drawn = (np.array(lengths[draws]) for draws in (False, True))
        texts += [mean(likeliest), mean(drawn), f"{(drawn.mean() - 1) / (likeliest.mean() - 1):.2f}"]
    return texts


def mean(values: np.ndarray) -> str:
    return f"{values.mean():.2f} ± {values.std(ddof=1) / len(values) ** 0.5:.2f}"


def distribution(drafts: Any, request: int, position: int) -> dict[int, float]:
    """Return the distribution that a token was drawn from: probabilities by token."""
    size = drafts.sizes[request, position]
    of_token = drafts.supports[request, position, :size], drafts.probabilities[request, position, :size]
    return dict(zip(*(values.tolist() for values in of_token), strict=True))


def acceptances(index: Any, rollout: Any, draws: bool, most: int | None = None) -> np.ndarray:
    """The chance that each token of a response but the first is what a draft in its place was accepted as.

    most: tokens to take at most, evenly spread; None takes all.
    """
    number, found, one = len(rollout.token_ids), [], OneRequest(rollout.prompt_token_ids, rollout.token_ids, 1)
    for i in range(1, number, 1 if most is None else max(1, -(-number // most))):
        token, draft = rollout.token_ids[i], one.draft(index, i, draws)
        if draws:
            known = distribution(draft, 0, 0).get(token, 0.0) if draft.nums[0] else 0.0
            found.append(min(1.0, known / np.exp(rollout.log_probs[i])))
        else:
            found.append(float(draft.lists() == [[token]]))
    return np.array(found)


def learn(index: Any, prompt: Any, response: Sequence[int]) -> None:
    """Add a finished rollout, and learn it to the end."""
    from drafters.suffix.index import key_of

    index.add(key_of(prompt), response)
    while index.advance():
        pass


class OneRequest:
    """A request that is drafted for again and again as its response grows."""

    def __init__(self, prompt: Sequence[int], response: Sequence[int], k: int):
        from drafters.suffix.index import RequestTexts

        self._text, self._prompt_length, self._k = (
            np.array([[*prompt, *response]], np.int32),
            np.array([len(prompt)]),
            k,
        )
        self._requests = RequestTexts(1, self._text.size + k)

    def draft(self, index: Any, length: int, draws: bool) -> Any:
        """Return drafts for the one request, whose response has this length; no shorter one than before."""
        rows = self._requests.follow(["r"], self._text, self._prompt_length + length, self._prompt_length)
        return index.draft(self._requests, rows, self._k, np.array([draws]))


def length(group: list[np.ndarray], k: int) -> float:
    """Expected tokens a verification step with k draft tokens: tokens over steps of a walk along the responses."""
    tokens = steps = 0.0
    for accepted in group:
        # reach[i]: expected number of steps that begin with a draft for token i
        reach = np.zeros(len(accepted) + k + 2)
        reach[0] = 1.0
        for i in range(len(accepted)):
            survives = reach[i]
            for j in range(k):
                if i + j >= len(accepted):
                    break
                reach[i + j + 1] += survives * (1 - accepted[i + j])
                survives *= accepted[i + j]
            else:
                reach[i + k + 1] += survives
        tokens, steps = tokens + len(accepted), steps + reach[: len(accepted)].sum()
    return tokens / steps


def cost(epochs: list[list[Any]]) -> str:
    from drafters.suffix.index import SuffixIndex

    index, k = SuffixIndex(ROOM), 4
    num_tokens = sum(len(r.token_ids) for r in epochs[0])
    started = time.perf_counter()
    for rollout in epochs[0]:
        learn(index, rollout.prompt_token_ids, rollout.token_ids)
    insert = (time.perf_counter() - started) / num_tokens
    drafts = seconds = tokens = 0.0
    for rollout in epochs[1]:
        text, one, place = np.array(rollout.token_ids), OneRequest(rollout.prompt_token_ids, rollout.token_ids, k), 1
        while place < len(text):
            began = time.perf_counter()
            draft = np.array(one.draft(index, place, True).lists()[0])
            seconds += time.perf_counter() - began
            drafts += 1
            matching = draft == text[place : place + len(draft)][: len(draft)] if place + k < len(text) else []
            place += 1 + int(np.cumprod(matching).sum()) if len(matching) else 1
        tokens += len(rollout.token_ids) - 1
    return (
        f"Insert {1e6 * insert:.1f} us a token, {index.num_bytes / index.num_tokens:.0f} bytes a token; look-up at k={k} "
        f"{1e6 * seconds / drafts:.1f} us a draft, {1e6 * seconds / tokens:.1f} us a generated token, in an index of "
        f"{index.num_tokens} tokens"
    )


def print_costs_by_size(sizes: list[int]) -> None:
    from drafters.suffix.index import SuffixIndex

    rng, k, length = np.random.default_rng(0), 4, 4096
    successors = rng.integers(0, 20_000, (20_000, 3)).astype(np.int32)

    def chain(num: int) -> np.ndarray:
        tokens = np.zeros(num, np.int32)
        tokens[0] = rng.integers(20_000)
        for i, branch in enumerate(rng.integers(0, 3, num - 1)):
            tokens[i + 1] = successors[tokens[i], branch]
        return tokens

    index, prompts, texts = SuffixIndex(2**30), [chain(64) for _ in range(128)], [chain(length) for _ in range(128)]
    learn(index, prompts[0], texts[0].tolist())  # compiles
    print("| tokens | adding one, us | bytes a token | a draft at k = 4, us |\n|--:|--:|--:|--:|")
    for size in sizes:
        before, started = index.num_tokens, time.process_time()
        while index.num_tokens < size:
            number = int(rng.integers(128))
            text = np.roll(texts[number], int(rng.integers(length)))
            learn(index, prompts[number], text.tolist())
        added = (time.process_time() - started) / (index.num_tokens - before)
        drafts = []
        for _ in range(61):
            number = int(rng.integers(128))
            one = OneRequest(prompts[number].tolist(), texts[number][:1000].tolist(), k)
            one.draft(index, 999, False)
            began = time.process_time()
            one.draft(index, 1000, True)
            drafts.append(time.process_time() - began)
        per_token = index.num_bytes / index.num_tokens
        print(f"| {index.num_tokens:,} | {1e6 * added:.2f} | {per_token:.0f} | {1e6 * np.median(drafts[1:]):.0f} |")


if __name__ == "__main__":
    main()
