"""Which configurations of block drafters cotrain reads, as a Markdown table.

python -m benchmarks.published_configs FOLDER     # of JSON files, such as `configs` of sgl-project/SpecForge
"""

import sys
from pathlib import Path

from drafters.base import TargetSpec
from drafters.block import dspark, model
from drafters.build import ARCHITECTURES
from drafters.config import BLOCK_DRAFTERS
from drafters.files import read_object


def main() -> None:
    print("| configuration | architecture | |\n|---|---|---|")
    for file in sorted(Path(sys.argv[1]).glob("*.json")):
        config = read_object(file, "a drafter")
        architecture = str((config.get("architectures") or [None])[0])
        kind = ARCHITECTURES.get(architecture)
        if kind in BLOCK_DRAFTERS or any(name in file.name for name in BLOCK_DRAFTERS):
            print(f"| {file.stem} | {architecture} | {'; '.join(problems(config, kind, file.parent)) or 'read'} |")


def problems(config: dict[str, object], kind: str | None, folder: Path) -> list[str]:
    if kind not in BLOCK_DRAFTERS:
        return ["refused: another architecture"]
    found = [*model.problems_of(config, TargetSpec.from_config(config, folder), folder)]
    found += [*dspark.problems_of(config)] if kind == "dspark" else []
    return [f"refused: {problem}" for problem in found]


if __name__ == "__main__":
    main()
