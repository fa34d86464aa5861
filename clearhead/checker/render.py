"""Render a report as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .diagnostic import Diagnostic, Example, to_jsonable
from .exercises import next_exercise
from .messages import assumption, message, part_name, word

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

    from .report import CheckReport, PartReport

STYLES = {"wrong": "red", "fragile": "yellow", "note": "cyan", "unchecked": "magenta"}
MARKS = {"right": ("✓", "green"), "wrong": ("✗", "red"), "fragile": ("✗", "yellow"), "unchecked": ("·", "magenta")}
ROWS, COLUMNS = 6, 6


def render_lines(report: CheckReport, explain: bool = False, allow: tuple[str, ...] = ()) -> Iterator[Text | Indented]:
    from rich.text import Text

    language = report.language
    yield Text(report.where, "bold")
    if report.syntax is not None:
        yield Indented(Text(word("syntax", language).format(**report.syntax), "red"), 2)
        if report.syntax["text"]:
            yield Indented(Text(report.syntax["text"].strip()), 4)
    for problem in report.problems:
        yield Indented(Text(word("problem", language).format(**problem), "yellow"), 2)
    for diagnostic in report.file_diagnostics:
        yield from diagnostic_lines(diagnostic, language, explain)
    for part in report.parts:
        yield from part_lines(part, language, explain, allow)
    if report.parts:
        yield Text("")
        yield summary(report, allow)
    missing = [name for name, holds in (report.confined or {}).items() if not holds]
    if missing:
        names = ", ".join(word(f"blocked_{name}", language) for name in missing)
        yield Text(word("unconfined", language).format(names=names), "dim")


def summary(report: CheckReport, allow: tuple[str, ...]) -> Text:
    from rich.text import Text

    language = report.language
    right = sum(part.passes(allow) for part in report.parts)
    text = word("total", language).format(right=right, all=len(report.parts))
    todo = [part for part in report.parts if any(f.key == "not-written" for f in part.diagnostics)]
    if todo:
        text += " " + word("next", language).format(name=todo[0].name, part=part_name(todo[0].part, language))
    elif report.passes(allow):
        text = word("done", language)
        later = next_exercise(Path(report.where))
        if later is not None:
            text += " " + word("next_file", language).format(path=later)
    return Text(text, "bold green" if report.passes(allow) else "bold")


def part_lines(part: PartReport, language: str, explain: bool, allow: tuple[str, ...]) -> Iterator[Text | Indented]:
    from rich.text import Text

    verdict = "right" if part.passes(allow) else part.verdict
    mark, style = MARKS[verdict]
    yield Text("")
    head = Text(f"{mark} ", style).append(part.name, "bold").append(f"  {part_name(part.part, language)}", "dim")
    yield head
    for diagnostic in part.diagnostics:
        if diagnostic.severity == "note" and not explain:
            continue
        yield from diagnostic_lines(diagnostic, language, explain)
    if part.assumed:
        texts = "; ".join(assumption(key, language) for key in part.assumed)
        yield Indented(Text(f"{word('assumed', language)}: {texts}", "dim"), 2)


def diagnostic_lines(diagnostic: Diagnostic, language: str, explain: bool) -> Iterator[Text | Indented]:
    from rich.text import Text

    text, advice = message(diagnostic, language)
    head = Text(f"{word(diagnostic.severity, language)}: ", STYLES[diagnostic.severity]).append(
        text.rstrip(), "default"
    )
    yield Indented(head, 2)
    if diagnostic.example is not None:
        yield from example_lines(diagnostic.example, language, explain)
    if diagnostic.severity != "unchecked" or diagnostic.key != "not-written":
        yield Indented(Text(f"{word('advice', language)}: ", "green").append(advice, "default"), 4)
        yield Indented(Text(f"{word('read', language)}: {diagnostic.page}", "dim"), 4)


@dataclass(frozen=True)
class Indented:
    """Text that is indented and wrapped to the remaining width, without trailing spaces."""

    text: Text
    by: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in self.text.wrap(console, options.max_width - self.by):
            line.rstrip()
            yield Text(" " * self.by).append_text(line)


def example_lines(example: Example, language: str, explain: bool) -> Iterator[Indented]:
    """Show the input on one line, then the expected and the actual result side by side."""
    from rich.text import Text

    inputs = dict(example.inputs) | (dict(example.weights) if explain else {})
    given = "  ".join(f"{name} = {format_inline(value)}" for name, value in inputs.items() if is_small(value))
    if given:
        yield Indented(Text(f"{word('on', language)} {given}", "cyan"), 4)
    if example.expected is None and example.got is None:
        return
    left, right = grid(example.expected), grid(example.got)
    height = max(len(left), len(right))
    left += [""] * (height - len(left))
    right += [""] * (height - len(right))
    title, other = word("expected", language), word("got", language)
    width = max([cells(title), *map(cells, left)]) + 3
    together = max([width + cells(line) for line in right] or [0]) <= 72
    if together:
        yield Indented(Text(pad_right(title, width) + other, "dim"), 4)
        for one, two in zip(left, right, strict=True):
            yield Indented(Text(pad_right(one, width) + two), 4)
        return
    for name, rows in ((title, left), (other, right)):
        for index, row in enumerate(row for row in rows if row):
            head = pad_right(name if index == 0 else "", max(cells(title), cells(other)) + 2)
            yield Indented(Text(head, "dim").append(row, "default"), 4)


def cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def pad_right(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def is_small(value: Any) -> bool:
    return np.size(np.array(to_jsonable(value), dtype=object)) <= 24


def format_number(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | float):
        value = 0 if abs(value) < 1e-9 else value
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:g}"
    return str(value)


def drop_leading_ones(value: Any) -> Any:
    """Drop leading axes of length 1."""
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return value


def format_inline(value: Any) -> str:
    value = drop_leading_ones(to_jsonable(value))
    if isinstance(value, list):
        return (
            "["
            + ", ".join(format_inline(item) if isinstance(item, list) else format_number(item) for item in value)
            + "]"
        )
    return format_number(value)


def grid(value: Any) -> list[str]:
    """Format an array as one line per row, with aligned columns."""
    value = drop_leading_ones(to_jsonable(value))
    if isinstance(value, str):
        return value.splitlines() or [""]
    if not isinstance(value, list):
        return [] if value is None else [format_number(value)]
    rows = rows_of(value)
    texts = [[format_number(item) for item in row[:COLUMNS]] + ["…"] * (len(row) > COLUMNS) for row in rows]
    wide = max((len(text) for row in texts for text in row), default=0)
    more = ["…"] if len(texts) > ROWS else []
    return ["[" + " ".join(text.rjust(wide) for text in row) + "]" for row in texts[:ROWS]] + more


def rows_of(value: list[Any]) -> list[list[Any]]:
    if value and isinstance(value[0], list):
        return [row for item in value for row in rows_of(item)]
    return [value]
