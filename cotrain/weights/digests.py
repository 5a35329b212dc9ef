"""Files that are hashed while they are written. The digests detect accidental corruption, not attacks. This imports no torch."""

import hashlib
import io
import os
from pathlib import Path
from typing import Any

import xxhash

SUFFIX = ".xxh3"


class DigestedFile(io.BufferedWriter):
    """A new file. When it is closed, it is flushed to the disk and its digest is left in a file beside it, for `take_digest`."""

    def __init__(self, path: str | Path):
        """Create the file, or empty it. Raises OSError."""
        super().__init__(io.FileIO(path, "wb"))
        self._path, self._hash, self._in_order = Path(path), xxhash.xxh3_128(), True

    def write(self, data: Any) -> int:
        """Append bytes. Raises OSError when the disk is full."""
        self._hash.update(data)
        return super().write(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go on elsewhere. A file that was not written from its beginning to its end has to be read for its digest."""
        self._in_order = False
        return super().seek(offset, whence)

    def close(self) -> None:
        """Flush the file to the disk and leave its digest. Raises OSError when the disk is full."""
        if self.closed:
            return
        try:
            self.flush()
            os.fsync(self.fileno())
        finally:
            super().close()
        if self._in_order:
            self._path.with_name(self._path.name + SUFFIX).write_text(self._hash.hexdigest())


def take_digest(path: Path) -> str:
    """Return the digest that was left beside a file, and delete it there; without one, read the file."""
    left = path.with_name(path.name + SUFFIX)
    if not left.is_file():
        return file_digest(path)
    digest = left.read_text()
    left.unlink()
    return digest


def file_digest(path: Path) -> str:
    """Return the xxh3 checksum (128 bits) of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
