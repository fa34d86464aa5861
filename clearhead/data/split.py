"""Split documents into training and validation: the same split every time and on every machine."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from typing import Literal

from .corpus import Corpus, DataError, Document, Piece
from .hashing import derive_key

Side = Literal["training", "validation"]


def split(corpus: Corpus, share: float = 0.1, seed: int = 0) -> tuple[Corpus, Corpus]:
    """The training and the validation part. Of every 1/share consecutive documents, the seed holds out one.

    A corpus of fewer documents is split by position: the last `share` of the characters of each document validates, as
    nanoGPT does with its single text (data/shakespeare_char/prepare.py at 6c40a08). A conversation is never cut: of
    fewer, the seed holds out one.

    >>> corpus = Corpus(lambda: (Document(str(n), (("text", True),)) for n in range(20)), "20 texts")
    >>> [len(list(part)) for part in split(corpus)]
    [18, 2]
    """
    exact = exact_share(share)
    lengths = document_lengths_if_few(corpus, math.ceil(1 / exact))
    if lengths is not None and len(lengths) > 1 and all(has_questions(document) for document in corpus):
        exact, lengths = Fraction(1, len(lengths)), None

    def read(side: Side) -> Iterator[Document]:
        return by_document(corpus, exact, seed, side) if lengths is None else by_position(corpus, exact, lengths, side)

    return (
        Corpus(lambda: read("training"), f"the training part of {corpus.summary}"),
        Corpus(lambda: read("validation"), f"the validation part of {corpus.summary}"),
    )


def exact_share(share: float) -> Fraction:
    """The share as a fraction; it must leave something for both parts."""
    exact = Fraction(share).limit_denominator(10**6)
    if not 0 < exact < 1:
        raise DataError(f"the validation share is {share}, but must be above 0 and below 1")
    return exact


def document_lengths_if_few(corpus: Corpus, few: int) -> list[int] | None:
    """The characters of each document; None if there are `few` documents or more."""
    lengths: list[int] = []
    for document in corpus:
        if document.continues:
            lengths[-1] += document.characters
        else:
            lengths.append(document.characters)
        if len(lengths) >= few:
            return None
    return lengths


def has_questions(document: Document) -> bool:
    """Whether parts of the text have no loss, as questions in a conversation have none."""
    return not all(loss for _, loss in document.pieces)


def by_document(corpus: Corpus, share: Fraction, seed: int, side: Side) -> Iterator[Document]:
    numbers = count()
    validates = False
    for document in corpus:
        if not document.continues:
            validates = is_validation(next(numbers), share, seed)
        if validates == (side == "validation"):
            yield document


def is_validation(number: int, share: Fraction, seed: int) -> bool:
    """Whether the document with this number is the one chosen among its 1/share neighbours."""
    run = math.floor(number * share)
    first, after = math.ceil(run / share), math.ceil((run + 1) / share)
    return number == first + derive_key(seed, run) % (after - first)


def by_position(corpus: Corpus, share: Fraction, lengths: list[int], side: Side) -> Iterator[Document]:
    number, at = -1, 0
    for document in corpus:
        if not document.continues:
            number, at = number + 1, 0
        edge = int(lengths[number] * (1 - share)) - at
        span = (0, max(edge, 0)) if side == "training" else (max(edge, 0), document.characters)
        begins = at == 0 if side == "training" else edge >= 0
        yield Document(document.name, clip(document.pieces, *span), continues=not begins)
        at += document.characters


def clip(pieces: tuple[Piece, ...], start: int, stop: int) -> tuple[Piece, ...]:
    """The pieces between two character positions of the whole text."""
    clipped: list[Piece] = []
    at = 0
    for text, loss in pieces:
        inside = text[max(start - at, 0) : max(stop - at, 0)]
        if inside:
            clipped.append((inside, loss))
        at += len(text)
    return tuple(clipped)
