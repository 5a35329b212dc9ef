"""study.json and the runs it names: arms x seeds, and what each arm measured in the last third of its steps."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, PositiveInt, ValidationError

from pipelines.page.record import RunRecord, mean, read_object, read_run, total

GENERIC, IN_DOMAIN = "generic", "in-domain"
"""Initialisations whose gap co-training is measured against."""


class ArmRun(BaseModel):
    """One arm with one seed."""

    seed: int
    folder: str
    """Relative to the study's folder."""
    status: Literal["finished", "failed", "missing"]
    error: str | None = None


class Arm(BaseModel):
    """One combination of what the study varies."""

    name: str
    init: str
    """none (random), a name of the study's [inits] such as generic or in-domain, or the checkpoint given."""
    model: str = ""
    """Type of the drafter, and its fields that differ from the shared configuration."""
    online: bool
    """The drafter is co-trained; False: frozen."""
    policy: Literal["moving", "frozen"]
    draft_tokens: int
    """0 without speculation."""
    objective: str
    speculation: bool
    runs: list[ArmRun]

    @property
    def initialisation(self) -> str:
        """init, written one way: "In_Domain" is in-domain."""
        return self.init.lower().replace("_", "-")


class StudyFile(BaseModel):
    """study.json."""

    name: str
    steps: PositiveInt
    seeds: list[int]
    arms: list[Arm]


@dataclass(frozen=True)
class Spread:
    """Mean over seeds, with the lowest and the highest."""

    mean: float
    low: float
    high: float
    num_seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.2f}" + (f" ({self.low:.2f}..{self.high:.2f})" if self.low < self.high else "")


@dataclass(frozen=True)
class ArmRecord:
    """An arm with the records of its finished runs, by seed."""

    arm: Arm
    runs: Mapping[int, RunRecord]
    problems: Sequence[tuple[int, str]]
    """(seed, what went wrong) of the others."""


