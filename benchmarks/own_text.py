"""Text of a policy's own on the prompts of a run's configuration, for benchmarks that train drafters on it (stored_text.py).

    python -m benchmarks.own_text runs/trial configs/quickstart.toml steps=10 rollout.temperature=1.0

Each of `steps` generates the rollouts of one step of a run, without speculation, and adds a line with their token ids.
"""

import argparse
import asyncio
from pathlib import Path
from typing import TextIO

from cotrain.config.load import load_config, write_config
from cotrain.config.schema import RunConfig
from cotrain.models.loading import resolve_model
from cotrain.process.children import engine_output_to
from cotrain.process.threads import num_cores
from cotrain.records import RolloutRequest, derived_seed
from cotrain.run.rows import RowFile
from cotrain.tasks.base import build_task
from cotrain.tasks.prompts import PromptOrder, encode_prompt, load_tokenizer
from pipelines.engines import EngineSetup, one_engine

TEXT = "rollouts.jsonl"
"""File with the token ids of each step's prompts and responses."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path, help="a new folder")
    parser.add_argument("config", nargs="+", help="TOML files, and overrides key=value")
    options = parser.parse_args()
    overrides = [text for text in options.config if "=" in text]
    config = load_config([text for text in options.config if text not in overrides], overrides)
    options.out.mkdir(parents=True)
    write_config(config, options.out / "config.json")
    with engine_output_to(options.out / "engine.log") as console:
        asyncio.run(generate(config, options.out / TEXT, console))


async def generate(config: RunConfig, file: Path, console: TextIO) -> None:
    rollout, model = config.rollout, resolve_model(config.policy.model)
    task, tokenizer = build_task(config.task, config.seed, model, rollout.max_prompt_tokens), load_tokenizer(model)
    order, text = PromptOrder(len(task), rollout.prompts_per_step, config.seed), RowFile(file, 0)
    async with one_engine(EngineSetup(model, [], rollout, None, None), config.seed, num_cores()) as engine:
        for step in range(1, config.steps + 1):
            requests = list[RolloutRequest]()
            for prompt in (task[index] for index in order.step(step)):
                token_ids = encode_prompt(tokenizer, prompt, rollout.max_prompt_tokens)
                for sample in range(rollout.samples_per_prompt):
                    seed = derived_seed(config.seed, step, prompt.id, sample)
                    requests.append(RolloutRequest(prompt.id, sample, token_ids, seed))
            batch = await engine.generate(requests)
            written = [{"prompt_token_ids": r.prompt_token_ids, "token_ids": r.token_ids} for r in batch.rollouts]
            text.write(step, {"rollouts": written})
            print(f"step {step}/{config.steps}, {batch.num_generated_tokens} tokens", file=console)


if __name__ == "__main__":
    main()
