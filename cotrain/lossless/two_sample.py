"""Texts sampled with speculation against texts sampled without, of the same prompts: needs no law at all.

Texts of one prompt are exchangeable between the arms when speculation is lossless. So labels are permuted within each
prompt, and the p-value is exact for any statistic, any number of texts and any vocabulary.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array

from cotrain.lossless.draws import Floats
from cotrain.lossless.family import CheckResult

Texts = Sequence[Sequence[Sequence[int]]]  # [prompt][sample][token]

END = -1
CHUNK_ENTRIES = 1_000_000

ENOUGH = 100
"""Permutations at least as extreme after which no more are drawn: p is far from any level then."""


def two_sample_check(
    speculated: Texts,
    plain: Texts,
    setting: str,
    rng: np.random.Generator,
    depth: int = 4,
    rare: int = 10,
    permutations: int = 9999,
) -> CheckResult:
    """Chi-square of the next token given the prompt and the first 0..depth-1 tokens, with a permutation p-value.

    Each arm has one or more texts of each prompt, drawn independently. Next tokens seen fewer than `rare` times after
    a prefix, in both arms together, are one cell. p is never below 1 / (permutations + 1), which must reach the level
    of a check for a failure to count (power.permutations_for_level). Permutations end early once ENOUGH of them are as
    extreme; p is then ENOUGH over their number, and exact all the same (Besag and Clifford 1991).
    Effect: mean total variation distance of the next token between the arms, minus its mean over permutations.
    Raises ValueError when the arms have different prompts or nothing to compare.
    """
    if len(speculated) != len(plain):
        raise ValueError(f"{len(speculated)} prompts with speculation, {len(plain)} without: give the same prompts")
    if any(not texts for arm in (speculated, plain) for texts in arm):
        raise ValueError("each prompt needs at least one text with and one without speculation")
    cells = _Cells.of([[*a, *b] for a, b in zip(speculated, plain, strict=True)], depth, rare)
    sizes = [(len(a), len(b)) for a, b in zip(speculated, plain, strict=True)]
    share = np.concatenate([np.full(a + b, a / (a + b)) for a, b in sizes])
    labels = np.concatenate([np.r_[np.ones(a), np.zeros(b)] for a, b in sizes])
    observed, distance = cells.statistics(labels[:, None], share)
    per_chunk = max(1, CHUNK_ENTRIES // (len(labels) + len(cells.parent)))
    exceeding, done = 0, 0
    means: list[float] = []
    while done < permutations and exceeding < ENOUGH:
        count = min(per_chunk, permutations - done)
        permuted = _permute(labels, [a + b for a, b in sizes], count, rng)
        values, distances = cells.statistics(permuted, share)
        hits = np.flatnonzero(values >= observed[0] * (1 - 1e-12))[: ENOUGH - exceeding]
        exceeding += len(hits)
        done += int(hits[-1]) + 1 if exceeding == ENOUGH else count
        means.append(float(distances.mean()))
    p = ENOUGH / done if exceeding == ENOUGH else (1 + exceeding) / (1 + permutations)
    effect = float(distance[0]) - float(np.mean(means))
    return CheckResult("two-sample", setting, len(labels), float(observed[0]), effect, "TV", p)


class _Cells:
    """Cells of the conditional tables, as sums over texts."""

    def __init__(
        self, members: csr_array, parents: csr_array, parent: NDArray[np.int64], first_text: NDArray[np.int64]
    ):
        self.members = members  # [C, S] text s has this next token after this prefix
        self.parents = parents  # [P, S] text s has this prefix
        self.parent = parent  # [C]
        self.first_text = first_text  # [P] some text of the prefix's prompt

    @classmethod
    def of(cls, texts: Texts, depth: int, rare: int) -> "_Cells":
        """texts: of both arms, so that which tokens are rare does not depend on the labels."""
        members: list[list[int]] = []
        parents: list[list[int]] = []
        parent: list[int] = []
        offset = 0
        for samples in texts:
            prefixes: dict[tuple[int, ...], list[int]] = {(): list(range(len(samples)))}
            for position in range(depth):
                longer: dict[tuple[int, ...], list[int]] = {}
                for prefix, having in prefixes.items():
                    by_token: dict[int, list[int]] = {}
                    for s in having:
                        token = samples[s][position] if position < len(samples[s]) else END
                        by_token.setdefault(token, []).append(s)
                    frequent = {t: seen for t, seen in by_token.items() if len(seen) >= rare}
                    rest = [s for t, seen in by_token.items() if t not in frequent for s in seen]
                    cells = [*frequent.values(), *([rest] if rest else [])]
                    if len(cells) > 1:
                        parent += [len(parents)] * len(cells)
                        members += [[s + offset for s in cell] for cell in cells]
                        parents.append([s + offset for s in having])
                    longer |= {(*prefix, t): seen for t, seen in frequent.items() if t != END}
                prefixes = longer
            offset += len(samples)
        if not parents:
            raise ValueError(
                f"no prefix is followed by two tokens seen often enough: take more texts a prompt, or rare below {rare}"
            )
        first_text = np.array([having[0] for having in parents])
        return cls(_indicator(members, offset), _indicator(parents, offset), np.array(parent), first_text)

    def statistics(self, labels: Floats, share: Floats) -> tuple[Floats, Floats]:
        """Chi-square and mean total variation distance [R] of labels [S, R]: 1 with speculation, 0 without.

        share [S]: of speculated texts among those of the text's prompt.
        """
        size, parent_size = self.members.sum(axis=1), self.parents.sum(axis=1)
        expected_share = (self.parents @ labels) / parent_size[:, None]
        excess = self.members @ labels - expected_share[self.parent] * size[:, None]
        odds = (share * (1 - share))[self.first_text]
        chi_square = (excess**2 / (size * odds[self.parent])[:, None]).sum(0)
        distance = 0.5 * (np.abs(excess) / odds[self.parent][:, None]).sum(0) / parent_size.sum()
        return chi_square, distance


def _indicator(rows: list[list[int]], width: int) -> csr_array:
    columns = np.concatenate([np.asarray(row) for row in rows])
    ends = np.cumsum([0, *(len(row) for row in rows)])
    return csr_array((np.ones(len(columns)), columns, ends), shape=(len(rows), width))


def _permute(labels: Floats, sizes: list[int], count: int, rng: np.random.Generator) -> Floats:
    """[S, count]: labels permuted within each prompt."""
    blocks = np.split(labels, np.cumsum(sizes)[:-1])
    return np.concatenate([rng.permuted(np.tile(block[:, None], count), axis=0) for block in blocks])