@dataclass(frozen=True)
class Study:
    folder: Path
    file: StudyFile
    arms: Sequence[ArmRecord]

    @property
    def first_counted_step(self) -> int:
        """First step of the last third of the study."""
        return self.file.steps - max(1, self.file.steps // 3) + 1

    def measure(self, record: ArmRecord, of: Callable[["Study", RunRecord], float | None]) -> Spread | None:
        """Over the seeds that have a value; None of none."""
        return spread({seed: of(self, run) for seed, run in record.runs.items()})

    def gain(self, record: ArmRecord, of: Callable[["Study", RunRecord], float | None]) -> Spread | None:
        """Ratio to the no-speculation arm of the same policy and seed."""
        ratios: dict[int, float | None] = {}
        baselines = (other for other in self.arms if not other.arm.speculation)
        for plain in (other for other in baselines if other.arm.policy == record.arm.policy):
            for seed in record.runs.keys() & plain.runs.keys():
                ours, base = of(self, record.runs[seed]), of(self, plain.runs[seed])
                ratios[seed] = ours / base if ours is not None and base else None
        return spread(ratios)


def read_study(folder: Path) -> Study:
    """Raises ValueError naming study.json and each of its fields that is wrong.

    A run that is said to be finished but cannot be read becomes a problem of its arm.
    """
    path = folder / "study.json"
    content = read_object(path, f"give the folder of a study; {folder} is none")
    try:
        file = StudyFile.model_validate(content)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
        raise ValueError(f"{path}: not a study ({wrong}); run cotrain ablate again, which rewrites it") from None
    return Study(folder, file, [_read_arm(folder, arm) for arm in file.arms])


def _read_arm(folder: Path, arm: Arm) -> ArmRecord:
    runs: dict[int, RunRecord] = {}
    problems: list[tuple[int, str]] = []
    for run in arm.runs:
        if run.status != "finished":
            problems.append((run.seed, run.error or ("not run yet" if run.status == "missing" else "failed")))
            continue
        try:
            runs[run.seed] = read_run(folder / run.folder)
        except ValueError as error:
            problems.append((run.seed, f"finished, but {error}"))
    return ArmRecord(arm, runs, problems)


def spread(by_seed: Mapping[int, float | None]) -> Spread | None:
    """Over the seeds that have a value; None of none."""
    values = [value for value in by_seed.values() if value is not None]
    return Spread(sum(values) / len(values), min(values), max(values), len(values)) if values else None


def acceptance_length(study: Study, run: RunRecord) -> float | None:
    """Mean over the last third of the steps."""
    return mean(_counted(study, run, "rollout/acceptance_length"))


def reward(study: Study, run: RunRecord) -> float | None:
    """Mean over the last third of the steps."""
    return mean(_counted(study, run, "policy/reward"))


def generation_speed(study: Study, run: RunRecord) -> float | None:
    """Generated tokens per second of generation, mean over the last third of the steps."""
    return mean(_counted(study, run, "rollout/tokens_per_s"))


def step_speed(study: Study, run: RunRecord) -> float | None:
    """Generated tokens per second of whole steps, training and swaps included, over the last third of the steps."""
    seconds = total(_counted(study, run, "time/step_s"))
    return total(_counted(study, run, "rollout/generated_tokens")) / seconds if seconds else None


def position_rates(study: Study, record: ArmRecord) -> list[Spread]:
    """Acceptance rate of draft positions 1..k, up to the first that no run measured."""
    rates: list[Spread] = []
    for position in range(1, record.arm.draft_tokens + 1):
        metric = f"rollout/acceptance_rate_pos_{position}"
        found = spread({seed: mean(_counted(study, run, metric)) for seed, run in record.runs.items()})
        if found is None:
            break
        rates.append(found)
    return rates


def curve(study: Study, record: ArmRecord, metric: str) -> list[Spread | None]:
    """A value for each step of the study, over the seeds."""
    by_step = {seed: dict(zip(run.steps, run.column(metric), strict=True)) for seed, run in record.runs.items()}
    return [
        spread({seed: values.get(step) for seed, values in by_step.items()}) for step in range(1, study.file.steps + 1)
    ]


@dataclass(frozen=True)
class GapClosed:
    """(generic co-trained - generic frozen) / (in-domain frozen - generic frozen), over seeds that have all three."""

    online: Arm
    share: Spread | None
    """None when there is no gap, or an arm is missing."""
    reason: str
    """Why there is no share; empty when there is one."""
    lengths: tuple[float, float, float] | None
    """Acceptance lengths: generic frozen, generic co-trained, in-domain frozen."""


def gaps_closed(study: Study) -> list[GapClosed]:
    """One for each arm that co-trains the generic drafter."""
    generic = (record for record in study.arms if record.arm.initialisation == GENERIC)
    return [_gap_closed(study, record) for record in generic if record.arm.online]


def _gap_closed(study: Study, online: ArmRecord) -> GapClosed:
    frozen, in_domain = (_frozen(study, init, online.arm) for init in (GENERIC, IN_DOMAIN))
    if frozen is None or in_domain is None:
        what = GENERIC if frozen is None else IN_DOMAIN
        return GapClosed(online.arm, None, f"the study has no frozen {what} arm to compare with", None)
    trios = {
        seed: (low, value, high)
        for seed in online.runs.keys() & frozen.runs.keys() & in_domain.runs.keys()
        if (low := acceptance_length(study, frozen.runs[seed])) is not None
        and (value := acceptance_length(study, online.runs[seed])) is not None
        and (high := acceptance_length(study, in_domain.runs[seed])) is not None
    }
    if not trios:
        return GapClosed(online.arm, None, "no seed has finished all three arms", None)
    low, value, high = (sum(trio[i] for trio in trios.values()) / len(trios) for i in range(3))
    if any(top <= bottom for bottom, _, top in trios.values()):
        reason = "the in-domain drafter is not better than the generic one for every seed: there is no gap to close"
        return GapClosed(online.arm, None, reason, (low, value, high))
    shares = [(middle - bottom) / (top - bottom) for bottom, middle, top in trios.values()]
    # Of the means over seeds: a seed with a small gap would outweigh the others in a mean of shares.
    share = Spread((value - low) / (high - low), min(shares), max(shares), len(shares))
    return GapClosed(online.arm, share, "", (low, value, high))


def _frozen(study: Study, init: str, like: Arm) -> ArmRecord | None:
    """The frozen arm of an initialisation, same policy and k; of the same objective where there is one."""
    found = [
        record
        for record in study.arms
        if (record.arm.initialisation, record.arm.online, record.arm.speculation) == (init, False, True)
        and (record.arm.policy, record.arm.draft_tokens) == (like.policy, like.draft_tokens)
    ]
    return next((record for record in found if record.arm.objective == like.objective), found[0] if found else None)


def _counted(study: Study, run: RunRecord, metric: str) -> list[float | None]:
    return [row.get(metric) for row in run.rows if row["step"] >= study.first_counted_step]
