"""The tokenizer that lies beside a model's weights."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from .gguf import from_gguf
from .older import READERS
from .tokenizer import Tokenizer

FILES = ("tokenizer.json", *(name for names in READERS for name in names))


def stored_tokenizer(origin: Path | None) -> Tokenizer | None:
    """The tokenizer in a checkpoint folder or a GGUF file; None if there is none."""
    if origin is None:
        return None
    files = [origin] if origin.is_file() else [origin / name for name in FILES]
    found = next((file for file in files if file.exists()), None)
    return None if found is None else read_tokenizer(origin, found.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def read_tokenizer(origin: Path, changed: int) -> Tokenizer | None:
    """Read the tokenizer once, and again if its file has `changed`."""
    return from_gguf(origin) if origin.is_file() else Tokenizer.load(origin)
