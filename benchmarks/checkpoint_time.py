"""Time and bytes of one checkpoint of a run, by who writes it.

    python -m benchmarks.checkpoint_time [--model bundled:smollm2-135m-instruct] [--folder DIR] [--versions 4] [--rounds 3]

The learner and the drafter trainer of a run, in one process, with the optimizers' moments and with features of as many policy
versions as drafter.buffer.max_age allows. In a run each role writes its part in a process of its own, while the engines generate the
next step: that step waits for "begin" alone, the last one of a run for all.
"""

import argparse
import contextlib
import os
import platform
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from cotrain.config.load import load_config
from cotrain.config.schema import RunConfig
from cotrain.models.loading import resolve_model
from cotrain.policy.learner import PolicyLearner
from cotrain.records import Rollout, ScoredRollout, Segment, Versions
from cotrain.run.checkpoint import RunState, new_checkpoint
from cotrain.run.run_dir import RunDir
from cotrain.trainer.spec import trainer_spec
from cotrain.trainer.trainer import DrafterTrainer
from cotrain.transport.features import FeatureRecord
from drafters.base import SamplingParams, TargetSpec

TOKENS, RESPONSE = 64, 20


def rollout(number: int) -> ScoredRollout:
    """A rollout of random tokens."""
    versions, tokens = Versions(0, 0), torch.randint(1000, (TOKENS,)).tolist()
    one = Rollout(
        str(number), 0, tokens[:-RESPONSE], tokens[-RESPONSE:], [-1.0] * RESPONSE, "", "stop", versions, (),
        (Segment(versions, 0, RESPONSE),),
    )  # fmt: skip
    return ScoredRollout(one, 0.0, 1.0 - 2 * (number % 2))


def features(target: TargetSpec, layers: tuple[int, ...], version: int) -> FeatureRecord:
    """Random features of a rollout."""
    mask = torch.ones(TOKENS, dtype=torch.bool)
    mask[-1] = False
    width, tokens = target.hidden_size, torch.randint(1000, (TOKENS,))
    hidden = torch.randn(TOKENS, (len(layers) + 1) * width)
    sampling = SamplingParams(0.6, 1.0, 0, "probabilistic")
    return FeatureRecord(
        tokens, hidden[:, width:], hidden[:, :width], mask, TOKENS - RESPONSE, version, sampling, layers
    )


def roles(config: RunConfig, model: Path, folder: Path, versions: int) -> tuple[PolicyLearner, DrafterTrainer]:
    """Return a learner and a trainer after a step of each."""
    learner = PolicyLearner(config.policy, config.rollout, str(model), 10)
    learner.update([rollout(number) for number in range(4)])
    trainer, target = DrafterTrainer(trainer_spec(config), model, None), TargetSpec.from_pretrained(model)
    head = {"model.embed_tokens.weight": torch.randn(target.vocab_size, target.hidden_size)}
    save_file(head, folder / "head.safetensors")
    for version in range(versions + 1):
        trainer.set_target_weights(folder / "head.safetensors", version)
        if version < versions:  # the next step has yet to generate with the newest one
            records = [features(target, trainer.serving().aux_layers, version) for _ in range(32)]
            trainer.take_in(records, 0, ())
    trainer.train(1, 1)
    return learner, trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:smollm2-135m-instruct")
    parser.add_argument("--folder", help="where to write; by default a temporary folder")
    parser.add_argument("--versions", type=int, default=4, help="policy versions in the trainer's buffer")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    config = load_config(["configs/quickstart.toml"], [f"policy.model={args.model}"])
    best: dict[str, list[tuple[float, float]]] = defaultdict(list)

    @contextlib.contextmanager
    def stage(name: str) -> Iterator[None]:
        began, cpu = time.perf_counter(), time.process_time()
        yield
        best[name].append((time.perf_counter() - began, time.process_time() - cpu))

    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        learner, trainer = roles(config, resolve_model(args.model), folder, args.versions)
        print(f"{date.today()}  {platform.node()}, {os.cpu_count()} cores, torch {torch.__version__}; {args.model}")
        with RunDir(folder, "run", resumed=False) as run_dir:
            for step in range(1, args.rounds + 1):
                sizes = save(learner, trainer, run_dir, step, stage)
    for name, taken in best.items():
        wall, cpu = (min(row[i] for row in taken) for i in (0, 1))
        print(f"{name:42} {wall:6.2f} s, {cpu:6.2f} s of a core")
    print("  ".join(f"{name} {size / 1e6:.0f} MB" for name, size in sizes.items()))


def save(learner: PolicyLearner, trainer: DrafterTrainer, run_dir: RunDir, step: int, stage: Any) -> dict[str, int]:
    """Save a checkpoint. Returns the bytes of each part."""
    with contextlib.ExitStack() as stack:
        with stage("begin, which the step waits for"):
            folder = stack.enter_context(new_checkpoint(run_dir, RunState(step, Versions(step, 0), {}, {}), 1))
        with stage("policy, beside the next step"):
            learner.save(folder / "policy")
        if hasattr(trainer, "drop_earlier_versions"):
            trainer.drop_earlier_versions()
        with stage("drafter, beside the next step"):
            trainer.save(folder / "drafter")
        with stage("digests, COMPLETE, rename, old one deleted"):
            stack.close()
    files = [path for path in run_dir.checkpoint(step).rglob("*") if path.is_file()]
    return {
        part: sum(path.stat().st_size for path in files if part in path.parts)
        for part in ("policy", "drafter", "trainer.pt")
    }


if __name__ == "__main__":
    main()
