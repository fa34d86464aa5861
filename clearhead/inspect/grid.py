"""A labelled matrix that can be drawn, printed, saved and displayed in notebooks."""

from __future__ import annotations

import base64
import csv
import html
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from clearhead.files import check_target, stage_file

from .plotting import DIVERGING, SEQUENTIAL, check_file, escape_label, figure, heat, label, save

TABLES = (".csv", ".npz")


@dataclass(frozen=True)
class Grid:
    """Values by row and column, with their labels."""

    title: str
    values: Float[np.ndarray, "R C"]  # NaN for a missing value
    rows: list[str]
    columns: list[str]
    row_axis: str
    column_axis: str
    unit: str
    signed: bool = False  # use a diverging colour map centred at zero
    texts: list[list[str]] | None = None  # labels inside the cells
    note: str = ""

    @property
    def limits(self) -> tuple[float, float]:
        """The values at the ends of the colour scale: 0 to 1 for weights, otherwise up to the largest value."""
        finite = self.values[np.isfinite(self.values)]
        most = float(abs(finite).max()) if finite.size else 1.0
        if self.signed:
            return -(most or 1.0), most or 1.0
        return 0.0, 1.0 if most <= 1 else most

    def save(self, path: str | Path, theme: str = "light", *, force: bool = False) -> None:
        """Save as a picture or a table, depending on the suffix; `force` replaces a file that exists."""
        path = Path(path)
        suffix = path.suffix.lower()
        check_file(path, TABLES)
        check_target(path, force)
        if suffix == ".csv":
            self.write_csv(path)
        elif suffix == ".npz":
            with stage_file(path) as part, part.open("wb") as file:
                np.savez_compressed(file, values=self.values, rows=np.array(self.rows), columns=np.array(self.columns))
        else:
            self.draw(path, theme)

    def write_csv(self, path: Path) -> None:
        """Write one line per cell that has a value."""
        with stage_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file)
            out.writerow(
                ["row", self.row_axis, "column", self.column_axis, self.unit, *(["text"] if self.texts else [])]
            )
            for r, c in np.argwhere(np.isfinite(self.values)).tolist():
                text = [self.texts[r][c]] if self.texts else []
                out.writerow([r, self.rows[r], c, self.columns[c], repr(float(self.values[r, c])), *text])

    def draw(self, path: str | Path | io.BytesIO, theme: str = "light") -> None:
        """Draw a heat map with labels, unit and colour bar."""
        shown = self.values.shape if self.texts else tuple(min(n, 40) for n in self.values.shape)
        cell = (0.2, 0.72) if self.texts else (0.16, 0.16)
        width, height = max(3.2, cell[1] * shown[1]) + 2.4, max(1.6, cell[0] * shown[0]) + 1.7
        with figure(width, height, theme) as picture:
            axis = picture.subplots()
            low, high = self.limits
            image = heat(axis, self.values, low, high, DIVERGING if self.signed else SEQUENTIAL)
            label(axis, self.rows, self.columns)
            for r, line in enumerate(self.texts or []):
                for c, text in enumerate(line):
                    if np.isfinite(self.values[r, c]):
                        shade = sum(image.cmap(image.norm(self.values[r, c]))[:3]) / 3
                        ink = "white" if shade < 0.5 else "black"
                        axis.text(c, r, escape_label(text)[:9], ha="center", va="center", fontsize=7, color=ink)
            axis.set_xlabel(self.column_axis)
            axis.set_ylabel(self.row_axis)
            axis.set_title(self.title, fontsize=10, wrap=True)
            if self.note:
                picture.supxlabel(self.note, fontsize=7)
            picture.colorbar(image, ax=axis, label=self.unit)
            if isinstance(path, io.BytesIO):
                picture.savefig(path, format="png", dpi=110)
            else:
                save(picture, path)

    def _repr_html_(self) -> str:
        """Show the picture in a notebook."""
        out = io.BytesIO()
        self.draw(out)
        source = f"data:image/png;base64,{base64.b64encode(out.getvalue()).decode()}"
        return f'<img alt="{html.escape(self.title)}" src="{source}">'


def pool(values: Float[np.ndarray, "R C"], down: int, across: int) -> Float[np.ndarray, "Rows Columns"]:
    """Reduce each block of `down` × `across` cells to the value farthest from 0."""
    padded = np.full((-(-values.shape[0] // down) * down, -(-values.shape[1] // across) * across), np.nan)
    padded[: values.shape[0], : values.shape[1]] = values
    blocks = padded.reshape(padded.shape[0] // down, down, padded.shape[1] // across, across)
    filled = np.where(np.isnan(blocks), 0, blocks)
    lowest, highest = filled.min((1, 3)), filled.max((1, 3))
    return np.where(-lowest > highest, lowest, highest)


def pooling_note(down: int, across: int) -> str:
    """Return the note about pooled cells."""
    return f"each cell is the largest of {down} × {across}"
