"""`cotrain models`: what a policy can do, in plain sentences, from its config.json. No weights are read."""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cotrain.models.capability import (
    REFUSED_ON_CPU,
    architecture_of,
    class_in_transformers,
    class_in_vllm,
    drafter_problems,
    has_gated_delta_net,
)
from cotrain.models.loading import BUILT, built, config_folder, config_problem
from cotrain.process.cluster import engine_device
from drafters.config import KINDS, DrafterModelConfig
from drafters.files import read_config, text_fields
from drafters.mtp.formats import without_head
from pipelines.help import CommandParser


def main(arguments: Sequence[str]) -> int:
    """Print what the policy can do. Returns 1 if it cannot be trained. Raises ValueError if there is no such model here."""
    parser, text = CommandParser("models"), "bundled:..., tiny:..., a hub id, or a folder with a config.json"
    parser.add_argument("name", metavar="NAME|FOLDER", help=text)
    name = parser.parse_args(arguments).name
    folder = built(name) if name in BUILT else config_folder(name)
    print("\n".join(facts(name, folder)))
    return int(config_problem(without_head(read_config(folder))) is not None)


def facts(name: str, folder: Path) -> Iterator[str]:
    """Say what the policy called name can do, a sentence a line; the first needs no torch. folder: the one with its config.json."""
    config, on_cpu = without_head(read_config(folder)), engine_device() == "cpu"
    if problem := config_problem(config):
        yield f"{name} cannot be trained: {problem}."
        return
    family, trained = text_fields(config)["model_type"], class_in_transformers(config["model_type"])
    _, served = class_in_vllm(architecture_of(config)) or ("", "")
    yield f"{name} is of family {family}: transformers trains it as {trained}, and vLLM serves it as {served}."
    reasons = {kind: _drafting_problem(config, folder, kind, on_cpu) for kind in KINDS}
    can = ", ".join(kind for kind, reason in reasons.items() if reason is None) or "none"
    yield f"Drafters that can be trained for it: {can}. A history (rollout.history) can always draft."
    yield from (f"Not {kind}: {reason}." for kind, reason in reasons.items() if reason is not None)
    yield from _limits(config, on_cpu)


def _drafting_problem(config: dict[str, Any], folder: Path, kind: str, on_cpu: bool) -> str | None:
    drafter = TypeAdapter[Any](DrafterModelConfig).validate_python({"type": kind})
    try:
        problems = drafter_problems(config, folder, drafter, on_cpu)
    except ValueError as error:
        return str(error)
    # Without the field, and the advice to look here or to take another kind.
    return re.sub(r"drafter\.model\.type: |; (use type|`cotrain models).*", "", "; ".join(problems)) or None


def _limits(config: dict[str, Any], on_cpu: bool) -> Iterator[str]:
    fields = text_fields(config)
    if positions := fields.get("max_position_embeddings"):
        yield f"Prompt, response and draft have at most {positions:,} positions."
    if has_gated_delta_net(config):
        dtype = "on a CPU rollout.dtype must be bfloat16, without a prefix cache"
        yield f"Its linear attention allows one GPU an engine; {dtype}."
    if "text_config" in config:
        yield "It is served and trained on text alone; `cotrain export` keeps the rest, such as its image encoder."
    if on_cpu and (reason := REFUSED_ON_CPU.get(fields["model_type"])):
        yield f"It needs a GPU: {reason}."
