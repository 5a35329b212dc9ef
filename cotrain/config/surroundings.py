"""What a run needs of its machine before anything is created: caches that can be written, and short paths for sockets."""

import os
import tempfile
from pathlib import Path
from uuid import uuid4

CACHES = ("COTRAIN_CACHE", "HF_HOME", "VLLM_CACHE_ROOT")
"""Environment variables with the places of caches, which otherwise lie in user_cache()."""
SOCKET_BYTES = 107
"""Most bytes of the path of a socket, by the kernel's definition of its address."""


def user_cache() -> Path:
    """Return the folder in which this project's libraries have their caches as well."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()


def cache_problems() -> list[str]:
    """Return a line with the variable that helps if there is a cache that this process cannot write."""
    cache, variable = user_cache(), "XDG_CACHE_HOME" if os.environ.get("XDG_CACHE_HOME") else "HOME"
    if all(map(os.environ.get, CACHES)) or can_write(cache):
        return []
    what = "where models, datasets and compiled code are cached"
    return [f"{variable}: {cache} cannot be written, {what}; set {variable} to a folder that can be"]


def socket_problems(private_ray: bool = False) -> list[str]:
    """Return a line with the variable that helps if the paths of the sockets of vLLM, or of a Ray as well, are too long."""
    temporary = tempfile.gettempdir()
    longest = f"{temporary}/{uuid4()}"  # vLLM's
    if private_ray:
        ray = os.environ.get("RAY_TMPDIR") or temporary
        longest = f"{ray}/ray/session_2026-01-01_00-00-00_000000_{os.getpid()}/sockets/plasma_store"
    excess = len(longest.encode()) - SOCKET_BYTES
    what = f"paths of sockets in {temporary} would have {SOCKET_BYTES + excess} bytes, and {SOCKET_BYTES} are the most"
    fix = f"set TMPDIR to a folder whose path is shorter by {excess}, for example /tmp"
    return [f"TMPDIR: {what}; {fix}"] if excess > 0 else []


def can_write(path: Path) -> bool:
    """Return whether this process may write a file or into a folder, or make it."""
    nearest = next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
    return (nearest.is_dir() or nearest == path.absolute()) and os.access(nearest, os.W_OK)
