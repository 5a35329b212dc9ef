"""What a whole step is worth in each arm of a study, over its whole runs.

    cotrain ablate configs/studies/whole_step/study.toml
    python -m benchmarks.whole_step [runs/whole-step]

Tokens a second against the arm without speculation of the same seed and as many requests at once, since arms write different
text: of generation, and of whole steps, in which the policy's update, the drafter's scoring and training, swaps, checks and the
index count, and validation does not. Where a step's time
goes: generation, the policy's update with what is done beside it, what the drafter takes beyond it (its swap included), the
policy's swap, and the rest. Means over seeds and their standard errors. Prints a Markdown table, and another one of the steps
of an engine with one request, by draft length: milliseconds, also as a ratio to the arm without speculation.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd

from cotrain.records import StepTotal
from cotrain.run.rows import read_rows
from pipelines.page.record import read_run

PARTS = {
    "generation": ["time/generate_s"],
    "policy update": ["time/update_s"],
    "drafter": ["drafter_beyond_update"],
    "policy swap": ["time/swap_policy_s"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", type=Path, nargs="?", default=Path("runs/whole-step"), help="folder of the study")
    folder = parser.parse_args().study
    arms = json.loads((folder / "study.json").read_text())["arms"]
    runs = {
        arm["name"]: {run["seed"]: totals(folder / run["folder"]) for run in arm["runs"] if run["status"] == "finished"}
        for arm in arms
    }
    finished = [(arm["name"], folder / r["folder"]) for arm in arms for r in arm["runs"] if r["status"] == "finished"]
    records = {name: read_run(run) for name, run in finished}
    batches = {name: record.settings.get("rollout.vllm.max_num_seqs") for name, record in records.items()}
    plains = {batches[name]: name for name, record in records.items() if not record.speculates}
    head = ["arm", "whole step", "generation", "acceptance length", "reward", "validation", "seconds a 1,000 tokens"]
    head += [*PARTS, "rest"]
    print("| " + " | ".join(head) + " |\n|---|" + "--:|" * (len(head) - 1))
    for name, of_arm in runs.items():
        if batches.get(name) not in plains:
            continue  # it has not finished, or has nothing to be compared with
        plain = plains[batches[name]]
        both = sorted(set(of_arm) & set(runs[plain]))
        cells = [
            spread([of_arm[s][what] / runs[plain][s][what] for s in both])
            for what in ("step_speed", "generation_speed")
        ]
        cells += [spread([of_arm[s][what] for s in both]) for what in ("acceptance", "reward", "validation")]
        cells.append(f"{np.mean([1000 / of_arm[s]['step_speed'] for s in both]):.1f}")
        cells += [f"{np.mean([of_arm[s][part] for s in both]):.1%}" for part in [*PARTS, "rest"]]
        print(f"| {name} | {' | '.join(cells)} |")
    print("\n| arm | kind | draft length | steps | ms | ratio |\n|---|---|--:|--:|--:|--:|")
    steps = {
        name: engine_steps([folder / r["folder"] for r in arm["runs"]]) for name, arm in zip(runs, arms, strict=True)
    }
    for name, table in steps.items():
        if batches.get(name) not in plains:
            continue
        for (kind, k), row in table.iterrows():
            ratio = row["ms"] / steps[plains[batches[name]]].loc[(kind, 0), "ms"]
            print(f"| {name} | {kind} | {k} | {row['num_steps']:.0f} | {row['ms']:.1f} | {ratio:.2f} |")


def engine_steps(folders: list[Path]) -> pd.DataFrame:
    """Milliseconds of the engine steps of all runs with one request, by kind and draft length, as far as there are 100."""
    rows = [
        total
        for folder in folders
        for row in read_rows(folder / "steps.jsonl")
        for totals in row.get("engines", {}).values()
        for total in totals
    ]
    table = pd.DataFrame(rows, columns=["k", *StepTotal._fields[1:]])
    table = table[(table["batch"] == 1) & table["kind"].isin(["steady", "prompts"])]
    sums = table.groupby(["kind", "k"])[["num_steps", "seconds"]].sum()
    sums["ms"] = 1e3 * sums["seconds"] / sums["num_steps"]
    return sums[sums["num_steps"] >= 100]


def totals(folder: Path) -> dict[str, float]:
    """Over all steps of a run: tokens a second, shares of the time, mean acceptance length, reward of the last third."""
    rows = read_run(folder).metrics
    rows["drafter_beyond_update"] = rows["time/learn_s"] - rows["time/update_s"]
    validation = rows["time/validation_s"].sum() if "time/validation_s" in rows else 0.0
    tokens, seconds = rows["rollout/generated_tokens"].sum(), rows["time/step_s"].sum() - validation
    found = {"step_speed": tokens / seconds, "generation_speed": tokens / rows["time/generate_s"].sum()}
    found |= {part: rows[columns].sum().sum() / seconds for part, columns in PARTS.items()}
    found["rest"] = 1 - sum(found[part] for part in PARTS)
    found["acceptance"] = float(rows.get("rollout/acceptance_length", pd.Series([np.nan])).mean())
    found["reward"] = float(rows["policy/reward"].iloc[-len(rows) // 3 :].mean())
    found["validation"] = float(rows.get("validation/reward", pd.Series([np.nan])).dropna().iloc[-1:].mean())
    return found


def spread(values: list[float]) -> str:
    if not np.isfinite(values).all():
        return "-"
    error = np.std(values, ddof=1) / len(values) ** 0.5 if len(values) > 1 else np.nan
    return f"{np.mean(values):.2f} ± {error:.2f}"


if __name__ == "__main__":
    main()
