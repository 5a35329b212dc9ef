"""What a run needs of its machine before anything is created: caches that can be written."""

import os
from pathlib import Path

CACHES = ("COTRAIN_CACHE", "HF_HOME", "VLLM_CACHE_ROOT")
"""Environment variables with the places of caches, which otherwise lie in user_cache()."""


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


def can_write(path: Path) -> bool:
    """Return whether this process may write a file or into a folder, or make it."""
    there = nearest(path)
    return (there.is_dir() or there == path.absolute()) and os.access(there, os.W_OK, effective_ids=True)


def nearest(path: Path) -> Path:
    """Return the absolute path if it exists, and else the first folder above it that does."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
