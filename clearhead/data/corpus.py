"""What a corpus is: documents that can be read as often as one likes, never all of them at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain


class DataError(ValueError):
    """Data that cannot be used: the message names the place and the way out."""


Piece = tuple[str, bool]  # a text, and whether the loss is taken on it


@dataclass(frozen=True)
class Document:
    """A text in pieces. One that `continues` the document before it is a further part of a file too large to hold."""

    name: str
    pieces: tuple[Piece, ...]
    continues: bool = False

    @property
    def characters(self) -> int:
        return sum(len(text) for text, _ in self.pieces)


@dataclass(frozen=True)
class Corpus:
    """`read()` starts from the beginning and gives the same documents in the same order; `summary` is for people."""

    read: Callable[[], Iterator[Document]]
    summary: str

    def __iter__(self) -> Iterator[Document]:
        """The documents that hold any text."""
        filled = (document for document in self.read() if document.characters)
        first = next(filled, None)
        if first is None:
            raise DataError(f"the corpus is empty: there is no text in {self.summary}")
        return chain([first], filled)

    def texts(self) -> Iterator[str]:
        """All text, for a tokenizer to learn from."""
        return (text for document in self for text, _ in document.pieces)
