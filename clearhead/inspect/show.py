"""The terminal's view: shades where there is no colour, the same shades coloured where there is."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

import numpy as np
from rich.cells import cell_len, set_cell_size

from .draw import DIVERGING, SEQUENTIAL, STOPS
from .grid import pooled, pooling
from .maps import TAGS

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from .grid import Grid
    from .look import Inspection

SHADES = " ░▒▓█"
LETTERS = {"previous token": "P", "first-token sink": "S", "induction": "I", "diagonal": "D", "uniform": "U", "": "·"}
TEXT = 9  # columns of a cell that has a text
TALL = 5  # characters of a name that stands over its column
FEW = 3  # heads whose whole maps are printed


def show(inspection: Inspection, out: Console) -> None:
    """Heads by layer with what they do; the maps themselves where few were chosen; what comes next."""
    from rich.text import Text

    subject = inspection.subject
    count = sum(len(map.heads) for map in inspection.maps)
    layers = f"{len(inspection.maps)} layer{'s' * (len(inspection.maps) != 1)}, {count} head{'s' * (count != 1)}"
    wrote = f", the last {subject.written} written by the model" if subject.written else ""
    out.print(Text(f"{subject.name}: {layers}, {len(subject.labels)} positions{wrote}", "bold"))
    for line in inspection.unseen:
        out.print(Text(line, "dim"))
    if inspection.maps and count > FEW:
        show_heads(inspection, out)
    elif inspection.maps:
        for map in inspection.maps:
            for head in map.heads:
                show_grid(inspection.map(map.layer, head, map.place), out)
                if inspection.rows is None and map.shares:  # means are over all rows
                    found = next(each for each in map.described if each.head == head)
                    far = "" if found.distance is None else f", mean distance {found.distance:.1f}"
                    out.print(Text(f"entropy {found.entropy:.2f} bits{far}", "dim"))


def show_heads(inspection: Inspection, out: Console) -> None:
    """A letter for each head, as many side by side as there is room for, and the most telling heads in full."""
    from rich.table import Table
    from rich.text import Text

    widest = max(len(f"{map.place} {map.layer}") for map in inspection.maps)
    most = max(max(map.heads) for map in inspection.maps) + 1
    wide = max(3, len(str(most - 1)) + 1)
    room = max(1, (out.width - widest - 1) // wide)
    for start in range(0, most, room):
        group = range(start, min(start + room, most))
        out.print()
        out.print(Text(" " * (widest + 1) + "".join(f"{at:>{wide}}" for at in group), "dim"), no_wrap=True, crop=True)
        for map in inspection.maps:
            tags = {head.head: LETTERS[head.tag] for head in map.described}
            line = Text(f"{f'{map.place} {map.layer}':<{widest}} ", "dim")
            for at in group:
                letter = tags.get(at, " ")
                line.append(f"{letter:>{wide}}", "bold" if letter.isalpha() else "dim")
            out.print(line, no_wrap=True, crop=True)
    out.print(Text(", ".join(f"{LETTERS[tag]} {tag}" for tag in TAGS), "dim"))
    out.print()
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading in ("head", "does", "share", "entropy", "distance"):
        table.add_column(heading, justify="left" if heading in ("head", "does") else "right", no_wrap=True)
    tagged = [head for head in inspection.heads if head.tag]
    for head in sorted(tagged, key=lambda head: -(head.scores[head.tag] or 0))[:8]:
        far = "" if head.distance is None else f"{head.distance:.1f}"
        share = f"{head.scores[head.tag]:.2f}"
        table.add_row(f"{head.place} {head.layer}.{head.head}", head.tag, share, f"{head.entropy:.2f} bits", far)
    if tagged:
        out.print(table)


def show_next(found: list[tuple[str, int, float]], what: str, out: Console) -> None:
    """Bars of probability."""
    from rich.text import Text

    out.print()
    out.print(Text(what, "bold"))
    widest = max(cell_len(repr(word)) for word, _, _ in found)
    for word, _, chance in found:
        named = set_cell_size(repr(word), widest)
        out.print(Text(f"{named}  {chance:6.1%}  ").append("█" * round(30 * chance), "cyan"), no_wrap=True)


def show_grid(grid: Grid, out: Console) -> None:
    """Two characters for each cell, or its text; what does not fit the width is pooled, and said."""
    from rich.text import Text

    out.print()
    out.print(Text(grid.title, "bold"))
    values, rows, columns, shrunk = fitted(grid, out.width)
    names = [short(name, 12) for name in rows]
    left = max(map(cell_len, names), default=0)
    low, high = grid.limits
    width = TEXT if grid.texts else 2
    first = len(grid.columns) - len(columns) if grid.texts else 0
    if not grid.texts:
        for line in headings(columns):
            out.print(Text(f"{'':>{left}} {line}", "dim"), no_wrap=True, crop=True)
    for r, (name, line) in enumerate(zip(names, values.tolist(), strict=True)):
        text = Text().append(f"{' ' * (left - cell_len(name))}{name} ", "dim")
        for c, value in enumerate(line):
            text.append_text(
                cell(value, low, high, grid.signed, grid.texts[r][first + c] if grid.texts else "", width, out)
            )
        out.print(text, no_wrap=True, crop=True)
    if grid.texts:
        ends = "".join(set_cell_size(short(name, TEXT - 1), TEXT) for name in columns)
        out.print(Text(f"{'':>{left}} {ends}", "dim"), no_wrap=True, crop=True)
    root = "" if grid.signed else ", shaded by its root"
    told = "; ".join(filter(None, (f" {high:.3g} {grid.unit}{root}", shrunk, grid.note)))
    steps = [low + (high - low) * (n / 8) ** (1 if grid.signed else 2) for n in range(9)]
    scale = Text().append(f"{low:.3g} ", "dim")
    for value in steps:
        scale.append_text(cell(value, low, high, grid.signed, "", 1, out))
    out.print(scale.append(told, "dim"))


def fitted(grid: Grid, width: int) -> tuple[np.ndarray, list[str], list[str], str]:
    """The values in as many columns as there is room for: the largest of neighbours, where they are too many."""
    values = grid.values
    if grid.texts:
        first = max(0, values.shape[1] - max(1, (width - 14) // TEXT))
        return (
            values[:, first:],
            grid.rows,
            grid.columns[first:],
            f"the last {values.shape[1] - first}" if first else "",
        )
    room = max(4, (width - 14) // 2)
    step = -(-values.shape[1] // room)
    down = step if values.shape[0] > room else 1
    if step == 1 and down == 1:
        return values, grid.rows, grid.columns, ""
    return pooled(values, down, step), grid.rows[::down], grid.columns[::step], pooling(down, step)


def headings(columns: list[str]) -> list[str]:
    """The columns' names from top to bottom, a few characters of each; a wide one fills the two columns of its cell."""
    spelled = map(visible, columns)
    names = [name if len(name) <= TALL else name[: TALL - 1] + "…" for name in spelled]
    tall = max(map(len, names), default=0)
    return ["".join(set_cell_size(name.rjust(tall)[line], 2) for name in names) for line in range(tall)]


