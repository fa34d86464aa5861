"""Windows over token shards: shuffled for training, in order for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

from .corpus import DataError
from .hashing import GOLDEN, derive_keys, mix, permute
from .shards import Shards

IGNORED = -100  # a target without loss, as in torch's cross_entropy
PLANNED = 64  # steps whose rows are computed at once


@dataclass(frozen=True)
class Batch:
    """Inputs and targets as NumPy arrays; `torch.from_numpy` does not copy them.

    >>> Batch(np.array([[1, 2, 3]]), np.array([[2, 3, 4]])).targets[0, 0].item()
    2
    """

    inputs: Int[np.ndarray, "B T"]
    targets: Int[np.ndarray, "B T"]  # the next token, or IGNORED
    documents: Int[np.ndarray, "B T"] | None = None  # document number of each token; None: one document a row


class Batches:
    """Batches as a function of the step. There is no state, so resuming means asking for the next step.

    An epoch cuts all tokens into stretches of `context` targets and shuffles them. The first cut moves from epoch to
    epoch, so words change their positions in the windows. Every token but the first is a target once an epoch. The
    first and last stretches are shorter; their windows overlap their neighbours' and ignore those targets:

        tokens    0 1 2 3 4 5 6 7 8 9      context 4, first cut after 2
        targets     1 2|3 4 5 6|7 8 9      three stretches
        windows   0 ─ ─ ─ 4                targets 3 and 4 ignored
                      2 ─ ─ ─ 6
                            5 ─ ─ ─ 9      target 6 ignored

    With `apart`, tokens do not attend to other documents, so the first token of a document is not a target.

    >>> import tempfile
    >>> from clearhead.configs import BytesConfig
    >>> from clearhead.tokenize import make
    >>> texts = [Document("a", (("to be", True),)), Document("b", (("or not", True),))]
    >>> shards = build(texts, make(BytesConfig(), []), tempfile.mkdtemp())
    >>> Batches(shards, batch=2, context=4, seed=0).at(step=10).inputs.shape
    (2, 4)
    """

    def __init__(self, shards: Shards, *, batch: int, context: int, seed: int, apart: bool = True) -> None:
        require_windows(shards, context)
        if batch < 1:
            raise DataError(f"the batch is {batch}, but must be at least 1")
        self.shards, self.batch, self.context, self.seed, self.apart = shards, batch, context, seed, apart
        targets = len(shards) - 1
        whole, rest = divmod(targets, context)
        # All first cuts in this range make the same number of stretches; of two such ranges, take the wider one.
        self.cuts = (max(rest, 1), context if rest else max(context - 1, 1))
        if whole and 2 * rest > context + 1:
            self.cuts = (1, rest - 1)
        self.rows = 1 - (self.cuts[0] - targets) // context
        """The number of rows in an epoch."""
        self._planned: tuple[int, Int[np.ndarray, "2 steps B"]] | None = None

    def at(self, step: int, rows: slice = slice(None)) -> Batch:
        """The batch of a step, or some of its rows. Row r depends only on the seed and on step · batch + r."""
        block, inside = divmod(step, PLANNED)
        if self._planned is None or self._planned[0] != block:
            self._planned = block, self.plan(block)
        first, last = self._planned[1][:, inside, rows]
        return take(self.shards, first - 1, first, last, self.context, self.apart)

    def plan(self, block: int) -> Int[np.ndarray, "2 steps B"]:
        """The first and last target of every row for a block of steps; computing one step alone takes as long."""
        number = np.arange(block * PLANNED * self.batch, (block + 1) * PLANNED * self.batch)
        epoch, place = np.divmod(number, self.rows)
        key = derive_keys(self.seed, epoch)
        stretch = permute(place, self.rows, key)
        low, high = self.cuts
        cut = low + (mix(key + GOLDEN) % np.uint64(high - low + 1)).astype(np.int64)
        first = np.where(stretch == 0, 1, 1 + cut + (stretch - 1) * self.context)
        last = np.minimum(cut + stretch * self.context, len(self.shards) - 1)
        return np.stack((first, last)).reshape(2, PLANNED, self.batch)


def windows(
    shards: Shards, context: int, stride: int | None = None, *, batch: int = 1, apart: bool = True
) -> Iterator[Batch]:
    """Every token but the first as a target once, in order, for perplexity and bits per byte.

    Each window starts `stride` tokens after the one before; only its new tokens are targets. With the default stride,
    `context`, a token is predicted from 1 to `context` tokens. With stride 1 it is always predicted from the full
    context, for `context` times the work.

    >>> import tempfile
    >>> from clearhead.configs import BytesConfig
    >>> from clearhead.tokenize import make
    >>> texts = [Document("a", (("to be", True),)), Document("b", (("or not", True),))]
    >>> shards = build(texts, make(BytesConfig(), []), tempfile.mkdtemp())
    >>> [window.inputs.shape for window in windows(shards, context=4)]
    [(1, 4), (1, 4), (1, 4)]
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
    """The windows that begin at `start`, moved back if they would pass the end, with targets from `first` to `last`."""
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
        inputs, targets, documents = pad_rows(inputs, targets, documents, context)
    return Batch(np.ascontiguousarray(inputs), targets, documents)


def document_begins(shards: Shards, start: Int[np.ndarray, " B"], length: int) -> np.ndarray | None:
    """True where a document begins after the first token of a row; None if none does."""
    after = np.searchsorted(shards.document_starts, start, side="right")
    until = np.searchsorted(shards.document_starts, start + length - 1, side="right")
    rows = np.flatnonzero(until > after)
    if not len(rows):
        return None
    begins = np.zeros((len(start), length), dtype=bool)
    for row in rows:
        begins[row, shards.document_starts[after[row] : until[row]] - start[row]] = True
    return begins


def pad_rows(
    inputs: Int[np.ndarray, "B n"],
    targets: Int[np.ndarray, "B n"],
    documents: Int[np.ndarray, "B n"] | None,
    context: int,
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B T"], Int[np.ndarray, "B T"]]:
    """Rows padded to the full length; the padding is a document of its own without targets."""
    width = ((0, 0), (0, context - inputs.shape[1]))
    documents = np.zeros_like(inputs) if documents is None else documents
    return (
        np.pad(inputs, width),
        np.pad(targets, width, constant_values=IGNORED),
        np.pad(documents, width, constant_values=-1),
    )
