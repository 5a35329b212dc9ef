"""The functions of vLLM that our code replaces, as they are in the version that we know.

When one of them has other parameters, an engine refuses to start, and `cotrain doctor` says why.
"""

import ast
import functools
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

KNOWN_VERSION = "0.32"
SIDECAR_VERSIONS = ("0.29", "0.30", "0.31", "0.32", "0.33")
"""Versions of vLLM whose engines cotrain may join when somebody else starts them."""

RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
SPECULATOR = "vllm.v1.worker.gpu.spec_decode.speculator:BaseSpeculator"

Table = dict[str, str]
"""Parameters of functions, in order, by module:Class.function; `interface.toml` says which of them are named."""

_TABLES: dict[str, Table] = tomllib.loads(Path(__file__).with_name("interface.toml").read_text(encoding="utf-8"))
WRAPPED = _TABLES["wrapped"]
"""What ours replace in cotrain's own engines, with model runner V1 and with V2."""
SIDECAR, SIDECAR_OF_RUNNER = _TABLES["sidecar"], {False: _TABLES["sidecar_v1"], True: _TABLES["sidecar_v2"]}
"""What the sidecar replaces or calls in all of SIDECAR_VERSIONS, whatever the model runner, and by whether that is V2."""
SPECULATOR_TAKES = SIDECAR_OF_RUNNER[True][f"{SPECULATOR}.propose"].split()[1:-1]
"""First arguments that V2 passes to its speculator."""


def wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Replace a function of a module, class or object by `hook`, once. `hook` gets the original as its first argument."""
    original = getattr(owner, name)
    if not hasattr(original, "cotrain_hook"):
        wrapped: Any = functools.wraps(original)(lambda *args, **options: hook(original, *args, **options))
        wrapped.cotrain_hook = hook
        setattr(owner, name, wrapped)


def computes_prompts(output: Any) -> bool:
    """Return whether a step (vLLM's SchedulerOutput) computes more of any request than its last token and the draft tokens after it.

    That is the case for prompts, in chunks or whole, and for what is computed again after a preemption or an update of
    the policy.
    """
    drafts = output.scheduled_spec_decode_tokens
    more = any(num - len(drafts.get(request, ())) > 1 for request, num in output.num_scheduled_tokens.items())
    # A new request looks like decoding when all of its prompt but one token is in the cache.
    return more or bool(output.scheduled_new_reqs)


def moved_in(sources: Path, table: Table) -> list[str]:
    """Return what differs from a table like SIDECAR in the sources of a vLLM, by name. Nothing is imported.

    sources: the folder that holds the package's folder `vllm`.
    """
    found = {path: parameters_in(sources, path) for path in table}
    return [
        f"{path} is missing" if found[path] is None else f"{path} takes ({found[path]}) instead of ({names})"
        for path, names in table.items()
        if found[path] != names and not (names.endswith(" ...") and f"{found[path]} ".startswith(names[:-3]))
    ]


def parameters_in(sources: Path, path: str) -> str | None:
    """The positional parameters of module:function or module:Class.method, or None where there is no such function."""
    module, _, names = path.partition(":")
    file = sources / f"{module.replace('.', '/')}.py"
    body: list[Any] = _parsed(file).body if file.exists() else []
    place: Any = None
    for name in names.split("."):
        place = next((node for node in body if getattr(node, "name", None) == name), None)
        body = getattr(place, "body", [])
    return None if place is None else " ".join(argument.arg for argument in place.args.args)


@functools.lru_cache(maxsize=4)  # entries of the tables that are in one file follow each other
def _parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())
