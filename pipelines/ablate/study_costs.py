"""What the drafters of a study cost: training, swaps and hidden states, arm by arm."""

from collections.abc import Sequence

from pipelines.ablate.study_record import ArmRecord, Study
from pipelines.page.page import Section, Table
from pipelines.page.record import RunRecord, mean

COSTS = (
    ("training, s a step", "drafter/train_s", 1.0),
    ("trained tokens/s", "drafter/tokens_per_s", 1.0),
    ("swap, MB", "drafter/swap_bytes", 1e-6),
    ("swap, s", "drafter/swap_s", 1.0),
    ("features, bytes a token", "rollout/feature_bytes_per_token", 1.0),
    ("tap, % of generation", "rollout/tap_overhead", 100.0),
)


def cost_sections(study: Study, drafting: Sequence[ArmRecord]) -> list[Section]:
    """One section; none when no arm with a drafter has finished."""
    rows = [(record.arm.name, *(_cell(study, record, name, unit) for _, name, unit in COSTS)) for record in drafting]
    if not rows:
        return []
    table = Table(("arm", *(title for title, _, _ in COSTS)), rows, numeric=tuple(range(1, 1 + len(COSTS))))
    text = "Means over the steps in which each was measured, then over seeds. Frozen drafters are neither trained nor swapped."
    return [Section("What the drafters cost", [text], [table])]


def _cell(study: Study, record: ArmRecord, metric: str, unit: float) -> str:
    def measured(_: Study, run: RunRecord) -> float | None:
        value = mean([row.get(metric) for row in run.rows])
        return None if value is None else unit * value

    spread = study.measure(record, measured)
    return "-" if spread is None else f"{spread.mean:.3g}"
