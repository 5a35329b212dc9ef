"""Everything that crosses a process. Plain data: no torch, no vLLM, no Ray."""

from dataclasses import astuple, dataclass, field, replace
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class Versions:
    """What an engine serves. Both start at 0 and only go up."""

    policy: int
    drafter: int

    def __str__(self) -> str:
        return f"p{self.policy}-d{self.drafter}"

    @classmethod
    def parse(cls, text: str) -> "Versions":
        """From what `str` makes of them."""
        policy, drafter = text.split("-")
        return cls(int(policy[1:]), int(drafter[1:]))


class Segment(NamedTuple):
    """Tokens `start` to `end` (exclusive) of a response, which the same policy and drafter generated."""

    versions: Versions
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem of a task."""

    id: str
    """Stable name within the task."""
    messages: list[dict[str, str]]
    """Chat messages, before the chat template."""
    answer: Any
    """What the task's scorer needs (a string, or the task's own entry)."""


@dataclass(frozen=True, slots=True)
class RolloutRequest:
    """One sample to generate."""

    prompt_id: str
    sample_index: int
    prompt_token_ids: list[int]
    seed: int | None
    """Sampling seed; None draws from the engine's own generator (probabilistic drafts have no seeds in vLLM)."""
    max_new_tokens: int | None = None
    """Most tokens of this response; None is rollout.max_new_tokens."""


@dataclass(frozen=True, slots=True)
class SpeculationCounts:
    """Drafting of one rollout or one step, sorted by how many draft tokens a verification step verified, 1 to K.

    The draft length decides where verification steps begin, so that counts of one length say little about another.
    """

    steps: tuple[int, ...]
    """[K] verification steps that verified k + 1 draft tokens."""
    accepted: tuple[tuple[int, ...], ...]
    """[K][K] of the steps that verified k + 1 draft tokens, those that accepted position i + 1 and all before it."""

    @property
    def num_drafts(self) -> int:
        """Verification steps with draft tokens."""
        return sum(self.steps)

    @property
    def num_draft_tokens(self) -> int:
        """Draft tokens verified."""
        return sum(k * steps for k, steps in enumerate(self.steps, start=1))

    @property
    def accepted_per_position(self) -> tuple[int, ...]:
        """[K] verification steps that accepted a draft position and all before it, whatever their draft length."""
        return tuple(sum(column) for column in zip(*self.accepted, strict=True))

    @property
    def acceptance_length(self) -> float:
        """Mean tokens emitted per verification step: 1 + accepted / drafts."""
        return 1.0 + sum(self.accepted_per_position) / self.num_drafts if self.num_drafts else 1.0


@dataclass(frozen=True, slots=True)
class Rollout:
    """One generated response."""

    prompt_id: str
    sample_index: int
    prompt_token_ids: list[int]
    token_ids: list[int]
    """The response, including the end-of-sequence token when there is one."""
    log_probs: list[float]
    """Behaviour log-prob of each response token, under the processed sampling distribution."""
    text: str
    finish_reason: str
    """stop or length."""
    versions: Versions
    """What generated its last token."""
    speculation: SpeculationCounts | None
    verification_steps: tuple[tuple[int, int], ...] = ()
    """(draft tokens, accepted ones) of each verification step that verified any, in order."""
    earlier: tuple[Segment, ...] = ()
    """What other versions generated before `versions` did, in order."""

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All tokens of the response by what generated them, as the engine stamped them."""
        start = self.earlier[-1].end if self.earlier else 0
        return (*self.earlier, Segment(self.versions, start, len(self.token_ids)))

    @property
    def drafted_throughout(self) -> bool:
        """Was every token after the first emitted by a verification step?

        Where drafting paused, the drafter's cache has gaps: what it reaches afterwards is not what is expected of it.
        """
        counts = self.speculation
        if counts is None:
            return False
        # The last step may have emitted more than the response holds.
        return 1 + counts.num_drafts + sum(counts.accepted_per_position) >= len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ScoredRollout:
    """A rollout with its reward and advantage."""

    rollout: Rollout
    reward: float
    advantage: float


@dataclass(frozen=True, slots=True)
class WeightPayload:
    """Weights on their way to the engines: one safetensors file in Hugging Face checkpoint names."""

    path: str
    num_bytes: int
    digests: dict[str, str]
    """Checksum of each tensor's bytes (see transport/payload.py)."""


@dataclass(frozen=True, slots=True)
class SwapReport:
    """One weight update as an engine saw it."""

    seconds: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GainReport:
    """What speculation gained in an engine over its steps since the last report, steps that compute prompts left out.

    Reports of several engines add up.
    """

    num_steps: int = 0
    seconds: float = 0.0
    """What these engine steps took together."""
    seconds_without: float = 0.0
    """What the generated tokens would have taken without speculation, by the measured times of engine steps. Steps
    without draft tokens count as they are."""
    seconds_without_checked: float = 0.0
    """The same, corrected by how far trials without speculation were off those times."""
    num_checks: int = 0
    """Steps of such trials that the correction rests on."""
    trial_seconds: float = 0.0
    """Part of `seconds` that went into trials of other draft lengths than the chosen one."""
    longest_draft: int = 0
    """Most draft tokens that a step asked for and that a later step could verify; 0: no step could verify any."""
    seconds_at: list[list[float]] = field(default_factory=list)
    """[batch sizes][K+1] what the tokens decoded at a batch size would have taken at draft lengths 0 to K, if every draft
    token were rejected. Empty before engine steps are measured; several engines have a row each for a batch size."""

    def __add__(self, other: "GainReport") -> "GainReport":
        sums = (ours + theirs for ours, theirs in zip(astuple(self), astuple(other), strict=True))
        return replace(GainReport(*sums), longest_draft=max(self.longest_draft, other.longest_draft))

    @property
    def speedup_vs_no_speculation(self) -> float:
        """Decoding speed against no speculation, trials included; 1.0 without any steps."""
        return self.seconds_without / self.seconds if self.seconds else 1.0

    def metrics(self) -> dict[str, float]:
        """As rollout/... metrics; the checked gain is left out before the first check."""
        values = {"rollout/speedup_vs_no_speculation": self.speedup_vs_no_speculation}
        if self.seconds:
            values["rollout/speculation_trial_share"] = self.trial_seconds / self.seconds
        if self.seconds and self.num_checks:
            values["rollout/speculation_gain_measured"] = self.seconds_without_checked / self.seconds
        return values


class StepTotal(NamedTuple):
    """Engine steps of one kind, added up."""

    num_speculative_tokens: int
    """Drafted for each request at the end of each step."""
    batch: int
    kind: str
    """prompts: computes prompts, perhaps beside decoding. steady: decodes, and verifies as many tokens of each request as it
    drafts. mixed: decodes, and verifies other numbers."""
    num_steps: int
    num_tokens: int
    """Generated."""
    seconds: float


class Window(NamedTuple):
    """What the speculation controller of an engine has seen since the window before."""

    gain: GainReport | None
    """None while the draft length is fixed."""
    steps: list[StepTotal]


@dataclass(frozen=True, slots=True)
class RolloutBatch:
    """What one step of generation returns."""

    rollouts: list[Rollout]
    features: list[Any]
    """Hidden states of some of the rollouts (cotrain/transport/features.py): files, or what was read from them."""
    speculation: SpeculationCounts | None
    seconds: float
    num_generated_tokens: int
    feature_stats: dict[str, float] = field(default_factory=dict)
    gain: GainReport | None = None
    """Over all engines; None while draft lengths are fixed."""
    exposed: float = 1.0
    """Share of `seconds` in which the learner waited for rollouts."""
