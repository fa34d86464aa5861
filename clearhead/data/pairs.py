"""Pairs of sentences: read from files, and batched by length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from .batches import IGNORED
from .corpus import Corpus, DataError, Document
from .hashing import derive_keys, permute
from .shards import Shards
from .sources import decode_lines, open_file
from .split import exact_share, is_validation

Pair = tuple[str, str]
CELL = (2, 3)  # lengths of target and source are rounded to these multiples when pairs are sorted


@dataclass(frozen=True)
class Pairs:
    """`read()` yields source and target in the order of the files; `summary` describes them in words."""

    read: Callable[[], Iterator[Pair]]
    summary: str

    def __iter__(self) -> Iterator[Pair]:
        """The pairs without an empty side."""
        stripped = ((source.strip(), target.strip()) for source, target in self.read())
        return (pair for pair in stripped if all(pair))

    def split(self, share: float, seed: int) -> tuple[Pairs, Pairs]:
        """Pairs for training and validation: of every 1/share consecutive pairs, the seed holds out one."""
        exact = exact_share(share)

        def part(validates: bool) -> Iterator[Pair]:
            numbered = enumerate(self)
            return (pair for number, pair in numbered if is_validation(number, exact, seed) == validates)

        return Pairs(lambda: part(False), self.summary), Pairs(lambda: part(True), self.summary)

    def side(self, number: int) -> Corpus:
        """All sources (0) or all targets (1), each a document."""
        return Corpus(lambda: (Document(str(i), ((pair[number], True),)) for i, pair in enumerate(self)), self.summary)

    def texts(self) -> Iterator[str]:
        """Both sides, to train a tokenizer on."""
        return (text for pair in self for text in pair)


def pairs(paths: Sequence[str | Path]) -> Pairs:
    """Pairs from `.tsv` files of two columns, and from other files two at a time: sources, then their targets.

    Each file may be compressed with gzip or zstd.
    """
    files = [Path(path) for path in paths]
    for path in files:
        if not path.is_file():
            raise DataError(f"{path} is not a file; give pairs as a .tsv, or as two files with matching lines")
    tables = [path for path in files if ".tsv" in path.suffixes]
    plain = [path for path in files if ".tsv" not in path.suffixes]
    if len(plain) % 2:
        raise DataError(f"{plain[-1]} is alone: give a source and a target file, or a .tsv of both")
    aligned = list(zip(plain[::2], plain[1::2], strict=True))

    def read() -> Iterator[Pair]:
        for table in tables:
            yield from read_table(table)
        for source, target in aligned:
            yield from read_aligned(source, target)

    names = [str(path) for path in tables] + [f"{source} and {target}" for source, target in aligned]
    return Pairs(read, ", ".join(names))


def read_table(path: Path) -> Iterator[Pair]:
    for number, line in enumerate(lines(path), 1):
        columns = line.split("\t") if line.strip() else ["", ""]
        if len(columns) < 2:
            raise DataError(f"{path}, line {number} has no tab between a source and a target")
        yield columns[0], columns[1]


def read_aligned(source: Path, target: Path) -> Iterator[Pair]:
    both = zip_longest(lines(source), lines(target))
    for number, (one, other) in enumerate(both):
        if one is None or other is None:
            shorter, longer = (source, target) if one is None else (target, source)
            count = number + 1 + sum(1 for _ in both)
            raise DataError(f"{longer} has {count:,} lines, but {shorter} has {number:,}: their lines do not match")
        yield one, other


def lines(path: Path) -> Iterator[str]:
    """The lines of a text file, compressed or not."""
    with open_file(path) as file:
        yield from decode_lines(file, str(path))


@dataclass(frozen=True)
class PairBatch:
    """Padded rows of pairs. `inputs` is the start token and the target, `targets` the next token of each."""

    source: Int[np.ndarray, "B S"]
    readable: Bool[np.ndarray, "B S"] | None  # None: all rows have the same length
    inputs: Int[np.ndarray, "B T"]
    targets: Int[np.ndarray, "B T"]


class PairBatches:
    """Batches of about `tokens` tokens, padding included, of pairs of similar length.

    Pairs are sorted into cells by the lengths of target and source. An epoch takes the cells in order and shuffles the
    pairs of each, cuts this sequence into batches, and shuffles the batches. The cuts depend on the cells alone, so
    every epoch has the same number of batches, and a batch is a function of the step. Pairs longer than `length` on
    either side are skipped.
    """

    def __init__(
        self, source: Shards, target: Shards, use: str, *, tokens: int, length: int, seed: int, start: int
    ) -> None:
        self.sides, self.seed, self.start = (source, target), seed, start
        self.lengths = np.stack([document_lengths(side) for side in self.sides])
        kept = np.flatnonzero((self.lengths <= length).all(axis=0))
        self.skipped = self.lengths.shape[1] - len(kept)
        if not len(kept):
            raise DataError(f"every one of {self.skipped:,} pairs for {use} is longer than {length} tokens")
        target_cell, source_cell = (
            -(-self.lengths[side, kept] // size) for side, size in zip((1, 0), CELL, strict=True)
        )
        # Source lengths rise along one cell of targets and fall along the next, so that neighbours are alike.
        cell = target_cell * (2 * length) + np.where(target_cell % 2, source_cell, -source_cell)
        order = np.argsort(cell, kind="stable")
        self.kept, self.cells = kept[order], cell[order]
        widths = np.maximum(target_cell * CELL[0], source_cell * CELL[1])[order]
        self.cuts = cut_batches(widths, tokens)
        self.mean = float(np.mean(self.lengths[1, kept]))
        self._planned: tuple[int, Int[np.ndarray, " n"]] | None = None

    def __len__(self) -> int:
        return len(self.kept)

    def at(self, step: int, first: float = 0.0, last: float = 1.0) -> PairBatch:
        """The batch of a step, or the rows between two shares of it.

        If the part is empty, it gets one row without targets, so that its reader has something to compute.
        """
        epoch, place = divmod(step, len(self.cuts))
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self.order(epoch)
        which = int(permute(np.array([place]), len(self.cuts), derive_keys(self.seed, np.array([epoch])))[0])
        begin, end = self.cuts[which]
        rows = [begin + round((end - begin) * share) for share in (first, last)]
        if rows[0] < rows[1]:
            return self.take(self._planned[1][slice(*rows)])
        other = self.take(self._planned[1][begin : begin + 1])
        return replace(other, targets=np.full_like(other.targets, IGNORED))

    def order(self, epoch: int) -> Int[np.ndarray, " n"]:
        """The pairs sorted by cell, and shuffled within each cell."""
        return self.kept[np.lexsort((derive_keys(self.seed + epoch + 1, self.kept), self.cells))]

    def all(self) -> Iterator[PairBatch]:
        """Every pair once, with long and short batches mixed."""
        mixed = np.argsort(derive_keys(self.seed, np.arange(len(self.cuts))))
        return (self.take(self.kept[slice(*self.cuts[which])]) for which in mixed)

    def take(self, numbers: Int[np.ndarray, " B"]) -> PairBatch:
        source, readable = self.rows(0, numbers)
        target, written = self.rows(1, numbers)
        inputs = np.concatenate((np.full((len(numbers), 1), self.start), target[:, :-1]), axis=1)
        return PairBatch(source, None if readable.all() else readable, inputs, np.where(written, target, IGNORED))

    def rows(
        self, side: int, numbers: Int[np.ndarray, " B"]
    ) -> tuple[Int[np.ndarray, "B width"], Bool[np.ndarray, "B width"]]:
        """One side of some pairs, padded with zeros, and which tokens are real."""
        shards, lengths = self.sides[side], self.lengths[side, numbers]
        width = int(lengths.max(initial=1))
        readable = np.arange(width) < lengths[:, None]
        rows = np.zeros((len(numbers), width), dtype=np.int64)
        starts = shards.document_starts[numbers]
        for row, start, length in zip(rows, starts, lengths, strict=True):
            row[:length] = shards.tokens(int(start), int(start + length))
        return rows, readable


def document_lengths(shards: Shards) -> Int[np.ndarray, " n"]:
    return np.diff(np.append(shards.document_starts, len(shards)))


def cut_batches(widths: Int[np.ndarray, " n"], tokens: int) -> list[tuple[int, int]]:
    """Stretches of rows, each with as many rows as fit into `tokens` when padded, and at least one."""
    found, begin, widest = [], 0, 0
    for end, width in enumerate(widths.tolist()):
        widest = max(widest, width)
        if end > begin and (end + 1 - begin) * widest > tokens:
            found.append((begin, end))
            begin, widest = end, width
    return [*found, (begin, len(widths))]
