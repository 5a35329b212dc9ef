"""cotrain-engine, the distribution for a host's environment: what its wheel holds is what an engine imports."""

import re
import subprocess
import sys
import tomllib
from typing import Any

from tests.sidecar_parts import ROOT


def read(path: str) -> dict[str, Any]:
    return tomllib.loads((ROOT / path).read_text())


WHOLE, ENGINE = read("pyproject.toml"), read("packaging/engine/pyproject.toml")
(IN_ENGINE,) = (
    contract["source_modules"]
    for contract in WHOLE["tool"]["importlinter"]["contracts"]
    if contract["name"] == "what runs in a host's engine needs no more than vLLM does"
)


def test_the_wheel_holds_what_an_engine_imports() -> None:
    names = (
        "sorted(sys.modules[name].__file__ for name in sys.modules if name.split('.')[0] in ('cotrain', 'drafters'))"
    )
    command = [sys.executable, "-c", f"import sys, {', '.join(IN_ENGINE)}\nprint('', *{names}, sep='\\n')"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    imported = [line.removeprefix(f"{ROOT}/") for line in found.stdout.splitlines() if line.startswith(f"{ROOT}/")]
    files = ENGINE["tool"]["hatch"]["build"]["targets"]["wheel"]["force-include"]
    assert files == {f"../../{path}": path for path in imported}


def test_both_distributions_have_the_same_plugin_version_and_pythons() -> None:
    assert ENGINE["project"]["entry-points"] == WHOLE["project"]["entry-points"]
    assert ENGINE["project"]["requires-python"] == WHOLE["project"]["requires-python"]
    assert ENGINE["tool"]["hatch"]["version"]["path"] == f"../../{WHOLE['tool']['hatch']['version']['path']}"


def test_dependencies_are_those_of_vllm_and_have_no_pins() -> None:
    names = ENGINE["project"]["dependencies"]
    assert all(re.fullmatch(r"[a-z]+", name) for name in names)
    assert {"vllm", "ray", "mlflow", "transformers"}.isdisjoint(names)
