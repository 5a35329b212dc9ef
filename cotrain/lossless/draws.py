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
    mean: Floats  # of the log-prob under the law: minus its entropy
    variance: Floats
    third_moment: Floats  # central
    before: dict[str, Floats]  # per order: probability of all outcomes that come before the drawn one
    impossible: NDArray[np.bool_]  # of probability 0; the numbers are those of the least likely possible outcome
    outside: NDArray[np.bool_]  # impossible beyond any doubt about the law

    def __len__(self) -> int:
        return len(self.probability)

    def select(self, index: NDArray[np.bool_] | NDArray[np.int64]) -> "Draws":
        """Those at the indices, or where the mask is True."""
        return Draws(
            self.probability[index],
            self.log_prob[index],
            self.mean[index],
            self.variance[index],
            self.third_moment[index],
            {name: values[index] for name, values in self.before.items()},
            self.impossible[index],
            self.outside[index],
        )


def draws_of(
    log_law: Tensor, outcomes: Tensor, orders: Mapping[str, Tensor] | None = None, outside: Tensor | None = None
) -> Draws:
    """Reduce log-probabilities [N, V] (-inf: impossible) and the outcomes drawn from them [N].

    orders: by name, keys [V] or [N, V]; outcomes of a smaller key come first, ties by descending probability, then by
    id. "probability" is always there. A key may depend on the past of its row only, never on what was drawn.
    outside [N]: outcomes of probability 0 that no error of the law explains; all of them when left out.
    Raises ValueError for a row that does not sum to 1 within 1e-6 and for an outcome that is not in the vocabulary.
    """
    log_law = log_law.double()
    law = log_law.exp()
    num_draws, size = law.shape
    if outcomes.shape != (num_draws,):
        raise ValueError(f"outcomes have shape {list(outcomes.shape)}, the laws {[num_draws, size]}: give one a row")
    if num_draws and not torch.allclose(law.sum(1), law.new_ones(()), rtol=0, atol=1e-6):
        raise ValueError("log_law: a row does not sum to 1; normalise it (log_softmax)")
    if num_draws and not 0 <= int(outcomes.min()) <= int(outcomes.max()) < size:
        raise ValueError(f"outcomes must be 0..{size - 1}, found {int(outcomes.min())}..{int(outcomes.max())}")
    impossible = law.gather(1, outcomes[:, None]).squeeze(1) == 0
    drawn = torch.where(impossible, law.masked_fill(law == 0, torch.inf).argmin(1), outcomes)[:, None]

    finite = log_law.masked_fill(law == 0, 0.0)
    mean = (law * finite).sum(1, keepdim=True)
    deviation = finite - mean
    squares = law * deviation * deviation
    drawn_law = law.gather(1, drawn)
    ids = torch.arange(size, device=law.device)
    likelier = law * ((law > drawn_law) | ((law == drawn_law) & (ids < drawn)))
    before = {BY_PROBABILITY: likelier.sum(1)}
    for name, key in (orders or {}).items():
        keys = key.to(law.device).expand_as(law)
        drawn_key = keys.gather(1, drawn)
        before[name] = (law * (keys < drawn_key)).sum(1) + (likelier * (keys == drawn_key)).sum(1)
    return Draws(
        probability=drawn_law.squeeze(1).cpu().numpy(),
        log_prob=log_law.gather(1, drawn).squeeze(1).cpu().numpy(),
        mean=mean.squeeze(1).cpu().numpy(),
        variance=squares.sum(1).cpu().numpy(),
        third_moment=(squares * deviation).sum(1).cpu().numpy(),
        before={name: sums.cpu().numpy() for name, sums in before.items()},
        impossible=impossible.cpu().numpy(),
        outside=(impossible if outside is None else outside).cpu().numpy(),
    )


def members_first(token_ids: Iterable[int], size: int) -> Tensor:
    """Key [V] of the order that puts the given tokens (a draft vocabulary, the stop tokens) before all others."""
    key = torch.ones(size)
    key[list(token_ids)] = 0
    return key


def concatenate(parts: Sequence[Draws]) -> Draws:
    """All draws one after the other. The parts must have the same orders."""
    if not parts:
        raise ValueError("parts: at least one is needed")
    return Draws(
        np.concatenate([part.probability for part in parts]),
        np.concatenate([part.log_prob for part in parts]),
        np.concatenate([part.mean for part in parts]),
        np.concatenate([part.variance for part in parts]),
        np.concatenate([part.third_moment for part in parts]),
        {name: np.concatenate([part.before[name] for part in parts]) for name in parts[0].before},
        np.concatenate([part.impossible for part in parts]),
        np.concatenate([part.outside for part in parts]),
    )
