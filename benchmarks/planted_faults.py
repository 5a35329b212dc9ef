"""Plant faults into the source, one at a time, and see whether the tests notice.

    python benchmarks/planted_faults.py [--only NAME...] [--json FILE]

Each fault of planted_faults.toml replaces one piece of a file, in a copy of the working tree, and the tests named with it
run on the copy. A fault is caught when one of them fails. Outside tests/engine, tests marked `engine` run only if they are named
one by one. Faults whose tests need a vLLM engine take minutes.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = Path(__file__).with_suffix(".toml")


def caught_by(tree: Path, fault: dict) -> str | None:
    """The first test that fails with the fault in the tree, or None. Raises ValueError when it cannot be planted."""
    file = tree / fault["file"]
    source = file.read_text()
    if source.count(fault["find"]) != 1:
        raise ValueError(f"{fault['name']}: {fault['file']} has {source.count(fault['find'])} places to plant it in")
    file.write_text(source.replace(fault["find"], fault["replace"]))
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *fault["tests"]]
    if not any(test.startswith("tests/engine") or "::" in test for test in fault["tests"]):
        command += ["-m", "not engine"]
    try:
        run = subprocess.run(
            command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, capture_output=True, text=True
        )
    finally:
        file.write_text(source)
    if run.returncode == 0:
        return None
    failed = [line for line in run.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failed[0].split(" - ")[0] if failed else "collection"


def main() -> None:
    """Print a line for each fault, and how many were caught."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="these faults alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results here too")
    args = parser.parse_args()
    faults = tomllib.loads(LIST.read_text())["fault"]
    chosen = [fault for fault in faults if args.only is None or fault["name"] in args.only]
    results = {}
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / "tree"
        ignored = shutil.ignore_patterns(".git", ".venv", "runs", "__pycache__", ".*_cache")
        shutil.copytree(ROOT, tree, ignore=ignored)
        for fault in chosen:
            started = time.monotonic()
            found = results[fault["name"]] = caught_by(tree, fault)
            seconds = time.monotonic() - started
            print(f"{'caught' if found else 'MISSED':7} {seconds:6.0f} s  {fault['name']}: {found or ''}", flush=True)
    print(f"caught {sum(map(bool, results.values()))} of {len(results)} faults")
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
