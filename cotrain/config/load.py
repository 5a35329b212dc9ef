"""Read a configuration from TOML files and key=value overrides. Errors list all wrong fields or, without any, all broken rules.

Later files win over earlier ones, and overrides win over files. config.json holds the same fields for machines.
"""

import json
import re
import tomllib
from collections.abc import Callable, Sequence
from functools import partial, reduce
from pathlib import Path
from typing import Any

from cotrain.config.errors import AnySection, ConfigError, did_you_mean, validated
from cotrain.config.rules import broken_rules
from cotrain.config.schema import RunConfig, default_run_root
from drafters.config import Section
from drafters.files import read_object, write_json

Table = dict[str, Any]

INIT = (
    "policy.train=false", "drafter.train=true", "drafter.train_when=always", "drafter.gate.publish_when=always", "validation=none",
)  # fmt: skip
"""The overrides that make a run `cotrain init`: it trains a drafter alone, whether that pays in this run or not."""


def load(
    root: type[AnySection],
    rules: Callable[[AnySection], list[str]],
    files: Sequence[str | Path],
    overrides: Sequence[str] = (),
    resume: str | None = None,
) -> AnySection:
    """Load defaults, then files from left to right, then overrides such as "policy.optimizer.learning_rate=1e-6"; later wins.

    An override's value is read as TOML, a bare word as a string, and `none` as "not set". With `resume`, the saved
    configuration of that run comes before the files. `rules` returns a line for each broken rule between fields. Raises
    ConfigError listing all problems.
    """
    tables = read_tables(files, overrides)
    if resume is not None:
        run_root = reduce(merge, tables, Table()).get("run_root", default_run_root())
        tables = [_saved_table(Path(run_root), resume), *tables, {"name": resume}]
    return parse(root, rules, reduce(merge, tables, Table()))


def read_tables(files: Sequence[str | Path], overrides: Sequence[str]) -> list[Table]:
    """Return a table for each file, then one for each override. Raises ConfigError listing all that cannot be read."""
    problems, tables = [], []
    for read, texts in ((_read_toml, files), (_read_override, overrides)):
        for text in texts:
            try:
                tables.append(read(str(text)))
            except ValueError as error:
                problems.append(str(error))
    if problems:
        raise ConfigError(problems)
    return tables


def parse(root: type[AnySection], rules: Callable[[AnySection], list[str]], fields: Table) -> AnySection:
    """Build a configuration from its fields. Raises ConfigError listing all wrong fields, else all broken rules."""
    config = validated(root, fields)
    if broken := rules(config):
        raise ConfigError(broken)
    return config


load_config = partial(load, RunConfig, broken_rules)
parse_config = partial(parse, RunConfig, broken_rules)
"""`load` and `parse` for the configuration of a run."""


def merge(earlier: Table, later: Table) -> Table:
    """Merge tables key by key. Any other value is replaced by the later one, and so is a table whose `type` changes."""
    merged = dict(earlier)
    for key, value in later.items():
        old = merged.get(key)
        if isinstance(old, dict) and isinstance(value, dict) and value.get("type") in (None, old.get("type")):
            value = merge(old, value)
        merged[key] = value
    return merged


def write_config(config: Section, path: Path) -> None:
    """Write config.json; `read_config` gives an equal object."""
    write_json(path, config.model_dump(mode="json"))


def read_config(path: Path) -> RunConfig:
    """Read config.json. Raises ValueError when it is damaged, or from a version with other fields."""
    return parse_config(read_object(path))


def to_toml(config: Section | Table) -> str:
    """The whole configuration as TOML that loads to an equal object. Fields that are not set are comments."""
    return "\n".join(_toml_lines("", config if isinstance(config, dict) else config.model_dump(mode="json"))) + "\n"


def _toml_lines(path: str, value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        names = {key: key if re.fullmatch(r"[\w-]+", key, re.ASCII) else _toml_value(key) for key in value}
        return [line for key in value for line in _toml_lines(f"{path}.{names[key]}".lstrip("."), value[key])]
    return [f"# {path} is not set" if value is None else f"{path} = {_toml_value(value)}"]


def _toml_value(value: Any) -> str:
    """Write a value as TOML, which is JSON on one line except for surrogate pairs, a bare DEL, and the colon after a key."""
    text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return re.sub(r'("(?:[^"\\]|\\.)*")(:?)', lambda match: match[1] + (" =" if match[2] else ""), text)


def _read_toml(name: str) -> Table:
    path = Path(name)
    if not path.is_file():
        others = sorted(str(other) for other in path.parent.glob("*.toml"))
        raise ValueError(f"{path}: no such file{did_you_mean(path, others)}")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: not valid TOML: {error}") from None


def _read_override(text: str) -> Table:
    path, equals, value = text.partition("=")
    if not equals or not all(re.fullmatch(r"\w[\w-]*", name) for name in path.split(".")):
        raise ValueError(f"{text}: not an override; write section.field=value, for example rollout.temperature=0.8")
    try:
        parsed = tomllib.loads(f"value = {value}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    return table_of(path, None if value == "none" else parsed["value"] if len(parsed) == 1 else value)


def table_of(path: str, value: Any) -> Table:
    """Return the nested tables that hold this value at a dotted path."""
    return Table(reduce(lambda inner, name: {name: inner}, reversed(path.split(".")), value))


def _saved_table(run_root: Path, name: str) -> Table:
    path = run_root / name / "config.json"
    if not path.is_file():
        runs = sorted(lock.parent.name for lock in run_root.glob("*/run.lock"))
        listed = f"it holds {', '.join(runs)}" if runs else "it holds no runs; set run_root=... if they are elsewhere"
        raise ConfigError([f"--resume {name}: no such run in {run_root} ({listed}){did_you_mean(name, runs)}"])
    return read_object(path) | {"run_root": str(run_root)}
