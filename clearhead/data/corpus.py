"""A corpus: documents that can be read many times, without holding all of them in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain


class DataError(ValueError):
    """Data that cannot be used: the message says where and what to do.

    >>> try:
    ...     documents(["nowhere.txt"])
    ... except DataError as error:
    ...     print(error)
    there is no file or folder nowhere.txt
    """


Piece = tuple[str, bool]  # a text, and whether it counts in the loss


@dataclass(frozen=True)
class Document:
    """A text in pieces. A large file comes as several documents, each of which `continues` the one before.

    >>> Document("a.txt", (("To be", True),)).characters
    5
    """

    name: str
    pieces: tuple[Piece, ...]
    continues: bool = False

    @property
    def characters(self) -> int:
        return sum(len(text) for text, _ in self.pieces)


@dataclass(frozen=True)
class Corpus:
    """`read()` yields the same documents in the same order each time; `summary` describes them in words.

    >>> corpus = Corpus(lambda: iter([Document("a.txt", (("To be", True),))]), "one text")
    >>> [document.name for document in corpus]
    ['a.txt']
    """

    read: Callable[[], Iterator[Document]]
    summary: str

    def __iter__(self) -> Iterator[Document]:
        """The documents that are not empty."""
        filled = (document for document in self.read() if document.characters)
        first = next(filled, None)
        if first is None:
            raise DataError(f"the corpus is empty: there is no text in {self.summary}")
        return chain([first], filled)

    def texts(self) -> Iterator[str]:
        """All text, to train a tokenizer on."""
        return (text for document in self for text, _ in document.pieces)
