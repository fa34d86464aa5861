"""What the tests of data share."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from clearhead.configs.data import BytesConfig
from clearhead.data import Document, Shards, build
from clearhead.tokenize import Tokenizer, make


def plain(*texts: str) -> list[Document]:
    """A document for each text."""
    return [Document(f"text {number}", ((text, True),)) for number, text in enumerate(texts)]


def by_bytes(documents: Iterable[Document], folder: Path, **rest: int) -> Shards:
    """Shards in which a token is a byte."""
    return build(documents, bytes_tokenizer(), folder, **rest)


def bytes_tokenizer() -> Tokenizer:
    return make(BytesConfig(), [])


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
