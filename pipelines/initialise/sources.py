"""Where the rollouts of `cotrain init` come from: prompts for the policy to answer, or responses that are there."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cotrain.config.schema import DatasetRollouts, PolicyRollouts, RunConfig
from cotrain.controller import request_seed
from cotrain.records import RolloutRequest
from cotrain.tasks.base import build_task
from cotrain.tasks.datasets import existing_column, find_prompt_column, load_rows, split_question
from cotrain.tasks.messages import chat_messages
from cotrain.tasks.prompt_order import PromptSampler
from cotrain.tasks.prompts import PromptEncoder
from pipelines.initialise.corpus import StoredRollout, read_recorded

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class PromptStream:
    """An endless series of prompts in seeded order; used-up prompts come again in another order with new samples."""

    num_prompts: int
    encode: Callable[[int], tuple[str, list[int]]]
    """Index -> (prompt id, token ids)."""
    samples_per_prompt: int
    seed: int
    notes: tuple[str, ...] = ()

    def requests(self, first: int, count: int) -> list[RolloutRequest]:
        """All samples of the prompts number first to first + count - 1 of the series."""
        order = PromptSampler(self.num_prompts, 1, self.seed)
        requests = []
        for number in range(first, first + count):
            epoch, position = divmod(number, self.num_prompts)
            order.restore({"epoch": epoch, "position": position})
            prompt_id, token_ids = self.encode(order.next()[0])
            for sample in range(epoch * self.samples_per_prompt, (epoch + 1) * self.samples_per_prompt):
                seed = request_seed(self.seed, 0, prompt_id, sample)
                requests.append(RolloutRequest(prompt_id, sample, token_ids, seed))
        return requests


@dataclass(frozen=True)
class GivenRollouts:
    """Responses that need not be generated."""

    rollouts: list[StoredRollout]
    notes: tuple[str, ...] = ()


Source = PromptStream | GivenRollouts


def open_source(config: RunConfig, model: Path, fingerprints: dict[str, str]) -> Source:
    """The source of [init.source], read and checked. Raises ValueError naming its field."""
    source = config.init.source
    if isinstance(source, DatasetRollouts):
        try:
            return _from_dataset(source, config, _tokenizer(model))
        except ValueError as error:
            raise ValueError(str(error).replace("task.", "init.source.")) from error
    if isinstance(source, PolicyRollouts):
        task = build_task(config.task, config.seed)
        encoder = PromptEncoder(_tokenizer(model), config.rollout.max_prompt_tokens)

        def encode(index: int) -> tuple[str, list[int]]:
            prompt = task.prompt(index)
            return prompt.id, encoder.encode(prompt)

        return PromptStream(len(task), encode, config.rollout.samples_per_prompt, config.seed)
    rollouts, about = read_recorded(source.path, fingerprints)
    ours = sampling(config)
    differing = [
        f"{name} {value}, now {ours[name]}" for name, value in about["sampling"].items() if value != ours[name]
    ]
    notes = [f"the rollouts were sampled with {'; '.join(differing)}"] if differing else []
    kept = [r for r in rollouts if _fits(config, r.prompt_token_ids, r.token_ids)]
    if left_out := len(rollouts) - len(kept):
        notes.append(f"{left_out} of {len(rollouts)} rollouts are longer than rollout.max_*_tokens and left out")
    return _given(kept, source.path, notes)


def sampling(config: RunConfig) -> dict[str, float]:
    """How responses are drawn."""
    rollout = config.rollout
    return {"temperature": rollout.temperature, "top_p": rollout.top_p, "top_k": rollout.top_k}


def _from_dataset(source: DatasetRollouts, config: RunConfig, tokenizer: Any) -> Source:
    rows = load_rows(source)
    column = find_prompt_column(source, rows.column_names)
    if source.response_column is not None:
        existing_column(source.response_column, "task.response_column", rows.column_names)
    name, limit = Path(source.path).stem, config.rollout.max_prompt_tokens
    prompts: list[tuple[str, list[int]]] = []
    given: list[StoredRollout] = []
    for index, row in enumerate(rows):
        where = f"row {index} of {source.path}"
        question, last_message = split_question(row[column], column, where)
        messages = chat_messages(question, "")
        token_ids = _template(tokenizer, messages, add_generation_prompt=True)
        prompts.append((f"{name}-{index}", token_ids))
        if source.response_column is not None:
            response = last_message if source.response_column == column else row[source.response_column]
            given.append(_given_rollout(f"{name}-{index}", messages, token_ids, response, tokenizer, where))
    fitting = [(prompt_id, ids) for prompt_id, ids in prompts if len(ids) <= limit]
    notes = []
    if left_out := len(prompts) - len(fitting):
        notes.append(f"{left_out} of {len(prompts)} prompts are over rollout.max_prompt_tokens = {limit} and left out")
    if not fitting:
        raise ValueError(f"task.path: {source.path} has no prompt within rollout.max_prompt_tokens = {limit}")
    if source.response_column is None:
        return PromptStream(
            len(fitting), fitting.__getitem__, config.rollout.samples_per_prompt, config.seed, tuple(notes)
        )
    random.Random(config.seed).shuffle(given)
    kept = [r for r in given if _fits(config, r.prompt_token_ids, r.token_ids)]
    if left_out := len(given) - len(kept):
        notes = [
            f"{left_out} of {len(given)} examples are over rollout.max_prompt_tokens or max_new_tokens and left out"
        ]
    return _given(kept, source.path, notes)


def _given(rollouts: list[StoredRollout], path: str, notes: list[str]) -> GivenRollouts:
    if not rollouts:
        raise ValueError(f"init.source.path: {path} has no rollout within rollout.max_prompt_tokens and max_new_tokens")
    return GivenRollouts(rollouts, tuple(notes))


def _given_rollout(
    prompt_id: str, messages: Messages, prompt: list[int], response: Any, tokenizer: Any, where: str
) -> StoredRollout:
    """A response as the policy would have written it: from the opened turn to the end-of-sequence token."""
    if not isinstance(response, str) or not response:
        raise ValueError(f"task.response_column: {where} has the response {response!r}; it must be a text")
    whole = _template(tokenizer, [*messages, {"role": "assistant", "content": response}], add_generation_prompt=False)
    if whole[: len(prompt)] != prompt:
        raise ValueError(
            f"task.response_column: {where}: the chat template of policy.model rewrites the prompt when a response "
            "follows it; leave response_column out, and the policy answers"
        )
    token_ids = whole[len(prompt) :]
    if tokenizer.eos_token_id in token_ids:  # templates go on with a line break, which no policy writes
        token_ids = token_ids[: token_ids.index(tokenizer.eos_token_id) + 1]
    return StoredRollout(prompt_id, 0, prompt, token_ids, "stop")


def _fits(config: RunConfig, prompt: list[int], response: list[int]) -> bool:
    rollout = config.rollout
    return len(prompt) <= rollout.max_prompt_tokens and 0 < len(response) <= rollout.max_new_tokens


def _template(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> list[int]:
    ids = tokenizer.apply_chat_template(
        messages, add_generation_prompt=add_generation_prompt, tokenize=True, return_dict=False
    )
    return list(ids)


def _tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)
