"""Starter files for every part, in the order a learner needs them, in NumPy and in PyTorch."""

from __future__ import annotations

import ast
import os
import re
from importlib.resources import files
from pathlib import Path

from clearhead.files import write_atomically

ENGINES = ("numpy", "torch")


def starters(engine: str, language: str = "en") -> dict[str, str]:
    """Return file name -> text, in order."""
    folder = files(__name__) / engine
    found = sorted((item for item in folder.iterdir() if item.name.endswith(".txt")), key=lambda item: item.name)
    texts = {item.name.removesuffix(".txt") + ".py": item.read_text(encoding="utf-8") for item in found}
    return texts if language == "en" else {name: translate(text) for name, text in texts.items()}


def translate(text: str) -> str:
    """Replace the English docstrings of a starter by Chinese ones; code, `Read:` and `Check:` lines stay."""
    from .zh import TEXTS

    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef):
            old = ast.get_docstring(node, clean=False)
            if old is not None:
                body = old.partition("\n\nRead:")[0]
                text = text.replace(f'"""{body}', f'"""{TEXTS[body.splitlines()[0]]}', 1)
    return text


def titles(engine: str, language: str = "en") -> dict[str, str]:
    """Return file name -> the exercise's title."""
    first = {name: text.splitlines()[0].strip('"') for name, text in starters(engine, language).items()}
    return {name: line.split(". ", 1)[1] for name, line in first.items()}


def write(folder: Path, engine: str, language: str = "en") -> list[Path]:
    """Write the starter files. Existing files are not overwritten."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, text in starters(engine, language).items():
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
