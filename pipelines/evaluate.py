"""`cotrain evaluate`: scores the policy of a run, or in a folder, on the prompts of [validation], on one engine."""

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path

from cotrain.acceptance_stats import counts_of
from cotrain.config.errors import ConfigError
from cotrain.config.load import load_config
from cotrain.config.schema import EnvironmentTask, RunConfig
from cotrain.models.loading import resolve_model
from cotrain.process.threads import num_cores
from cotrain.records import Rollout, ScoredRollout
from cotrain.tasks.base import build_score
from cotrain.tasks.held_out import HeldOut
from cotrain.tasks.prompts import load_tokenizer, write_samples
from drafters.base import TargetSpec
from drafters.build import kind_of, load_drafter
from drafters.files import read_object, write_json
from pipelines.engines import EngineSetup, one_engine, prepared_command, provenance
from pipelines.export.command import export
from pipelines.help import CommandParser
from pipelines.page.record import find
from pipelines.preflight import find_problems


def main(arguments: Sequence[str]) -> int:
    """Print the policy's mean reward, and write it with the responses. Raises ValueError before an engine starts, TaskFailed after."""
    parser = CommandParser("evaluate")
    parser.add_argument("policy", metavar="RUN|FOLDER", help="a run, for its newest checkpoint, or a policy")
    parser.add_argument("config", nargs="*", metavar="CONFIG", help="TOML files, and overrides section.field=value")
    text = "a new folder (default evaluate-<date> in the run root)"
    parser.add_argument("--out", type=Path, metavar="DIR", help=text)
    args = parser.parse_intermixed_args(arguments)
    with prepared_command("evaluate", args, _prepare) as (out, (name, config, held_out, setup), say):
        say(f"{len(held_out.requests)} responses to {len(held_out.prompts)} prompts of {name}")
        rollouts = asyncio.run(_generate(setup, held_out, config.seed))
        own = config.held_out
        assert own is not None
        score = build_score(own.task, own.seed)
        rewards = [score(prompt, texts) for prompt, texts in held_out.responses(rollouts)]
        figures, flat = held_out.figures(rollouts, rewards), [reward for of_prompt in rewards for reward in of_prompt]
        if counts := counts_of(rollouts):
            figures["acceptance_length"] = counts.acceptance_length
        write_json(out / "evaluate.json", provenance(args) | {"policy": name} | figures)
        scored = [ScoredRollout(rollout, reward, 0.0) for rollout, reward in zip(rollouts, flat, strict=True)]
        tokenizer, prompts = load_tokenizer(setup.model), {prompt.id: prompt for prompt in held_out.prompts}
        write_samples(out / "samples.jsonl", scored, prompts, tokenizer)
        say(
            f"reward {figures['reward']:.3f} +- {figures['reward_error']:.3f} (standard error over prompts), responses of "
            f"{figures['response_length']:.0f} tokens, {figures['truncated']:.0%} cut off\n"
            f"written to {out}/: evaluate.json, samples.jsonl, engine.log"
        )
    return 0


def _prepare(args: argparse.Namespace, scratch: Path) -> tuple[str, RunConfig, HeldOut, EngineSetup]:
    """Read the configuration, export a run's policy to `scratch`, and check and encode the prompts. Raises ValueError.

    Returns also what the policy is called.
    """
    overrides = [text for text in args.config if "=" in text and not Path(text).is_file()]
    files, name = [text for text in args.config if text not in overrides], args.policy
    try:
        run = find(name)
    except ValueError:  # a model's name
        if not files:
            raise
        run = Path(name)
    if run.is_dir() and "policy" in read_object(run / "config.json"):
        config, folder = load_config(files, [*overrides, f"run_root={run.parent}"], run.name), scratch / "policy"
        name = f"{run}, {export(run, folder, merged=True)[1]}"
    elif files:
        config, folder = load_config(files, overrides), run
    else:
        raise ValueError(f"CONFIG: {run} is a policy's folder; give a configuration with [validation]")
    if config.validation is None:
        raise ValueError("validation: there is no such table; give a CONFIG that has it")
    if isinstance(config.validation.task, EnvironmentTask):
        raise ValueError("validation.task: an environment is scored by a run alone; give a CONFIG with another task")
    own = folder / "drafter" if (folder / "drafter").is_dir() else None
    policy = config.policy.model_copy(update={"model": str(folder)})
    config = config.model_copy(update={"policy": policy, "drafter": config.drafter if own else None})
    if problems := find_problems(config, True, "evaluate"):
        raise ConfigError(problems)
    model = resolve_model(str(folder))
    drafter = None
    if own is not None:
        drafter = load_drafter(own, TargetSpec.from_pretrained(model), config.rollout.positions(kind_of(own)))
    return name, config, HeldOut(config, load_tokenizer(model)), EngineSetup(model, [], config.rollout, drafter, own)


async def _generate(setup: EngineSetup, held_out: HeldOut, seed: int) -> list[Rollout]:
    async with one_engine(setup, seed, num_cores()) as engine:
        await engine.set_num_speculative_tokens(None)  # the engine chooses, if it may
        return (await engine.generate(held_out.requests, tap=0.0, **held_out.sampling)).rollouts
