"""What an environment needs in which only a host's engines are: cotrain without its extra `trainer`."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

from tests.sidecar_parts import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
OWN = {"cotrain", "drafters"}
(IN_ENGINE,) = (
    contract["source_modules"]
    for contract in PROJECT["tool"]["importlinter"]["contracts"]
    if contract["name"] == "what runs in a host's engine needs no more than vLLM does"
)


def needed_by(files: Iterable[str]) -> set[str]:
    """Packages that these files import when they are imported themselves."""
    names = set[str]()
    for file in files:
        for node in ast.parse(Path(file).read_text()).body:
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names.add(node.module or "")
    return {name.partition(".")[0] for name in names} - OWN - sys.stdlib_module_names


def test_an_engine_needs_no_more_than_the_dependencies() -> None:
    loaded = "[m.__file__ for n, m in sys.modules.items() if n.split('.')[0] in ('cotrain', 'drafters')]"
    command = [sys.executable, "-c", f"import sys, {', '.join(IN_ENGINE)}\nprint('', *{loaded}, sep='\\n')"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    files = [line for line in found.stdout.splitlines() if line.startswith(f"{ROOT}/")]
    assert needed_by(files) == {*PROJECT["project"]["dependencies"], "vllm"}


def test_the_dependencies_are_not_pinned_and_the_trainers_are_in_an_extra() -> None:
    names, extras = PROJECT["project"]["dependencies"], PROJECT["project"]["optional-dependencies"]
    assert all(re.fullmatch(r"[a-z]+", name) for name in names)
    assert {re.match(r"[a-z]+", line)[0] for line in extras["trainer"]} >= {*names, "ray", "mlflow", "transformers"}
    assert "cotrain[trainer]" in extras["dev"], "what `make setup` installs"
