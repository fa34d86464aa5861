"""Which documents are for training and which for validation: the same ones whenever and wherever it is asked."""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from itertools import count
from typing import Literal

from .corpus import Corpus, DataError, Document, Piece
from .hashing import mixed

Side = Literal["training", "validation"]


def split(corpus: Corpus, share: float = 0.1, seed: int = 0) -> tuple[Corpus, Corpus]:
    """Training and validation. Of every 1/share documents in a row, one drawn by the seed is for validation.

    A corpus of fewer documents is split by position: of each document the first part trains and the last `share` of
    its characters validates, as nanoGPT does with its one text (data/shakespeare_char/prepare.py at 6c40a08).
    """
    exact = exact_share(share)
    lengths = lengths_of_few(corpus, math.ceil(1 / exact))

    def read(side: Side) -> Iterator[Document]:
        return by_document(corpus, exact, seed, side) if lengths is None else by_position(corpus, exact, lengths, side)

    return (
        Corpus(lambda: read("training"), f"the training part of {corpus.summary}"),
        Corpus(lambda: read("validation"), f"the validation part of {corpus.summary}"),
    )


def exact_share(share: float) -> Fraction:
    """A share that leaves something to either side."""
    exact = Fraction(share).limit_denominator(10**6)
    if not 0 < exact < 1:
        raise DataError(f"the share for validation is {share}, but must be above 0 and below 1")
    return exact


def lengths_of_few(corpus: Corpus, few: int) -> list[int] | None:
    """The characters of each document, or None as soon as there are `few` documents or more."""
    lengths: list[int] = []
    for document in corpus:
        if document.continues:
            lengths[-1] += document.characters
        else:
            lengths.append(document.characters)
        if len(lengths) >= few:
            return None
    return lengths


def by_document(corpus: Corpus, share: Fraction, seed: int, side: Side) -> Iterator[Document]:
    numbers = count()
    validates = False
    for document in corpus:
        if not document.continues:
            validates = is_validation(next(numbers), share, seed)
        if validates == (side == "validation"):
            yield document


def is_validation(number: int, share: Fraction, seed: int) -> bool:
    """Whether the document of this number is the one drawn from its run of about 1/share documents."""
    run = math.floor(number * share)
    first, after = math.ceil(run / share), math.ceil((run + 1) / share)
    return number == first + mixed(seed, run) % (after - first)


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
    """The pieces between two characters of the whole."""
    clipped: list[Piece] = []
    at = 0
    for text, loss in pieces:
        inside = text[max(start - at, 0) : max(stop - at, 0)]
        if inside:
            clipped.append((inside, loss))
        at += len(text)
    return tuple(clipped)
