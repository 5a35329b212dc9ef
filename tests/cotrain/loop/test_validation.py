"""Held-out prompts between the steps of a run, with simulated roles."""

from typing import Any

import pytest

from cotrain.engine.tools import Tools
from cotrain.process.failures import TaskFailed
from cotrain.records import Rollout, RolloutBatch, Versions
from cotrain.run.checkpoint import latest_checkpoint
from cotrain.run.rows import read_rows
from cotrain.tasks.base import build_task
from tests.cotrain.publish.simulated_run import GOOD, World
from tests.cotrain.simulated_roles import go, output

TASK = {"type": "reasoning_gym", "name": "chain_sum"}
VALIDATION = {"task": TASK, "every": 2, "num_prompts": 4, "samples_per_prompt": 3}


def scored(controller: Any) -> list[tuple[int, float]]:
    return [(row["step"], row["validation/reward"]) for row in rows(controller) if "validation/reward" in row]


def rows(controller: Any) -> list[dict[str, Any]]:
    return read_rows(controller.run_dir.metrics)


def test_the_served_policy_is_scored_every_few_steps_and_at_the_end(start: Any) -> None:
    controller = start(World(GOOD), steps=5, validation=VALIDATION)
    controller.roles.validation.scorer.begin = lambda prompt, texts: [float(text) for text in texts]
    controller.run()
    assert [step for step, _ in scored(controller)] == [2, 4, 5]
    # Responses to prompt i have 3 i, 3 i + 1 and 3 i + 2 tokens, and are worth as much.
    row = rows(controller)[1]
    assert row["validation/reward"] == row["validation/response_length"] == pytest.approx(5.5)
    assert row["validation/truncated"] == pytest.approx(1 / 3)
    assert row["validation/reward_error"] == pytest.approx((15 / 4) ** 0.5)  # 3 times the error of the mean of 0 to 3
    assert row["time/step_s"] > row["time/validation_s"] > 0
    greedy = {"temperature": 0.0, "top_p": 1.0, "top_k": -1}
    assert controller.roles.engines.validated == [(version, 12, greedy) for version in (2, 4, 5)], "after the swap"
    assert output(controller).count("validation 5.50") == 3


def test_responses_are_drawn_as_rollouts_are_if_they_are_to_be(start: Any) -> None:
    controller = start(World(GOOD), validation=VALIDATION | {"temperature": 0.7})
    go(controller, 2)
    [(_, _, sampling)] = controller.roles.engines.validated
    assert sampling == {"temperature": 0.7}


def test_problems_are_not_those_of_the_run(start: Any) -> None:
    controller = start(World(GOOD), task=TASK, validation=VALIDATION | {"num_prompts": 50})
    task = build_task(controller.config.task, controller.config.seed)
    trained = {str(task[i].messages) for i in range(len(task))}
    assert len({str(prompt.messages) for prompt in controller.roles.validation.held_out.prompts} - trained) > 45


def test_a_reward_that_raises_ends_the_run_once_the_step_is_recorded(start: Any) -> None:
    controller = start(World(GOOD), steps=5, validation=VALIDATION)
    controller.roles.validation.scorer.failing = {"chain_sum-1"}
    with pytest.raises(TaskFailed, match="raised KeyError"):
        controller.run()
    assert [row["step"] for row in rows(controller)] == [1, 2] and scored(controller) == []
    assert latest_checkpoint(controller.run_dir) == controller.run_dir.checkpoint(2)
    controller.run_dir.close()
    resumed = start(World(GOOD), steps=5, validation=VALIDATION)
    resumed.roles.engines.world.step = 2
    resumed.run()
    assert [step for step, _ in scored(resumed)] == [4, 5]


def test_a_held_out_environment_whose_trajectories_all_fail_ends_the_run_too(start: Any) -> None:
    controller = start(World(GOOD), steps=5, validation=VALIDATION)
    played = [
        RolloutBatch([rollout(i)] * 3, [], 1.0, 3 * i, rewards=[0.0, 1.0, 0.5][:i], failures=("it broke",))
        for i in range(4)
    ]
    controller.roles.validation.scorer = Tools([], 3, 8, 1.0, {"temperature": 0.0})
    asked = list[Any]()
    controller.roles.engines.play = lambda *what: asked.append(what) or (played if len(asked) > 1 else [played[2]] * 4)
    with pytest.raises(TaskFailed, match=r"validation.task: .* failed in all of its trajectories: it broke"):
        controller.run()
    assert scored(controller) == [(2, 0.5)], "the mean of what could be played"
    [prompts, answers, tools] = asked[0]
    assert [len(requests) for requests in prompts] == [3] * 4 and len(answers) == 4
    assert tools is controller.roles.validation.scorer


def rollout(tokens: int) -> Rollout:
    return Rollout("p", 0, [1], [2] * tokens, [0.0] * tokens, "", "stop", Versions(0, 0))
