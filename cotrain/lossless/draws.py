"""Outcomes drawn from known laws, reduced to the few numbers per outcome that the tests read.

Each outcome has a law of its own, which may depend on all outcomes before it (a token's law depends on its prefix). A
law over a whole vocabulary is large, so it is reduced at once and never kept.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BY_PROBABILITY = "probability"

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Draws:
    """N outcomes, each under its own law. Arrays of shape [N]; log-probs in nats."""

    probability: Floats
    log_prob: Floats
    before: dict[str, Floats]
    """By order: the probability of all outcomes that come before the drawn one."""
    impossible: NDArray[np.bool_]
    """The outcome has probability 0; its numbers are those of the least likely possible outcome."""
    outside: NDArray[np.bool_]
    """The outcome is impossible, and no error of the law explains it."""

    def __len__(self) -> int:
        return len(self.probability)

    def select(self, index: NDArray[np.bool_] | NDArray[np.int64]) -> "Draws":
        """The draws at the indices, or where the mask is True."""
        before = {name: values[index] for name, values in self.before.items()}
        return Draws(self.probability[index], self.log_prob[index], before, self.impossible[index], self.outside[index])


def draws_of(
    log_law: Tensor, outcomes: Tensor, orders: Mapping[str, Tensor] | None = None, outside: Tensor | None = None
) -> Draws:
    """Reduce log-probabilities [N, V] (-inf: impossible) and the outcomes drawn from them [N].

    orders: by name, keys [V] or [N, V]; outcomes of a smaller key come first, ties by descending probability, then by
    id. "probability" is always there. A key may depend on the past of its row only, never on what was drawn.
    outside [N]: outcomes of probability 0 that no error of the law explains; all of them when left out.
    """
    law = log_law.double().exp()
    impossible = law.gather(1, outcomes[:, None]).squeeze(1) == 0
    drawn = torch.where(impossible, law.masked_fill(law == 0, torch.inf).argmin(1), outcomes)[:, None]
    drawn_law = law.gather(1, drawn)
    ids = torch.arange(law.shape[1], device=law.device)
    likelier = law * ((law > drawn_law) | ((law == drawn_law) & (ids < drawn)))
    before = {BY_PROBABILITY: likelier.sum(1)}
    for name, key in (orders or {}).items():
        keys = key.to(law.device).expand_as(law)
        drawn_key = keys.gather(1, drawn)
        before[name] = (law * (keys < drawn_key)).sum(1) + (likelier * (keys == drawn_key)).sum(1)
    return Draws(
        probability=drawn_law.squeeze(1).cpu().numpy(),
        log_prob=log_law.double().gather(1, drawn).squeeze(1).cpu().numpy(),
        before={name: sums.cpu().numpy() for name, sums in before.items()},
        impossible=impossible.cpu().numpy(),
        outside=(impossible if outside is None else outside).cpu().numpy(),
    )


def members_first(token_ids: Iterable[int], size: int) -> Tensor:
    """Key [V] of the order that puts the given tokens, such as a draft vocabulary, before all others."""
    key = torch.ones(size)
    key[list(token_ids)] = 0
    return key


def concatenate(parts: Sequence[Draws]) -> Draws:
    """All draws one after the other. The parts, one at least, must have the same orders."""
    return Draws(
        np.concatenate([part.probability for part in parts]),
        np.concatenate([part.log_prob for part in parts]),
        {name: np.concatenate([part.before[name] for part in parts]) for name in parts[0].before},
        np.concatenate([part.impossible for part in parts]),
        np.concatenate([part.outside for part in parts]),
    )
