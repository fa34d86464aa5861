"""The result of an experiment: a table, a claim, what was measured, and a figure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Any

from clearhead.files import check_target
from clearhead.inspect.plotting import figure, save

Value = str | int | float | None
Rows = list[tuple[Any, ...]]
"""Table rows, each a tuple of values."""
Progress = Callable[[str], None]
"""Callback that shows the progress of a long experiment."""


def no_progress(text: str) -> None:
    """Show nothing."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """A finished experiment. `draw` receives an empty figure and the theme."""

    name: str
    claim: str
    found: str  # what was measured, and where the claim fails
    columns: tuple[str, ...]
    rows: Rows
    draw: Callable[[Any, str], None]
    size: tuple[float, float] = (10, 4.4)  # figure size in inches
    more: dict[str, Any] = field(default_factory=dict)  # values that are not in the table

    def column(self, name: str) -> list[Any]:
        at = self.columns.index(name)
        return [row[at] for row in self.rows]

    def to_dict(self) -> dict[str, Any]:
        rows = [dict(zip(self.columns, row, strict=True)) for row in self.rows]
        return {"experiment": self.name, "claim": self.claim, "found": self.found, "rows": rows} | self.more

    def save(self, path: str | Path, theme: str = "light", *, force: bool = False) -> None:
        """Draw the figure; the suffix decides the format, and `force` replaces a file that exists."""
        check_target(path, force)
        with figure(*self.size, theme=theme) as picture:
            self.draw(picture, theme)
            save(picture, path)


def require(least: float, **values: float | Sequence[float]) -> None:
    """Raise ValueError unless every named number, or each number of a list, is finite and at least `least`."""
    for name, value in values.items():
        numbers = value if isinstance(value, Sequence) else [value]
        if not numbers:
            raise ValueError(f"{name} is empty, but must hold at least one number")
        for number in numbers:
            if not least <= number < inf:
                finite = "" if number < least else " and finite"
                raise ValueError(f"{name} is {number:g}, but must be at least {least:g}{finite}")


def format_value(value: Value) -> str:
    """Format a table cell."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4g}" if isinstance(value, float) else value


def tidy(*axes: Any) -> None:
    """Add a grid, and a frameless legend if there are labels."""
    for axis in axes:
        axis.grid(alpha=0.4)
        if axis.get_legend() is None and axis.get_legend_handles_labels()[1]:
            axis.legend(frameon=False)