def cell(value: float, low: float, high: float, signed: bool, text: str, width: int, out: Console) -> Text:
    from rich.text import Text

    if not np.isfinite(value):
        return Text(" " * width)
    share = (value - low) / ((high - low) or 1.0)
    share = share if signed else max(share, 0.0) ** 0.5
    palette = STOPS[DIVERGING if signed else SEQUENTIAL]
    colour = palette[round(share * (len(palette) - 1))]
    strength = abs(2 * share - 1) if signed else share
    shade = SHADES[0 if strength < 0.1 else min(1 + int(strength * 4), 4)]
    sign = "-" if signed and share < 0.5 and shade != " " else shade
    coloured = out.is_terminal and not out.no_color and out.color_system is not None
    if text:
        shown = set_cell_size(short(text, width - 1), width)
        bright = sum(int(colour[i : i + 2], 16) for i in (1, 3, 5)) > 384
        return Text(shown, f"{'#000000' if bright else '#ffffff'} on {colour}" if coloured else "")
    return Text(" " * width, f"on {colour}") if coloured else Text((sign + shade)[:width])


def short(text: str, width: int) -> str:
    """A token as a label of at most so many columns, of which a wide character takes two."""
    shown = visible(text)
    return shown if cell_len(shown) <= width else set_cell_size(shown, width - 1).rstrip() + "…"


def visible(text: str) -> str:
    """A token spelled out where it cannot be seen."""
    shown = repr(text)[1:-1] if text.strip() != text or not text.isprintable() or not text else text
    return shown.replace(" ", "·") if text[:1] == " " or text[-1:] == " " else shown


def text_of(inspection: Inspection) -> str:
    """The same without a terminal."""
    from rich.console import Console

    out = Console(file=io.StringIO(), width=100, no_color=True, highlight=False)
    show(inspection, out)
    return out.file.getvalue()  # type: ignore[attr-defined]
