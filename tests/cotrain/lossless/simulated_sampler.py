"""Speculative decoding by rejection sampling of a Markov target, small enough to read, with bugs to switch on by name.

Many chains run side by side. The target's next-token law depends on the last token only, so that all laws fit in one
table [V, V]; the drafter has laws of its own over a part of the vocabulary.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch

from cotrain.lossless.emitted import target_log_probs
from drafters.base import SamplingParams

VOCAB, DRAFT_VOCAB = 30, 20

BUGS = (
    "draft temperature is not the ratio's",
    "drafting stops at an unsure draft token",
    "truncation keeps the draft token",
    "renormalised draft vocabulary",
    "bonus token from the row before",
    "accepted prefix one too long",
    "accepted prefix one too short",
    "recovered token from q",
    "recovered token from p",
    "typical acceptance",
    "greedy drafts treated as probabilistic",
    "temperatures from uninitialised memory",
)


@dataclass(frozen=True)
class Setting:
    """How the engine samples and drafts."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    drafts: str = "probabilistic"
    k: int = 3

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, self.top_p, self.top_k, self.drafts)


@dataclass(frozen=True)
class Emitted:
    """N tokens in the order they were emitted, chain after chain; all arrays [N]."""

    context: np.ndarray  # the token before
    token: np.ndarray
    drafted: np.ndarray  # draft tokens of its verification step
    offset: np.ndarray  # draft tokens accepted before it in its step
    accepted: np.ndarray  # it is an accepted draft token
    chain: np.ndarray

    @property
    def strata(self) -> np.ndarray:
        names = np.array(["undrafted", *(f"drafted {j + 1}" for j in range(8)), "bonus"])
        return names[np.where(self.offset == self.drafted, np.where(self.drafted == 0, 0, -1), self.offset + 1)]

    def select(self, index: np.ndarray) -> "Emitted":
        return Emitted(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


class Model:
    """Logits of a random target and of a drafter that imitates it."""

    def __init__(self, seed: int = 0):
        rng = np.random.default_rng(seed)
        self.target = 1.5 * rng.standard_normal((VOCAB, VOCAB))
        self.draft_vocabulary = np.sort(np.argsort(-np.exp(self.target).sum(0))[:DRAFT_VOCAB])
        self.draft = self.target + rng.standard_normal((VOCAB, VOCAB))
        self.draft[:, ~np.isin(np.arange(VOCAB), self.draft_vocabulary)] = -np.inf

    def p(self, setting: Setting) -> np.ndarray:
        return target_log_probs(torch.from_numpy(self.target), setting.sampling).exp().numpy()

    def q(self, temperature: float) -> np.ndarray:
        return torch.from_numpy(self.draft / temperature).softmax(1).numpy()

    def q_of(self, setting: Setting) -> np.ndarray:
        """What verification takes the draft tokens to be drawn from."""
        if setting.drafts == "greedy":
            return np.eye(VOCAB)[self.draft.argmax(1)]
        return self.q(setting.temperature)


def speculate(
    model: Model,
    setting: Setting,
    chains: int,
    tokens: int,
    rng: np.random.Generator,
    bug: str | None = None,
    first: int | None = None,
) -> Emitted:
    """The first `tokens` tokens of each of `chains` chains, which follow token `first` or a random one."""
    assert bug is None or bug in BUGS
    p, q, k = model.p(setting), model.q_of(setting), setting.k
    drawn_from = q
    if bug == "draft temperature is not the ratio's":
        drawn_from = model.q(0.5 * setting.temperature)
    if bug == "greedy drafts treated as probabilistic":
        drawn_from, q = np.eye(VOCAB)[q.argmax(1)], model.q(setting.temperature)
    rows = np.arange(chains)
    state, length = rng.integers(VOCAB, size=chains) if first is None else np.full(chains, first), np.zeros(chains, int)
    parts = []
    while length.min() < tokens:
        context, drafts = [state], []
        drafted = np.full(chains, k)
        for j in range(k):
            x = draw(drawn_from[context[-1]], rng)
            if bug == "drafting stops at an unsure draft token":
                drafted = np.where((drafted == k) & (q[context[-1], x] < 0.2), j, drafted)
            drafts.append(x)
            context.append(x)
        verified, ratio = _verified_laws(model, setting, context, drafts, rng, bug)
        num_accepted, going = np.zeros(chains, int), np.ones(chains, bool)
        for j in range(k):
            p_x, q_x = ratio[j][rows, drafts[j]], q[context[j], drafts[j]]
            taken = p_x > 0.1 if bug == "typical acceptance" else rng.random(chains) * q_x < p_x
            going &= taken & (j < drafted)
            num_accepted += going
        kept = num_accepted
        if bug == "accepted prefix one too long":
            kept = np.minimum(num_accepted + 1, drafted)
        if bug == "accepted prefix one too short":
            kept = np.maximum(num_accepted - 1, 0)

        here = np.stack(verified)[kept, rows]
        q_here = q[np.stack(context)[kept, rows]]
        residual = np.maximum(here - q_here, 0)
        if bug == "recovered token from q":
            residual = q_here
        if bug == "recovered token from p":
            residual = here
        # Where p and q are equal nothing is left, and nothing is ever rejected; a bug that rejects draws from p.
        residual = np.where(residual.sum(1, keepdims=True) > 1e-12, residual, here)
        bonus = (
            p[np.stack(context)[np.maximum(kept - 1, 0), rows]] if bug == "bonus token from the row before" else here
        )
        last = draw(np.where((kept == drafted)[:, None], bonus, residual), rng)

        for j in range(k + 1):
            emits = np.flatnonzero((j <= kept) & (length + j < tokens))
            token = np.where(j < kept, drafts[min(j, k - 1)] if k else last, last)
            everything = (rows, length + j, context[j], token, drafted, np.full(chains, j), j < kept)
            parts.append(np.stack([values[emits] for values in everything]))
        length = length + kept + 1
        state = last
    chain, position, before, token, drafted, offset, accepted = np.concatenate(parts, axis=1)
    order = np.lexsort((position, chain))
    return Emitted(before, token, drafted, offset, accepted.astype(bool), chain).select(order)


def _verified_laws(model, setting, context, drafts, rng, bug) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The target's laws [chains, V] at k + 1 positions: for recovered and bonus tokens, and for the ratio."""
    p, k, chains = model.p(setting), setting.k, len(context[0])
    verified = [p[c] for c in context]
    if bug == "temperatures from uninitialised memory":
        memory = np.stack([model.p(replace(setting, temperature=t)) for t in (0.3, 1.0, 3.0)])
        verified[:k] = [memory[rng.integers(3, size=chains), c] for c in context[:k]]
    if bug == "truncation keeps the draft token":
        verified[:k] = [_with_draft(p[c], model.target[c], x) for c, x in zip(context[:k], drafts, strict=True)]
    if bug == "renormalised draft vocabulary":
        inside = np.isin(np.arange(VOCAB), model.draft_vocabulary)
        return verified, [v * inside / (v * inside).sum(1, keepdims=True) for v in verified]
    return verified, verified


def draw(laws: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """One token from each row of weights [N, V]."""
    cumulative = laws.cumsum(1)
    return (rng.random(len(laws))[:, None] * cumulative[:, -1:] >= cumulative).sum(1)


def _with_draft(law: np.ndarray, logits: np.ndarray, drafts: np.ndarray) -> np.ndarray:
    """Truncated laws [N, V] to which the draft token was added back."""
    weights = np.where(law > 0, np.exp(logits), 0.0)
    rows = np.arange(len(law))
    weights[rows, drafts] = np.exp(logits[rows, drafts])
    return weights / weights.sum(1, keepdims=True)
