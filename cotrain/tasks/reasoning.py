"""reasoning-gym tasks: generated problems, scored by the task's own verifier."""

import dataclasses
import difflib
import logging
import random

from cotrain.config.schema import ReasoningGymTask
from cotrain.records import Prompt
from cotrain.tasks.prompts import chat_messages
from cotrain.tasks.rewards import NUMBER, extract_answer, extract_number

logger = logging.getLogger(__name__)


class ReasoningGymProblems:
    """Problems of one reasoning-gym task. A verifier may give partial credit, as some of reasoning-gym's do."""

    def __init__(self, config: ReasoningGymTask, seed: int) -> None:
        """Raises ValueError naming task.name or task.parameters, with the possible values."""
        import reasoning_gym
        from reasoning_gym.composite import DatasetSpec
        from reasoning_gym.factory import DATASETS

        if config.name not in DATASETS:
            close = difflib.get_close_matches(config.name, DATASETS, n=3) or sorted(DATASETS)
            raise ValueError(f"task.name: reasoning-gym has no task '{config.name}'; it has {', '.join(close)}")
        # reasoning-gym seeds problem i with seed + i: neighbouring seeds would share nearly all problems.
        own = {"size": config.size, "seed": random.Random(seed).getrandbits(31)}
        self._config, parameters = config, dict(config.parameters)
        try:
            if config.name == "composite":
                parameters["datasets"] = [DatasetSpec(**spec) for spec in parameters.get("datasets", [])]
            self._dataset = reasoning_gym.create_dataset(config.name, **own, **parameters)
        except (TypeError, ValueError, AssertionError) as error:
            known = [field.name for field in dataclasses.fields(DATASETS[config.name][1]) if field.name not in own]
            raise ValueError(
                f"task.parameters: {config.name}: {error}; parameters are {', '.join(known)} (set task.size and seed "
                "beside them)"
            ) from error
        self.prompt(0)

    def __len__(self) -> int:
        return self._config.size

    def prompt(self, index: int) -> Prompt:
        """Return the problem of that index; its answer is reasoning-gym's whole entry, which the verifier needs."""
        entry = self._dataset[index]
        messages = chat_messages(entry["question"], self._config.instruction, self._config.system_prompt)
        return Prompt(id=f"{self._config.name}-{index}", messages=messages, answer=entry)

    def score(self, prompt: Prompt, response: str) -> float:
        """Return the verifier's score of the final answer in the response (cotrain.tasks.rewards has the rule)."""
        expected = prompt.answer["answer"]
        extract = extract_number if isinstance(expected, str) and NUMBER.fullmatch(expected.strip()) else extract_answer
        answer = extract(response)
        try:
            return float(self._dataset.score_answer(answer, prompt.answer))
        except Exception as error:
            # Some verifiers, prime_factorization for one, raise on text that is not in the form they expect.
            logger.warning("%s: the verifier raised on %r (%r); scored 0", prompt.id, answer[:80], error)
            return 0.0
