"""Starter files for every part, in the order a learner needs them, in NumPy and in PyTorch."""

from __future__ import annotations

import os
import re
from importlib.resources import files
from pathlib import Path

from clearhead.files import write_atomically

ENGINES = ("numpy", "torch")


def starters(engine: str) -> dict[str, str]:
    """File name -> text, in order."""
    folder = files(__name__) / engine
    found = sorted((item for item in folder.iterdir() if item.name.endswith(".txt")), key=lambda item: item.name)
    return {item.name.removesuffix(".txt") + ".py": item.read_text(encoding="utf-8") for item in found}


def write(folder: Path, engine: str) -> list[Path]:
    """Write the starter files. Existing files are not overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in starters(engine).items():
        path = folder / name
        if not os.path.lexists(path):
            write_atomically(path, text)
            written.append(path)
    return written


def next_exercise(path: Path) -> Path | None:
    """Return the next exercise in the folder."""
    if not re.match(r"\d\d_", path.name):
        return None
    later = sorted(p for p in path.parent.glob("[0-9][0-9]_*.py") if p.name > path.name)
    return later[0] if later else None
