"""Pairs of sentences: read from files, and batched by how long they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int

from .batches import IGNORED
from .corpus import Corpus, DataError, Document
from .hashing import keys, shuffled
from .shards import Shards
from .sources import opened, undecodable
from .split import exact_share, is_validation

Pair = tuple[str, str]
CELL = (2, 3)  # target and source tokens by which the lengths of a batch's pairs may differ without being told apart


@dataclass(frozen=True)
class Pairs:
    """`read()` gives source and target in the order of the files; `summary` is for people."""

    read: Callable[[], Iterator[Pair]]
    summary: str

    def __iter__(self) -> Iterator[Pair]:
        """Those of which neither side is empty."""
        stripped = ((source.strip(), target.strip()) for source, target in self.read())
        return (pair for pair in stripped if all(pair))

    def split(self, share: float, seed: int) -> tuple[Pairs, Pairs]:
        """Pairs to train on and to validate with: of every 1/share in a row, one drawn by the seed validates."""
        exact = exact_share(share)

        def part(validates: bool) -> Iterator[Pair]:
            numbered = enumerate(self)
            return (pair for number, pair in numbered if is_validation(number, exact, seed) == validates)

        return Pairs(lambda: part(False), self.summary), Pairs(lambda: part(True), self.summary)

    def side(self, number: int) -> Corpus:
        """All sources (0) or all targets (1), a document each."""
        return Corpus(lambda: (Document(str(i), ((pair[number], True),)) for i, pair in enumerate(self)), self.summary)

    def texts(self) -> Iterator[str]:
        """Both sides, for a tokenizer to learn from."""
        return (text for pair in self for text in pair)


def pairs(paths: Sequence[str | Path]) -> Pairs:
    """`.tsv` files of two columns, and other files two at a time: a source and the target that it is aligned with.
    Each may be gzipped."""
    files = [Path(path) for path in paths]
    for path in files:
        if not path.is_file():
            raise DataError(f"{path} is no file; pairs come as a .tsv, or as two files whose lines belong together")
    tables = [path for path in files if ".tsv" in path.suffixes]
    plain = [path for path in files if ".tsv" not in path.suffixes]
    if len(plain) % 2:
        raise DataError(f"{plain[-1]} has no file beside it: give the source and the target, or a .tsv of both")
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
            raise DataError(
                f"{longer} has {count:,} lines, but {shorter} has {number:,}: they do not belong together line by line"
            )
        yield one, other


def lines(path: Path) -> Iterator[str]:
    """The lines of a text file, gzipped or not."""
    with opened(path) as file:
        yield from lines_of(file, str(path))


def lines_of(file: Iterable[bytes], name: str) -> Iterator[str]:
    """Lines without what ends them: a line ends at a line feed and nowhere else."""
    for number, line in enumerate(file, 1):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8").rstrip("\r\n")
        except UnicodeDecodeError as error:
            raise undecodable(f"{name}, line {number:,}", error, error.start) from None


@dataclass(frozen=True)
class PairBatch:
    """Rows of pairs, padded. `inputs` is the target behind its start token, `targets` the token after each."""

    source: Int[np.ndarray, "B S"]
    readable: Bool[np.ndarray, "B S"] | None  # None: every row is as long as the others
    inputs: Int[np.ndarray, "B T"]
    targets: Int[np.ndarray, "B T"]


class PairBatches:
    """Batches of about so many tokens, padding counted, of pairs about as long as each other.

    Pairs lie in cells of about one length of target and source. An epoch takes the cells in order, the pairs of each in
    an order of its own, cuts the row into batches, and shuffles these. The cuts depend on the cells alone, so every
    epoch has as many batches, and a batch is a function of the step. Pairs longer than `length` on either side are
    left out.
    """

    def __init__(
        self, source: Shards, target: Shards, use: str, *, tokens: int, length: int, seed: int, start: int
    ) -> None:
        self.sides, self.seed, self.start = (source, target), seed, start
        self.lengths = np.stack([document_lengths(side) for side in self.sides])
        kept = np.flatnonzero((self.lengths <= length).all(axis=0))
        self.left_out = self.lengths.shape[1] - len(kept)
        if not len(kept):
            raise DataError(f"every one of {self.left_out:,} pairs for {use} is longer than {length} tokens")
        target_cell, source_cell = (
            -(-self.lengths[side, kept] // size) for side, size in zip((1, 0), CELL, strict=True)
        )
        # Sources grow along one cell of targets and shrink along the next, so that neighbours are always alike.
        cell = target_cell * (2 * length) + np.where(target_cell % 2, source_cell, -source_cell)
        order = np.argsort(cell, kind="stable")
        self.kept, self.cells = kept[order], cell[order]
        widths = np.maximum(target_cell * CELL[0], source_cell * CELL[1])[order]
        self.cuts = cut(widths, tokens)
        self.mean = float(np.mean(self.lengths[1, kept]))
        self._planned: tuple[int, Int[np.ndarray, " n"]] | None = None

    def __len__(self) -> int:
        return len(self.kept)

    def at(self, step: int, first: float = 0.0, last: float = 1.0) -> PairBatch:
        """The batch of a step, or the part of its rows between two shares of it: at least one row, so that whoever
        reads it has something to compute with; if it is another part's, nothing of it is a target."""
        epoch, place = divmod(step, len(self.cuts))
        if self._planned is None or self._planned[0] != epoch:
            self._planned = epoch, self.order(epoch)
        which = int(shuffled(np.array([place]), len(self.cuts), keys(self.seed, np.array([epoch])))[0])
        begin, end = self.cuts[which]
        rows = [begin + round((end - begin) * share) for share in (first, last)]
        if rows[0] < rows[1]:
            return self.take(self._planned[1][slice(*rows)])
        other = self.take(self._planned[1][begin : begin + 1])
        return replace(other, targets=np.full_like(other.targets, IGNORED))

    def order(self, epoch: int) -> Int[np.ndarray, " n"]:
        """The pairs by cell, those of one cell shuffled."""
        return self.kept[np.lexsort((keys(self.seed + epoch + 1, self.kept), self.cells))]

    def all(self) -> Iterator[PairBatch]:
        """Every pair once, long and short batches mixed."""
        mixed = np.argsort(keys(self.seed, np.arange(len(self.cuts))))
        return (self.take(self.kept[slice(*self.cuts[which])]) for which in mixed)

    def take(self, numbers: Int[np.ndarray, " B"]) -> PairBatch:
        source, readable = self.rows(0, numbers)
        target, written = self.rows(1, numbers)
        inputs = np.concatenate((np.full((len(numbers), 1), self.start), target[:, :-1]), axis=1)
        return PairBatch(source, None if readable.all() else readable, inputs, np.where(written, target, IGNORED))

    def rows(
        self, side: int, numbers: Int[np.ndarray, " B"]
    ) -> tuple[Int[np.ndarray, "B width"], Bool[np.ndarray, "B width"]]:
        """One side of some pairs, padded with zeros, and what of it is real."""
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


def cut(widths: Int[np.ndarray, " n"], tokens: int) -> list[tuple[int, int]]:
    """Stretches of rows, each as many as fit `tokens` when padded to the widest of them, and at least one."""
    found, begin, widest = [], 0, 0
    for end, width in enumerate(widths.tolist()):
        widest = max(widest, width)
        if end > begin and (end + 1 - begin) * widest > tokens:
            found.append((begin, end))
            begin, widest = end, width
    return [*found, (begin, len(widths))]
