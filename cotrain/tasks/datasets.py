"""Prompts from a dataset file, folder or hub id, in any of the three schemas of docs/tasks.md."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cotrain.config.schema import DatasetSource, DatasetTask
from cotrain.records import Prompt
from cotrain.tasks.prompts import Messages, chat_messages
from cotrain.tasks.rewards import REWARDS, load_reward

FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
GSM8K_MARKER = "####"


class DatasetProblems:
    """All prompts of a dataset, read and checked at once."""

    def __init__(self, config: DatasetTask) -> None:
        """Raises ValueError naming the field of [task] and, for a column, the ones that the dataset has."""
        self._reward = load_reward(config.reward)
        rows = load_rows(config)
        column = find_prompt_column(config, rows.column_names)
        answer_column = _answer_column(config, column, rows.column_names)
        self._prompts: list[Prompt] = []
        for index, row in enumerate(rows):
            where = f"row {index} of {config.path}"
            question, last_message = split_question(row[column], column, where)
            answer = last_message if answer_column is None else _read_answer(row[answer_column])
            if config.reward in REWARDS and (not isinstance(answer, str) or not answer):
                raise ValueError(
                    f"task.answer_column: {where} has the answer {answer!r}; task.reward = '{config.reward}' needs a text"
                )
            messages = chat_messages(question, config.instruction, config.system_prompt)
            self._prompts.append(Prompt(f"{Path(config.path).stem}-{index}", messages, answer))

    def __len__(self) -> int:
        return len(self._prompts)

    def prompt(self, index: int) -> Prompt:
        return self._prompts[index]

    def score(self, prompt: Prompt, response: str) -> float:
        return self._reward(prompt.messages, response, prompt.answer)


def load_rows(config: DatasetSource) -> Any:
    """Read the rows as a datasets.Dataset. Raises ValueError naming the field to correct."""
    import datasets

    path = Path(config.path).expanduser()
    is_local = path.suffix in FILE_TYPES or config.path.startswith((".", "/", "~"))
    if is_local and not path.exists():
        raise ValueError(f"task.path: no file or folder '{config.path}' in {Path.cwd()}")
    if path.is_file() and path.suffix not in FILE_TYPES:
        raise ValueError(f"task.path: {config.path} must end in {', '.join(FILE_TYPES)}")
    datasets.disable_progress_bars()
    try:
        if path.is_file():
            return datasets.load_dataset(FILE_TYPES[path.suffix], data_files=str(path), split=config.split)
        if (path / "dataset_info.json").is_file():
            return datasets.load_from_disk(str(path))
        if path.is_dir():
            return datasets.load_dataset(str(path), split=config.split)
        owner, name, *configuration = config.path.split("/")
        return datasets.load_dataset(f"{owner}/{name}", *configuration, split=config.split)
    except Exception as error:  # datasets, pyarrow and the hub each raise types of their own
        raise ValueError(
            f"task.path or task.split: cannot read {config.path}: {error.__cause__ or error}. Give a json, jsonl or "
            "parquet file, a folder of them, or a hub id that the network reaches"
        ) from error


def find_prompt_column(config: DatasetSource, columns: list[str]) -> str:
    """Return prompt_column if given, else the first column that a schema names. Raises ValueError listing the columns found."""
    names = ("prompt", "messages") if "reward_model" in columns else ("messages", "prompt", "question")
    return find_column("prompt_column", config.prompt_column, names, columns)


def _answer_column(config: DatasetTask, prompt_column: str, columns: list[str]) -> str | None:
    """Return the answer column; None if answers come from the last message, or if a user's own reward may need none."""
    names = [name for name in ("reward_model", "answer") if name != prompt_column]
    needed = prompt_column != "messages" and config.reward in REWARDS
    if config.answer_column is None and not needed and not set(names) & set(columns):
        return None
    return find_column("answer_column", config.answer_column, names, columns)


def find_column(field: str, given: str | None, names: Sequence[str], columns: list[str]) -> str:
    """Return the column `given` in a field of [task], or else the first of `names` that is there.

    Raises ValueError naming the field and the columns found.
    """
    wanted = names if given is None else [given]
    for name in wanted:
        if name in columns:
            return name
    raise ValueError(f"task.{field}: no column {' or '.join(wanted)}; name one of those found: {', '.join(columns)}")


def split_question(question: str | Messages, column: str, where: str) -> tuple[str | Messages, str | None]:
    """Split a prompt's text or messages into the question and the assistant's last message, which is None if there is none.

    Raises ValueError naming `where` for an empty prompt, and for messages without role or content.
    """
    answer = None
    if isinstance(question, list) and question and question[-1].get("role") == "assistant":
        question, answer = question[:-1], question[-1]["content"]
    if not question or not isinstance(question, str | list):
        raise ValueError(f"task.prompt_column: {where} has no prompt in '{column}'")
    if isinstance(question, list) and not {"role", "content"} <= question[0].keys():
        keys = ", ".join(question[0])
        raise ValueError(f"task.prompt_column: messages need role and content; {where} has {keys}")
    return question, answer


def _read_answer(value: Any) -> Any:
    """Return the answer in a cell: verl's ground truth, the text after GSM8K's marker, or a number as text."""
    if isinstance(value, dict) and "ground_truth" in value:
        value = value["ground_truth"]
    if isinstance(value, str):
        return value.rpartition(GSM8K_MARKER)[2].strip()
    return str(value) if isinstance(value, int | float) else value
