"""reasoning-gym tasks: generated problems, scored by the task's own verifier."""

import dataclasses
import difflib
import logging
import random
from typing import Any

from cotrain.config.schema import ReasoningGymTask
from cotrain.records import Prompt
from cotrain.tasks.answers import extract_answer, extract_number, number_in
from cotrain.tasks.prompts import chat_messages, encode_prompt

logger = logging.getLogger(__name__)

NUM_CHECKED = 64
"""Problems that are checked before a run starts. Some tasks take half a second to generate one, so not all are."""


class ReasoningGymProblems:
    """Problems of one reasoning-gym task. A verifier may give partial credit, as some of reasoning-gym's do."""

    def __init__(self, config: ReasoningGymTask, seed: int, tokenizer: Any = None, max_prompt_tokens: int = 0) -> None:
        """tokenizer: also check the length of the first prompts. Raises ValueError naming the field and its possible values."""
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
            fix = f"parameters are {', '.join(known)} (set task.size and seed beside them)"
            raise ValueError(f"task.parameters: {config.name}: {error}; {fix}") from error
        _ = self[0]  # some parameters fail only here
        for index in range(0 if tokenizer is None else min(NUM_CHECKED, config.size)):
            encode_prompt(tokenizer, self[index], max_prompt_tokens)

    def __len__(self) -> int:
        return self._config.size

    def __getitem__(self, index: int) -> Prompt:
        """Return the problem of that index; its answer is reasoning-gym's whole entry, which the verifier needs."""
        entry = self._dataset[index]
        messages = chat_messages(entry["question"], self._config.instruction, self._config.system_prompt)
        return Prompt(id=f"{self._config.name}-{index}", messages=messages, answer=entry)

    def score(self, prompt: Prompt, response: str) -> float:
        """Return the verifier's score of the final answer in the response (cotrain.tasks.answers has the rule)."""
        expected = prompt.answer["answer"]
        answer = (extract_answer if number_in(expected) is None else extract_number)(response)
        try:
            return float(self._dataset.score_answer(answer, prompt.answer))
        except Exception as error:
            # Some verifiers, prime_factorization for one, raise on text that is not in the form they expect.
            logger.warning("%s: the verifier raised on %r (%r); scored 0", prompt.id, answer[:80], error)
            return 0.0
