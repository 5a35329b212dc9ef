"""Prompts from a dataset file, folder or hub id, in any of the three schemas of docs/guide/tasks.md."""

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cotrain.config.schema import DatasetTask
from cotrain.records import Prompt
from cotrain.tasks.prompts import chat_messages, encode_prompt, split_question
from cotrain.tasks.rewards import REWARDS, check_answer, columns_taken

log = logging.getLogger(__name__)

FILE_TYPES = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
GSM8K_ANSWER = re.compile(r"(?<!#)####(?!#)([^\n]*)\s*$")
"""The end of GSM8K's solutions, in their last line."""

MOST_LISTED = 10  # bad rows that an error lists; it counts the others


def read_prompts(config: DatasetTask, tokenizer: Any = None, max_prompt_tokens: int = 0) -> list[Prompt]:
    """Read and check all prompts of a dataset at once.

    tokenizer: also check that every prompt can be encoded, in max_prompt_tokens at most. Raises ValueError naming the field of
    [task] and, for a column, the ones that the dataset has. All rows that cannot be used are listed together, unless
    task.skip_bad_rows leaves them out: then a warning counts them.
    """
    from datasets import Value

    rows = load_rows(config.path, config.split)
    column = _prompt_column(config, rows.column_names)
    answer_column = _answer_column(config, column, rows.column_names)
    if answer_column and getattr(rows.features[answer_column], "dtype", "") == "float32":
        # By its text, 0.1 stays 0.1; Python would make 0.10000000149011612 of it.
        rows = rows.cast_column(answer_column, Value("string")).cast_column(answer_column, Value("float64"))
    taken = columns_taken(config.reward, rows.column_names)
    prompts, bad = list[Prompt](), list[str]()
    for index, row in enumerate(rows.select_columns(list({column, answer_column or column, *taken}))):
        try:
            messages, answer = split_question(row[column])
            if answer_column is not None:
                answer = _read_answer(row[answer_column])
            for reward in config.reward:
                check_answer(reward, answer)
            messages = chat_messages(messages, config.instruction, config.system_prompt)
            prompt = Prompt(f"{Path(config.path).stem}-{index}", messages, answer, {name: row[name] for name in taken})
            if tokenizer is not None:
                encode_prompt(tokenizer, prompt, max_prompt_tokens)
            prompts.append(prompt)
        except ValueError as error:
            bad.append(f"row {index}: {error}")
    count = f"{len(bad):,} of the {len(rows):,} rows of {config.path}"
    if bad and not (config.skip_bad_rows and prompts):
        more = [f"and {len(bad) - MOST_LISTED:,} more"] if len(bad) > MOST_LISTED else []
        fix = (
            "mend or remove them, change the field that a line names, or leave them out with task.skip_bad_rows = true"
        )
        head = f"task.path: {count} cannot be used:"
        raise ValueError("\n      ".join([head, *bad[:MOST_LISTED], *more, fix]))
    if bad:
        log.warning("left out: %s, such as %s", count, bad[0])
    return prompts


def load_rows(source: str, split: str) -> Any:
    """Read the rows as a datasets.Dataset. Raises ValueError naming the field to correct."""
    import datasets

    path = Path(source).expanduser()
    if is_file_or_folder(source) and not path.exists():
        raise ValueError(f"task.path: no file or folder '{source}' in {Path.cwd()}")
    if path.is_file() and path.suffix not in FILE_TYPES:
        raise ValueError(f"task.path: {source} must end in {', '.join(FILE_TYPES)}")
    datasets.disable_progress_bars()
    try:
        if (path / "dataset_info.json").is_file():
            return datasets.load_from_disk(str(path))
        if path.is_file():
            return datasets.load_dataset(FILE_TYPES[path.suffix], data_files=str(path), split=split)
        if path.is_dir():
            return datasets.load_dataset(str(path), split=split)
        owner, name, *configuration = source.split("/")
        return datasets.load_dataset(f"{owner}/{name}", *configuration, split=split)
    except Exception as error:  # datasets, pyarrow and the hub each raise types of their own
        what = f"task.path or task.split: cannot read {source}: {error.__cause__ or error}"
        fix = "Give a json, jsonl or parquet file, a folder of them, or a hub id that the network reaches"
        raise ValueError(f"{what}. {fix}") from error


def is_file_or_folder(path: str) -> bool:
    """Whether task.path is a file or a folder rather than a hub id."""
    return Path(path).suffix in FILE_TYPES or path.startswith((".", "/", "~")) or Path(path).exists()


def _prompt_column(config: DatasetTask, columns: list[str]) -> str:
    """Return prompt_column if it is set, else the first column that a schema names."""
    if media := {"images", "videos"} & set(columns):
        what = f"policies read text only, and there is a column {min(media)}"
        raise ValueError(f"task.path: {what}; remove it if it is empty")
    names = ["prompt", "messages"] if "reward_model" in columns else ["messages", "prompt", "question"]
    return _column("prompt_column", [config.prompt_column] if config.prompt_column else names, columns)


def _answer_column(config: DatasetTask, prompt_column: str, columns: list[str]) -> str | None:
    """Return the answer column; None if answers come from the last message, or if a user's own reward may need none."""
    names = [name for name in ("reward_model", "answer") if name != prompt_column]
    needed = prompt_column != "messages" and not REWARDS.keys().isdisjoint(config.reward)
    if config.answer_column is None and not needed and not set(names) & set(columns):
        return None
    return _column("answer_column", [config.answer_column] if config.answer_column else names, columns)


def _column(field: str, names: list[str], columns: list[str]) -> str:
    for name in names:
        if name in columns:
            return name
    raise ValueError(f"task.{field}: no column {' or '.join(names)}; name one of these: {', '.join(columns)}")


def _read_answer(cell: Any) -> Any:
    """Return verl's ground truth, the end of a solution of GSM8K, or the cell. Raises ValueError if verl's is no JSON."""
    if isinstance(cell, str) and re.match(r"""\s*\{.*['"]ground_truth['"]\s*:""", cell, re.DOTALL):
        try:
            cell = json.loads(cell)
        except ValueError:
            raise ValueError("its answer is a text with a ground_truth, but is not JSON") from None
    if isinstance(cell, Mapping) and "ground_truth" in cell:
        cell = cell["ground_truth"]
    if not isinstance(cell, str):
        return cell
    solution = GSM8K_ANSWER.search(cell)
    return (solution[1] if solution else cell).strip()
