"""What an experiment comes to: a table, a claim, what was measured against it, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from clearhead.inspect.draw import figure, save

Value = str | int | float | None
Rows = list[tuple[Any, ...]]
"""Of values, each row a tuple."""
Say = Callable[[str], None]
"""Who is told how far a long experiment has come."""


def quiet(text: str) -> None:
    """Nobody is told."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """An experiment that has been run. `draw` is handed an empty figure and the theme."""

    name: str
    claim: str
    found: str  # what was measured, and where the claim does not hold
    columns: tuple[str, ...]
    rows: Rows
    draw: Callable[[Any, str], None]
    size: tuple[float, float] = (10, 4.4)  # of the figure, in inches
    more: dict[str, Any] = field(default_factory=dict)  # numbers that the table has no place for

    def column(self, name: str) -> list[Any]:
        at = self.columns.index(name)
        return [row[at] for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"experiment": self.name, "claim": self.claim, "found": self.found, "rows": rows} | self.more

    def save(self, path: str | Path, theme: str = "light") -> None:
        """Draw the figure; the suffix decides the format."""
        with figure(*self.size, theme=theme) as picture:
            self.draw(picture, theme)
            save(picture, path)


def require(least: float, **values: float | Sequence[float]) -> None:
    """Each named number, or every one of a list of them, is at least so much, and finite."""
    for name, value in values.items():
        numbers = value if isinstance(value, Sequence) else [value]
        if not numbers:
            raise ValueError(f"{name} is empty, but must hold at least one number")
        for number in numbers:
            if not least <= number < inf:
                finite = "" if number < least else " and finite"
                raise ValueError(f"{name} is {number:g}, but must be at least {least:g}{finite}")


def shown(value: Value) -> str:
    """A number as a table says it."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value


def tidy(*axes: Any) -> None:
    """A grid, and a legend without a box where there is something to tell apart."""
    for axis in axes:
        axis.grid(alpha=0.4)
        if axis.get_legend() is None and axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False)
