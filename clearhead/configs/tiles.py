"""Which parts of the score matrix a mask leaves, so that attention computes only those.

The matrix is cut into cells. Of each cell the mask says whether it is empty, full, or to be looked at key by key; rows
of cells that read about the same keys are put together to a tile:

    keys      0 1 2 3 4 5 6 7
    queries 0 ■ ■ · · · · · ■        a tile: two rows of cells, two runs of keys, 0–2 and 7, and the cells
            1 ■ ■ ■ · · · · ■        in which not every query reads every key
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from jaxtyping import Bool, Int

from .masks import Causal, Full, Mask, Span

CELL, GRID, ROWS, WASTE = 32, 1024, 96, 1.3
"""Positions per cell; most cells along a side; most queries of a tile; what joining rows may add to its scores."""

FEW, MANY = 2**18, 2**24
"""Up to FEW pairs of queries and keys, a table of all pairs is cheapest; above MANY, no table is ever made."""


@dataclass(frozen=True)
class Tokens:
    """Queries or keys of one text: their positions, which are real, and their documents."""

    positions: Int[np.ndarray, "N"]
    real: Bool[np.ndarray, "N"] | None = None
    documents: Int[np.ndarray, "N"] | None = None

    def cells(self, size: int) -> Cells:
        starts = np.arange(0, len(self.positions), size)
        real = np.ones(len(self.positions), bool) if self.real is None else self.real
        documents = np.zeros_like(self.positions) if self.documents is None else self.documents

        def span(values: np.ndarray) -> Span:
            """First and last value among the real tokens of each cell; an empty range if it has none."""
            limits = np.iinfo(np.int32)
            low = np.minimum.reduceat(np.where(real, values, limits.max), starts)
            return low, np.maximum.reduceat(np.where(real, values, limits.min), starts)

        some, every = np.logical_or.reduceat(real, starts), np.logical_and.reduceat(real, starts)
        return Cells(some, every, span(self.positions), span(documents))


@dataclass(frozen=True)
class Cells:
    some: Bool[np.ndarray, "C"]  # whether any token of a cell is real
    every: Bool[np.ndarray, "C"]  # whether all tokens of a cell are real
    positions: Span
    documents: Span


@dataclass(frozen=True)
class KeySpan:
    """Consecutive keys, read by queries number `which` (dual chunk attention has three queries per token)."""

    start: int
    stop: int
    which: int = 0


@dataclass(frozen=True)
class Check:
    """Columns of a tile in which some query may not read some key, and the table of who may."""

    start: int
    stop: int
    allowed: Bool[np.ndarray, "T C"]


@dataclass(frozen=True)
class Tile:
    """Queries `start` to `stop` and the keys that any of them reads; its columns are the runs in order."""

    start: int
    stop: int
    runs: tuple[KeySpan, ...]
    checks: tuple[Check, ...]
    blind: Bool[np.ndarray, "T"] | None  # True for queries that may read nothing; None if there are none

    @property
    def columns(self) -> int:
        return sum(run.stop - run.start for run in self.runs)

    @property
    def area(self) -> int:
        return (self.stop - self.start) * self.columns


def pairs(masks: tuple[Mask, ...], length: int) -> int:
    """How many scores self-attention computes for one text, all queries of a token together.

    A causal mask is counted as the full square, although the fused kernel skips much of the hidden half.
    """
    whole = len(masks) * length**2
    if length**2 <= FEW or masks[0].within(length) in (Full(), Causal()):
        return whole
    area = sum(tile.area for tile in tiles_within(masks, length))
    return area if worthwhile(area, length**2, len(masks)) else whole


def worthwhile(area: float, pairs: int, kinds: int) -> bool:
    """Whether tiles of this area are cheaper than a table of all pairs."""
    return pairs > FEW and (area < kinds * pairs / 2 or pairs > MANY)


@lru_cache(maxsize=64)
def tiles_within(masks: tuple[Mask, ...], length: int) -> tuple[Tile, ...]:
    """The tiles of self-attention over a text without padding."""
    tokens = Tokens(np.arange(length))
    return tiles(masks, tokens, tokens)


def tiles(masks: Sequence[Mask], queries: Tokens, keys: Tokens) -> tuple[Tile, ...]:
    """The tiles of all masks together. A query that may read nothing is in no tile."""
    if not len(queries.positions) or not len(keys.positions):
        return ()
    size = CELL * -(-max(len(queries.positions), len(keys.positions)) // (CELL * GRID))
    maps = [cell_map(mask, queries.cells(size), keys.cells(size)) for mask in masks]
    some, every = (np.concatenate(parts, axis=1) for parts in zip(*maps, strict=True))
    shared: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}
    made = []
    for start, stop in group_rows(some, max(1, ROWS // size)):
        read, full = np.any(some[start:stop], axis=0), np.all(every[start:stop], axis=0)
        rows = slice(start * size, min(stop * size, len(queries.positions)))
        made.append(tile(masks, queries, keys, rows, read, read & ~full, size, shared))
    return tuple(made)


def cell_map(mask: Mask, i: Cells, j: Cells) -> tuple[Bool[np.ndarray, "I J"], Bool[np.ndarray, "I J"]]:
    """For each pair of cells: whether any query may read any key, and whether all may read all."""

    def rows(span: Span) -> Span:
        return span[0][:, None], span[1][:, None]

    some, every = mask.over(rows(i.positions), j.positions)
    (first, last), (low, high) = rows(i.documents), j.documents
    some = some & i.some[:, None] & j.some & (first <= high) & (low <= last)
    return some, some & every & j.every & (first == high) & (low == last)


def group_rows(some: Bool[np.ndarray, "I J"], most: int) -> Iterator[tuple[int, int]]:
    """Group up to `most` rows of cells that read about the same keys; each group becomes a tile."""
    counts = some.sum(axis=1)
    start = 0
    while start < len(some):
        stop, read, area = start + 1, some[start], counts[start]
        while stop < len(some) and stop - start < most and counts[start] and counts[stop]:
            wider = read | some[stop]
            area += counts[stop]
            if (stop + 1 - start) * wider.sum() > WASTE * area:
                break
            stop, read = stop + 1, wider
        if counts[start]:
            yield start, stop
        start = stop


def tile(
    masks: Sequence[Mask],
    queries: Tokens,
    keys: Tokens,
    rows: slice,
    read: Bool[np.ndarray, "C"],
    unsure: Bool[np.ndarray, "C"],
    size: int,
    shared: dict[tuple[tuple[int, ...], bytes], np.ndarray],
) -> Tile:
    """Make one tile. Equal tables are the same array, so that all tiles of a window share one."""
    kinds = read.reshape(len(masks), -1), unsure.reshape(len(masks), -1)
    runs, checks, columns = [], [], 0
    seeing = np.zeros(rows.stop - rows.start, bool)
    for which, (mask, has, looks) in enumerate(zip(masks, *kinds, strict=True)):
        for first, last in stretches(has):
            run = KeySpan(first * size, min(last * size, len(keys.positions)), which)
            for low, high in stretches(looks[first:last]):
                part = slice(run.start + low * size, min(run.start + high * size, run.stop))
                allowed = look(mask, queries, keys, rows, part)
                allowed = shared.setdefault((allowed.shape, allowed.tobytes()), allowed)
                checks.append(Check(columns + part.start - run.start, columns + part.stop - run.start, allowed))
                seeing |= allowed.any(axis=1)
            seeing |= not looks[first:last].all()
            runs.append(run)
            columns += run.stop - run.start
    return Tile(rows.start, rows.stop, tuple(runs), tuple(checks), None if seeing.all() else ~seeing)


def stretches(on: Bool[np.ndarray, "C"]) -> list[tuple[int, int]]:
    """(start, stop) of every run of True."""
    edges = np.flatnonzero(np.diff(on, prepend=False, append=False))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def look(mask: Mask, queries: Tokens, keys: Tokens, rows: slice, columns: slice) -> Bool[np.ndarray, "T C"]:
    """True where a query may read a key: the mask, padding and documents together."""
    allowed = mask(queries.positions[rows, None], keys.positions[columns])
    if keys.real is not None:
        allowed = allowed & keys.real[columns]
    if queries.documents is not None and keys.documents is not None:
        allowed = allowed & (queries.documents[rows, None] == keys.documents[columns])
    return allowed
