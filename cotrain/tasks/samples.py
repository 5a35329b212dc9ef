"""A few rollouts of each step as readable text."""

import json
from pathlib import Path

from cotrain.records import ScoredRollout
from cotrain.tasks.prompts import PromptEncoder

SAMPLES_PER_STEP = 4


def write_samples(path: Path, rollouts: list[ScoredRollout], prompts: PromptEncoder) -> None:
    """Write the first rollouts of a step as text for a reader, one JSON object a line."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        for scored in rollouts[:SAMPLES_PER_STEP]:
            rollout = scored.rollout
            row = {
                "prompt": prompts.decode(rollout.prompt_token_ids),
                "response": rollout.text,
                "answer": _plain(prompts.prompt(rollout.prompt_id).answer),
                "reward": scored.reward,
                "advantage": scored.advantage,
                "finish_reason": rollout.finish_reason,
                "versions": str(rollout.versions),
                "acceptance_length": rollout.speculation.acceptance_length if rollout.speculation else None,
            }
            file.write(json.dumps(row) + "\n")


def _plain(answer: object) -> object:
    if isinstance(answer, dict):
        return answer.get("answer", str(answer))
    return answer if isinstance(answer, str | int | float | None) else str(answer)
