"""Should the texts of older policies be forgotten when drafts are proposed from history? A simulation of a policy that moves.

    python -m benchmarks.history_ageing

The policy is a Markov chain of order 2 over 64 tokens, with a bias of its own for each of 24 prompts, and moves in a straight line from
one chain to another one. In each of 16 steps it writes 8 responses of 64 tokens to each prompt, which are drafted from those of the steps
before. A token x was drawn from the policy's distribution p, so that a draft token drawn from q is accepted in its place with probability
min(1, q(x) / p(x)) in the mean. Prints, by how far the policy has moved in the end, KL(last || first) in nats a token, the chance in
per cent that a draft token is accepted in the last 8 steps: from all texts, and the difference when only those of the newest steps are
kept. Means over prompts, and standard errors of the paired differences.
"""

from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.suffix_index import acceptances, learn
from drafters.suffix.index import SuffixIndex

TOKENS, PROMPTS, SAMPLES, LENGTH, STEPS, JUDGED = 64, 24, 8, 64, 16, 8
PLACES = 12
"""Tokens of each response that are judged."""
DRIFTS = (0.0, 0.3, 1.0, 2.0, 4.0)
"""How far the policy moves in all steps together, in multiples of a distance."""
NEWEST = 8, 4, 2, 1


Array = NDArray[np.float64]


class Policy:
    """Log-probs of the next token by the two before it, for each prompt."""

    def __init__(self, drift: float, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.drift, self.rng = drift, rng
        shape = TOKENS, TOKENS, TOKENS
        self.start = 2.2 * rng.standard_normal(shape) + 1.5 * rng.standard_normal((TOKENS, 1, TOKENS))
        self.direction = rng.standard_normal(shape)
        self.of_prompt = 1.5 * rng.standard_normal((PROMPTS, 1, TOKENS, TOKENS))

    def log_probs(self, version: int, prompt: int, text: NDArray[np.int64]) -> Array:
        """[n, TOKENS] after texts [n, 2 or more]."""
        before, last = text[:, -2], text[:, -1]
        moved = self.start[before, last] + self.drift * version / (STEPS - 1) * self.direction[before, last]
        logits = moved + self.of_prompt[prompt, 0, last]
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    def write(self, version: int, prompt: int) -> tuple[list[Any], float]:
        """The samples of a prompt, and how much likelier their tokens are to this version than to the first, in nats a token."""
        text, chosen, distance = np.array([[prompt, 0]] * SAMPLES), [], 0.0
        for _ in range(LENGTH):
            log_probs = self.log_probs(version, prompt, text)
            drawn = (log_probs + self.rng.gumbel(size=log_probs.shape)).argmax(1)[:, None]
            chosen.append(np.take_along_axis(log_probs, drawn, 1))
            before = np.take_along_axis(self.log_probs(0, prompt, text), drawn, 1)
            distance += float((chosen[-1] - before).mean()) / LENGTH
            text = np.concatenate([text, drawn], 1)
        values = np.concatenate(chosen, 1)
        rows = zip(text[:, 2:].tolist(), values.tolist(), strict=True)
        return [
            SimpleNamespace(prompt_token_ids=[prompt, 0], token_ids=tokens, log_probs=log_probs)
            for tokens, log_probs in rows
        ], distance


def acceptance(steps: list[list[list[Any]]], newest: int | None) -> Array:
    """Mean acceptance of a draft token for each prompt, in the last JUDGED steps."""
    found = np.zeros((JUDGED, PROMPTS))
    for row, version in enumerate(range(STEPS - JUDGED, STEPS)):
        index = SuffixIndex(2**26)
        for known in steps[0 if newest is None else version - newest : version]:
            for rollout in (rollout for group in known for rollout in group):
                learn(index, rollout.prompt_token_ids, rollout.token_ids)
        for prompt, group in enumerate(steps[version]):
            found[row, prompt] = np.mean([acceptances(index, rollout, True, PLACES).mean() for rollout in group])
    return found.mean(0)


def main() -> None:
    names = [f"newest {n}" for n in NEWEST]
    print(f"| KL(last, first) | all, % | {' | '.join(names)} |\n|--:|--:|" + "--:|" * len(names))
    for drift in DRIFTS:
        policy = Policy(drift)
        written = [[policy.write(version, prompt) for prompt in range(PROMPTS)] for version in range(STEPS)]
        steps = [[group for group, _ in step] for step in written]
        distance = np.mean([distance for _, distance in written[-1]])
        plain = acceptance(steps, None)
        cells = []
        for newest in NEWEST:
            gains = 100 * (acceptance(steps, newest) - plain)
            cells.append(f"{gains.mean():+.1f} ± {gains.std(ddof=1) / PROMPTS**0.5:.1f}")
        print(f"| {distance:.2f} | {100 * plain.mean():.1f} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
