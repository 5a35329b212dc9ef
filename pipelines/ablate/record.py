"""study.json: the arms of a study, and how each run of each arm ended."""

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, PositiveInt, ValidationError

from cotrain.config.files import write_json
from pipelines.page.folders import STUDY, read_object

Status = Literal["finished", "failed", "missing"]


class ArmRun(BaseModel):
    """One arm with one seed."""

    seed: int
    folder: str
    """Relative to the study's folder."""
    status: Status = "missing"
    error: str | None = None


class Arm(BaseModel):
    """One combination of what the study varies, with everything filled in."""

    name: str
    init: str
    """none (random), a name of the study's [inits] such as generic or in-domain, or the checkpoint given."""
    model: str = ""
    """Type of the drafter; none without speculation."""
    online: bool
    """The drafter is co-trained; False: frozen."""
    policy: Literal["moving", "frozen"]
    num_speculative_tokens: int
    """0 without speculation."""
    objective: str
    """Type of the objective; none without speculation."""
    speculation: bool
    runs: list[ArmRun]


class StudyRecord(BaseModel):
    """study.json."""

    name: str
    steps: PositiveInt
    seeds: list[int]
    arms: list[Arm]

    def write(self, folder: Path) -> None:
        """The file is whole at any moment."""
        write_json(folder / STUDY, self.model_dump())


def read_record(folder: Path) -> StudyRecord:
    """Raises ValueError naming study.json and each of its fields that is wrong."""
    path = folder / STUDY
    content = read_object(path)
    try:
        return StudyRecord.model_validate(content)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, part['loc']))}: {part['msg']}" for part in error.errors())
        raise ValueError(f"{path}: not a study ({wrong}); run cotrain ablate again, which rewrites it") from None
