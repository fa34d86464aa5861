"""Files that are whole or not there, and are what was written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def written_aside(path: Path) -> Iterator[Path]:
    """A name to write under; what is written takes its own name, and the place of what had it, once it is whole."""
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is not a file that could be written anew; name another")
    part = path.with_name(f"{path.name}.part")
    try:
        yield part
        settle(part)
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def write_atomically(path: Path, text: str) -> None:
    with written_aside(path) as part:
        part.write_text(text, encoding="utf-8")


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def let_read(path: Path) -> None:
    """The rights that a new file has here: what safetensors writes, nobody but its owner could read."""
    hidden = os.umask(0)
    os.umask(hidden)
    path.chmod(0o666 & ~hidden)


def settle(path: Path) -> None:
    """Onto the disk, not only into its cache. A folder's entry cannot be on every system, and need not be."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
