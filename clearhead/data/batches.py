"""Windows over token shards: random ones to train on, and all of them in order to evaluate with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from .corpus import DataError
from .hashing import GOLDEN, keys, mix, shuffled
from .shards import Shards

IGNORED = -100  # a target on which no loss is taken, as torch's cross_entropy has it
PLANNED = 64  # steps


@dataclass(frozen=True)
class Batch:
    """What a model reads and what it should say next: NumPy arrays, which `torch.from_numpy` takes without a copy."""

    inputs: Int[np.ndarray, "B T"]
    targets: Int[np.ndarray, "B T"]  # the token after each, or IGNORED
    documents: Int[np.ndarray, "B T"] | None = None  # which of its row's documents each is of; None: rows are of one


class Batches:
    """Batches as a function of the step: nothing is kept, so resuming is asking for the next one.

    An epoch cuts the row of all tokens into stretches of `context` targets and shuffles them; where the first cut falls
    is drawn anew for each, so words change their places in the windows. Every token but the first is a target once an
    epoch. The first and last stretch are shorter; their windows reach into the neighbour's, whose targets they ignore:

        tokens    0 1 2 3 4 5 6 7 8 9      context 4, first cut after 2
        targets     1 2|3 4 5 6|7 8 9      three stretches
        windows   0 ─ ─ ─ 4                targets 3 and 4 ignored
                      2 ─ ─ ─ 6
                            5 ─ ─ ─ 9      target 6 ignored

    `apart`: tokens of different documents do not meet, so a document's first token is nobody's target.
    """

    def __init__(self, shards: Shards, *, batch: int, context: int, seed: int, apart: bool = True) -> None:
        require_windows(shards, context)
        if batch < 1:
            raise DataError(f"the batch is {batch}, but must be at least 1")
        self.shards, self.batch, self.context, self.seed, self.apart = shards, batch, context, seed, apart
        targets = len(shards) - 1
        whole, rest = divmod(targets, context)
        # All first cuts between these make the same number of stretches; of the two such ranges the wider one is taken.
        self.cuts = (max(rest, 1), context if rest else max(context - 1, 1))
        if whole and 2 * rest > context + 1:
            self.cuts = (1, rest - 1)
        self.rows = 1 - (self.cuts[0] - targets) // context
        """In one epoch."""
        self._planned: tuple[int, Int[np.ndarray, "2 steps B"]] | None = None

    def at(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step, or some of its rows; row r depends on the seed and on step · batch + r alone."""
        block, inside = divmod(step, PLANNED)
        if self._planned is None or self._planned[0] != block:
            self._planned = block, self.plan(block)
        first, last = self._planned[1][:, inside, rows]
        return take(self.shards, first - 1, first, last, self.context, self.apart)

    def plan(self, block: int) -> Int[np.ndarray, "2 steps B"]:
        """First and last target of every row, for a block of steps at once: one step alone would take as long."""
        number = np.arange(block * PLANNED * self.batch, (block + 1) * PLANNED * self.batch)
        epoch, place = np.divmod(number, self.rows)
        key = keys(self.seed, epoch)
        stretch = shuffled(place, self.rows, key)
        low, high = self.cuts
        cut = low + (mix(key + GOLDEN) % np.uint64(high - low + 1)).astype(np.int64)
        first = np.where(stretch == 0, 1, 1 + cut + (stretch - 1) * self.context)
        last = np.minimum(cut + stretch * self.context, len(self.shards) - 1)
        return np.stack((first, last)).reshape(2, PLANNED, self.batch)


def windows(
    shards: Shards, context: int, stride: int | None = None, *, batch: int = 1, apart: bool = True
) -> Iterator[Batch]:
    """Every token but the first as a target once, in order, for perplexity and bits per byte.

    Each window begins `stride` after the one before and is scored on what is new in it. With a stride of `context`, the
    default, a token is predicted from 1 to `context` tokens; with 1, from the full context always, at `context` times
    the work.
    """
    require_windows(shards, context)
    stride = context if stride is None else stride
    if not 1 <= stride <= context:
        raise DataError(f"the stride is {stride}, but must be between 1 and the context, {context}")
    targets = len(shards) - 1
    count = 1 - min(context - targets, 0) // stride
    for number in range(0, count, batch):
        start = np.arange(number, min(number + batch, count)) * stride
        first = np.where(start == 0, 1, start + context - stride + 1)
        last = np.minimum(start + context, targets)
        yield take(shards, start, first, last, context, apart)


def require_windows(shards: Shards, context: int) -> None:
    if context < 1:
        raise DataError(f"the context is {context}, but must be at least 1")
    if len(shards) < 2:
        raise DataError("the corpus is a single token, so there is nothing to predict; give more text")


def take(
    shards: Shards,
    start: Int[np.ndarray, " B"],
    first: Int[np.ndarray, " B"],
    last: Int[np.ndarray, " B"],
    context: int,
    apart: bool,
) -> Batch:
    """The windows that begin at `start`, moved back where they would pass the end; targets are `first` to `last`."""
    length = min(context + 1, len(shards))
    start = np.clip(start, 0, len(shards) - length)
    tokens = shards.rows(start, length).astype(np.int64)
    inputs, targets = tokens[:, :-1], tokens[:, 1:].copy()
    if (first > start + 1).any() or (last < start + length - 1).any():
        at = start[:, None] + np.arange(1, length)
        targets[(at < first[:, None]) | (at > last[:, None])] = IGNORED
    ignored = shards.ignored_rows(start + 1, length - 1)
    if ignored is not None:
        targets[ignored] = IGNORED
    begins = document_begins(shards, start, length) if apart else None
    documents = None
    if begins is not None:
        targets[begins[:, 1:]] = IGNORED
        if begins[:, 1:-1].any():
            documents = begins[:, :-1].cumsum(axis=1)
    if length <= context:  # the whole corpus is shorter than one window
        inputs, targets, documents = padded(inputs, targets, documents, context)
    return Batch(np.ascontiguousarray(inputs), targets, documents)


def document_begins(shards: Shards, start: Int[np.ndarray, " B"], length: int) -> np.ndarray | None:
    """True where a document begins after the first token of a row; None where none does in any row."""
    after = np.searchsorted(shards.document_starts, start, side="right")
    until = np.searchsorted(shards.document_starts, start + length - 1, side="right")
    rows = np.flatnonzero(until > after)
    if not len(rows):
        return None
    begins = np.zeros((len(start), length), dtype=bool)
    for row in rows:
        begins[row, shards.document_starts[after[row] : until[row]] - start[row]] = True
    return begins


def padded(
    inputs: Int[np.ndarray, "B n"],
    targets: Int[np.ndarray, "B n"],
    documents: Int[np.ndarray, "B n"] | None,
    context: int,
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    """Rows of full length: what is added is a document of its own, with nothing to learn."""
    width = ((0, 0), (0, context - inputs.shape[1]))
    documents = np.zeros_like(inputs) if documents is None else documents
    return (
        np.pad(inputs, width),
        np.pad(targets, width, constant_values=IGNORED),
        np.pad(documents, width, constant_values=-1),
    )
