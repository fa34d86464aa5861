"""Files that are whole or not there, and are what was written."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def write_atomically(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    settle(part)
    os.replace(part, path)


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def settle(path: Path) -> None:
    """Onto the disk, not only into its cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
