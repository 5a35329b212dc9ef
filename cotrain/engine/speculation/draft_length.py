"""Chooses the draft length of each engine step, 0 included: the one with the most expected tokens per second.

The choice is made in vLLM's scheduler, which sees the batch size and the clock of every step (`scheduling.py`), from batch
size, step costs and acceptance so far, before any token of the next draft is drawn. So it does not change the distribution of
the emitted tokens.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

import numpy as np

from cotrain.engine.speculation.served_acceptance import ServedAcceptance
from cotrain.engine.speculation.step_costs import Array, StepCosts, ratio_at
from cotrain.records import GainReport

PROBE_STEPS = 64
"""One step in so many drafts from an index of rollouts whether it pays or not, so that one that has become better is noticed."""

BLOCK_STEPS = 5
"""Successive steps of one draft length. The first still verifies drafts of the length before, so the times of 4 are of one length."""

UNSURE = 0.1  # standard error of log t_k / t_0 above which a length is tried at once, if it could be the fastest

TRIAL_SHARE = 0.01  # share of the decoding time that trials of lengths which seem slower may take

LEAST_LOSS = 0.05  # what a step of a trial costs at least, in steps of the chosen length


class Step(NamedTuple):
    """One engine step, as the scheduler saw it."""

    num_speculative_tokens: int  # tokens drafted for each request at the end of the step
    batch: int
    computes_prompts: bool
    drafts: Sequence[tuple[int, int]]  # (verified draft tokens, accepted ones) of each request that had drafts
    num_tokens: int  # number of tokens that the step generated

    @property
    def kind(self) -> str:
        """See StepTotal. In a steady step every request verified as many tokens as the step drafts: its time is that of a length."""
        if self.computes_prompts:
            return "prompts"
        drafting = self.batch if self.num_speculative_tokens else 0
        alike = all(verified == self.num_speculative_tokens for verified, _ in self.drafts)
        return "steady" if alike and len(self.drafts) == drafting else "mixed"

    @property
    def length(self) -> float:
        """Draft tokens that it verified of each request, on average."""
        return sum(verified for verified, _ in self.drafts) / self.batch


class Plan(NamedTuple):
    """What HistoryDrafting has to know of a step, to choose the length of each request."""

    ratios: list[float] | None = None  # t_k / t_0 [K+1] at this batch size. None while the length is fixed.
    probes: bool = False  # whether requests draft a token more than would be chosen, whether it pays or not


@dataclass
class Sums:
    """What the steps of a report add up to."""

    without: Array
    """[max_batch] what the tokens generated at a batch size would have taken without speculation, in seconds."""
    seconds: float = 0.0
    longest_draft: int = 0  # both as in GainReport
    totals: dict[tuple[int, int, str], list[float]] = field(default_factory=dict)
    """(draft length, batch size, kind) -> number, tokens and seconds of engine steps, see StepTotal."""


class Trials:
    """Which steps try another draft length than the chosen one, so that costs and acceptance of all lengths stay known.

    Takes turns among lengths that may be the fastest; then tries every length now and then, however slow it seems.
    """

    def __init__(self, max_speculative_tokens: int):
        self.length: int | None = None
        """Draft tokens of every request in the present block; None if it drafts what was chosen."""
        self._longest, self._last, self._debt = max_speculative_tokens, 0, 0.0

    def begin_block(self, tokens: Array, ratios: Array, errors: Array) -> None:
        """Decide on the next block, from the expected tokens of a step, t_k / t_0 and its errors at the present batch size [K+1]."""
        gains = tokens / ratios
        best = int(gains.argmax())
        open_ = (errors > UNSURE) & (gains * np.exp(2 * errors) > gains[best])
        turns = [(self._last - 1 - i) % (self._longest + 1) for i in range(self._longest + 1)]
        if open_.any():
            open_[[0, best]] = True  # which the others are compared with
            self.length = self._last = next(k for k in turns if open_[k])
            return
        self.length = None
        self._debt -= TRIAL_SHARE * BLOCK_STEPS
        if self._debt <= 0:
            self.length = self._last = k = next(k for k in turns if k != best)
            self._debt = BLOCK_STEPS * max(LEAST_LOSS, ratios[k] / ratios[best] * (1 - gains[k] / gains[best]))


class DraftLengths:
    """Chooses a draft length from 0 to K for each batch size. It stays at K until `adapt`.

    Drafts from history have a length for each request, which the worker chooses. The 15 attributes are what is believed of
    acceptance and costs, what was chosen, and the step that runs.
    """

    def __init__(self, max_speculative_tokens: int, max_batch: int, by_length: bool = False):
        """by_length: what the drafter proposes depends on the draft length."""
        self.max_speculative_tokens = max_speculative_tokens
        self._by_length = by_length
        self._acceptance = ServedAcceptance(max_speculative_tokens, (), by_length)
        self._costs: StepCosts | None = None
        self._ratios = np.ones((max_speculative_tokens + 1, max_batch))  # t_k / t_0, once there are costs
        self._by_request = False
        self._trials = Trials(max_speculative_tokens)
        self._fixed: int | None = max_speculative_tokens
        self._chosen = np.zeros(max_batch, np.int64)
        self._num_steps = 0
        self._step: Step | None = None
        self._before: Step | None = None  # the step before that one, if its requests go on
        self._started = 0.0
        self.begin()

    # -- what the engine's owner calls, between two steps ------------------------------------------------------------

    def begin(self, learns: bool = True) -> None:
        """Start a report. learns: False if its steps sample in another way, so that nothing must be learnt from them."""
        self._learns, self._sums = learns, Sums(np.zeros(len(self._chosen)))

    def report(self) -> dict[str, Any]:
        """Return the report and start the next. gain: fields of a GainReport. steps: the fields of each StepTotal."""
        sums, without, seconds_at = self._sums, self._sums.without, list[list[float]]()
        if self._costs is not None:
            seconds_at = (without * self._ratios).T[without > 0].tolist()
        gain = GainReport(sums.seconds, float(without.sum()), sums.longest_draft, seconds_at)
        steps = [[*key, *total] for key, total in sums.totals.items()]
        self.begin(self._learns)
        return {"gain": asdict(gain), "steps": steps}

    def adapt(self, by_request: bool = False) -> None:
        """Choose the length from now on. by_request: drafts come from history, and the worker chooses each request's length."""
        self._costs = self._costs or StepCosts(self.max_speculative_tokens, len(self._chosen))
        self._fixed, self._by_request = None, by_request
        self._decide()

    def fix_num_speculative_tokens(self, num_speculative_tokens: int) -> None:
        """Use this length at every batch size."""
        self._fixed = num_speculative_tokens

    def new_drafter(self, expected_rates: Sequence[float] | None = None) -> None:
        """Forget acceptance so far: another drafter serves. expected_rates: see ServedAcceptance; None if none are known."""
        self._acceptance = ServedAcceptance(self.max_speculative_tokens, expected_rates or (), self._by_length)
        self._decide()

    def describe(self) -> str:
        """Return the choice and its reason in words: k=2 at batch 1 (gain 1.21x), off at batch 2 to 16: 0.78x at k=1."""
        if self._fixed is not None:
            return f"k={self._fixed} at every batch size (fixed)"
        if self._by_request:
            return f"k=0 to {self.max_speculative_tokens}, chosen for each request"
        gains, parts = self._gains(), []
        for batches in np.split(np.arange(len(self._chosen)), np.flatnonzero(np.diff(self._chosen)) + 1):
            k, first, last = int(self._chosen[batches[0]]), batches[0] + 1, batches[-1] + 1
            where = f"at batch {first}" + (f" to {last}" if last > first else "")
            best = int(gains[1:, batches[0]].argmax()) + 1
            low, high = (f"{bound:.2f}x" for bound in (gains[k, batches].min(), gains[k, batches].max()))
            on = f"k={k} {where} (gain {low if low == high else f'{low} to {high}'})"
            parts.append(on if k else f"off {where}: {gains[best, batches[0]]:.2f}x at k={best}")
        return ", ".join(parts)

    # -- what the scheduler calls in every step; `now` is seconds of one clock -----------------------------------------

    def choose(self, now: float) -> list[int]:
        """Return the draft length of the step that begins now, by batch size [max_batch + 1]."""
        self._end_step(now)
        self._started = now
        self._num_steps += 1
        if self._learns and self._num_steps % BLOCK_STEPS == 0:
            self._decide()
            self._begin_block()
        length = self._fixed
        if length is None and self._by_request:  # then the longest forbids nothing
            length = self.max_speculative_tokens
        elif length is None and self._learns:
            length = self._trials.length
        return [0, *np.asarray(self._chosen).tolist()] if length is None else [length] * (len(self._chosen) + 1)

    def plan(self, batch: int) -> Plan:
        """Return the plan of the step that has begun, with so many requests."""
        if self._fixed is not None or not self._by_request:
            return Plan()
        return Plan(self._ratios[:, batch - 1].tolist(), self._learns and self._num_steps % PROBE_STEPS == 0)

    def observe(self, step: Step) -> None:
        """Take note of what the current step did. Its time ends when the next step begins, or with `idle`."""
        self._step = step if step.batch else None

    def idle(self, now: float) -> None:
        """End the last step, because no other follows at once: all requests have finished, or the engine pauses."""
        self._end_step(now)
        self._started, self._before = now, None
        if self._costs is not None:
            self._costs.pause()

    def _end_step(self, now: float) -> None:
        step, self._step = self._step, None
        if step is None:
            return
        seconds, before, self._before = now - self._started, self._before, step
        if self._learns:
            self._acceptance.observe(step.drafts)
        kind = step.kind
        total = self._sums.totals.setdefault((step.num_speculative_tokens, step.batch, kind), [0, 0, 0.0])
        total[:] = total[0] + 1, total[1] + step.num_tokens, total[2] + seconds
        if kind == "prompts":
            return
        if self._learns and self._costs is not None and (self._by_request or kind == "steady"):
            self._costs.observe(step.length, step.batch, seconds)  # a look-up costs only the verification
        if self._fixed is None:
            self._count(step, before, seconds)

    def _count(self, step: Step, before: Step | None, seconds: float) -> None:
        """Count what a step gained. Whatever slowed it would have slowed one without drafts as much, so only the ratio of the
        two counts. It is at least 1, so no step gains more than the tokens that it emits."""
        length = step.length
        longest = max((verified for verified, _ in step.drafts), default=0)  # the worker decides, and may draft nothing
        if not self._by_request:
            # At a change of length, a step drafts another number of tokens than it verifies.
            length = (length + step.num_speculative_tokens) / 2
            longest = 0 if before is None else before.num_speculative_tokens
        ratio = ratio_at(self._ratios[:, step.batch - 1].tolist(), length)
        self._sums.without[step.batch - 1] += seconds * step.num_tokens / step.batch / ratio
        self._sums.seconds += seconds
        self._sums.longest_draft = max(self._sums.longest_draft, longest)

    def _gains(self) -> Array:
        """Return the expected decoding speed relative to no speculation, [K+1, max_batch]."""
        return self._acceptance.tokens_per_step()[:, None] / self._ratios

    def _decide(self) -> None:
        self._acceptance.forget_what_is_contradicted()
        if self._costs is not None:
            self._ratios = self._costs.ratios()
            self._chosen = self._gains().argmax(0)

    def _begin_block(self) -> None:
        """Decide whether the next steps try another length."""
        self._trials.length = None
        if self._costs is not None and self._fixed is None and not self._by_request and self._before is not None:
            batch = self._before.batch
            ratios, errors = self._ratios[:, batch - 1], self._costs.errors(batch)
            self._trials.begin_block(self._acceptance.tokens_per_step(), ratios, errors)
