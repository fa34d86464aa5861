"""A table of runs: parameters N, tokens D and the final loss. Compute is C = 6·N·D (Kaplan et al. 2020, 2.1)."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int

FLOPS = 6  # per parameter and token: 2 forward, 4 backward
SLACK = 0.1  # relative difference allowed between C and 6·N·D, and between runs of one budget
COLUMNS = ("N", "D", "C", "loss")


class TableError(ValueError):
    """A table that cannot be read: the message gives the line, the value and the rule.

    >>> try:
    ...     make_table([{"N": -1, "D": 2e7, "loss": 4.0}])
    ... except TableError as error:
    ...     print(error)
    the table, line 1: N is -1, but must be a number above 0
    """


@dataclass(frozen=True)
class Table:
    """Runs, and the line of the file that each came from.

    >>> len(make_table([{"N": 1e6, "D": 2e7, "loss": 4.0}]))
    1
    """

    n: Float[np.ndarray, "n"]
    d: Float[np.ndarray, "n"]
    loss: Float[np.ndarray, "n"]
    lines: Int[np.ndarray, "n"]

    def __len__(self) -> int:
        return len(self.n)

    @property
    def flops(self) -> Float[np.ndarray, "n"]:
        return FLOPS * self.n * self.d

    @property
    def span(self) -> tuple[float, float]:
        """The compute of the smallest and of the largest run."""
        return float(self.flops.min()), float(self.flops.max())

    @property
    def summary(self) -> str:
        return f"{len(self)} runs of {self.span[0]:.3g} to {self.span[1]:.3g} FLOPs"

    def budgets(self) -> list[Int[np.ndarray, "k"]]:
        """The places of runs with the same compute, within a tenth, smallest budget first."""
        order = np.argsort(self.flops, kind="stable")
        groups: list[list[int]] = []
        for place in order:
            if groups and self.flops[place] <= self.flops[groups[-1][0]] * (1 + SLACK):
                groups[-1].append(int(place))
            else:
                groups.append([int(place)])
        return [np.array(group) for group in groups]

    def curves(self) -> dict[float, Int[np.ndarray, "k"]]:
        """For each N the places of its runs, sorted by tokens, smallest model first."""
        return {
            float(n): (at := np.flatnonzero(self.n == n))[np.argsort(self.d[at], kind="stable")]
            for n in np.unique(self.n)
        }


def read_table(path: str | Path) -> Table:
    """Read a CSV whose first line names the columns: loss and two of N, D and C. Other columns are ignored.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "runs.csv")
    >>> _ = path.write_text("N,D,loss\\n1e6,2e7,4.0\\n")
    >>> read_table(path).loss
    array([4.])
    """
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise TableError(f"{path} is not a CSV in UTF-8") from None
    try:
        rows = list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise TableError(f"{path} is not a CSV: {error}") from None
    if not rows or not any(rows[0]):
        raise TableError(f"{path} is empty; its first line must name the columns, such as N,D,loss")
    places = columns(rows[0], path)
    found = [(at, row) for at, row in enumerate(rows[1:], start=2) if any(cell.strip() for cell in row)]
    if wide := [at for at, row in found if len(row) > len(rows[0])]:
        raise TableError(f"{path}, line {wide[0]} has more cells than the first line; is there a comma too many?")
    return build_table([numbers(row, places, path, at) for at, row in found], [at for at, _ in found], path)


def make_table(rows: Sequence[Mapping[str, float]]) -> Table:
    """A table from dictionaries with the columns as keys.

    >>> make_table([{"N": 1e6, "D": 2e7, "loss": 4.0}]).flops
    array([1.2e+14])
    """
    return build_table([dict(row) for row in rows], list(range(1, len(rows) + 1)), "the table")


def columns(names: Sequence[str], path: str | Path) -> dict[str, int]:
    """The position of each column."""
    seen = [name.strip().lower() for name in names]
    places = {name: seen.index(name.lower()) for name in COLUMNS if name.lower() in seen}
    twice = [name for name in places if seen.count(name.lower()) > 1]
    if twice:
        raise TableError(f"{path} has the column {twice[0]} twice")
    if "loss" not in places or len(places) < 3:
        raise TableError(f"{path} has the columns {', '.join(names)}, but loss and two of N, D and C are needed")
    return places


def numbers(row: Sequence[str], places: Mapping[str, int], path: str | Path, line: int) -> dict[str, float]:
    found = {}
    for name, place in places.items():
        text = row[place].strip() if place < len(row) else ""
        try:
            found[name] = float(text)
        except ValueError:
            raise TableError(f"{path}, line {line}: {name} is {text!r}, which is not a number") from None
    return found


def build_table(rows: Sequence[Mapping[str, float]], lines: Sequence[int], path: str | Path) -> Table:
    """The table; a missing N or D is computed from C."""
    if not rows:
        raise TableError(f"{path} holds no runs")
    whole = [complete_row(row, f"{path}, line {line}") for row, line in zip(rows, lines, strict=True)]
    n, d, loss = (np.array(column, dtype=float) for column in zip(*whole, strict=True))
    return Table(n, d, loss, np.array(lines))


def complete_row(row: Mapping[str, float], where: str) -> tuple[float, float, float]:
    """N, D and the loss of a run."""
    for name, value in row.items():
        if not (math.isfinite(value) and value > 0):
            raise TableError(f"{where}: {name} is {value:g}, but must be a number above 0")
    if "C" not in row:
        return row["N"], row["D"], row["loss"]
    n = row["N"] if "N" in row else row["C"] / (FLOPS * row["D"])
    d = row["D"] if "D" in row else row["C"] / (FLOPS * n)
    if abs(math.log(row["C"] / (FLOPS * n * d))) > math.log1p(SLACK):
        raise TableError(
            f"{where}: C is {row['C']:g}, but 6·N·D is {FLOPS * n * d:g}; correct it, or remove the column C"
        )
    return n, d, row["loss"]
