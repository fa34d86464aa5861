"""The report as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .exercises import following
from .finding import Example, Finding, listed
from .messages import assumption, message, part_name, word
from .report import PartReport, Report

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.text import Text

STYLES = {"wrong": "red", "fragile": "yellow", "note": "cyan", "unchecked": "magenta"}
ROWS, COLUMNS = 6, 6


def lines(report: Report, explain: bool = False, allow: tuple[str, ...] = ()) -> Iterator[Text | Indented]:
    from rich.text import Text

    say = report.language
    yield Text(report.where, "bold")
    if report.syntax is not None:
        yield Indented(Text(word("syntax", say).format(**report.syntax), "red"), 2)
        if report.syntax["text"]:
            yield Indented(Text(report.syntax["text"].strip()), 4)
    for problem in report.problems:
        yield Indented(Text(word("problem", say).format(**problem), "yellow"), 2)
    for finding in report.failed:
        yield from finding_lines(finding, say, explain)
    for part in report.parts:
        yield from part_lines(part, say, explain, allow)
    if report.parts:
        yield Text("")
        yield summary(report, allow)


def summary(report: Report, allow: tuple[str, ...]) -> Text:
    from rich.text import Text

    say = report.language
    right = sum(part.passes(allow) for part in report.parts)
    text = word("total", say).format(right=right, all=len(report.parts))
    todo = [part for part in report.parts if any(f.key == "not-written" for f in part.findings)]
    if todo:
        text += " " + word("next", say).format(name=todo[0].name, part=part_name(todo[0].part, say))
    elif report.passes(allow):
        text = word("done", say)
        later = following(Path(report.where))
        if later is not None:
            text += " " + word("next_file", say).format(path=later)
    return Text(text, "bold green" if report.passes(allow) else "bold")


def part_lines(part: PartReport, say: str, explain: bool, allow: tuple[str, ...]) -> Iterator[Text | Indented]:
    from rich.text import Text

    passes = part.passes(allow)
    unwritten = any(f.severity == "unchecked" for f in part.findings)
    mark, style = ("✓", "green") if passes else ("·", "magenta") if unwritten else ("✗", "red")
    yield Text("")
    head = Text(f"{mark} ", style).append(part.name, "bold").append(f"  {part_name(part.part, say)}", "dim")
    yield head
    for finding in part.findings:
        if finding.severity == "note" and not explain:
            continue
        yield from finding_lines(finding, say, explain)
    if part.assumed and (explain or not passes):
        told = "; ".join(assumption(key, say) for key in part.assumed)
        yield Indented(Text(f"{word('assumed', say)}: {told}", "dim"), 2)


def finding_lines(finding: Finding, say: str, explain: bool) -> Iterator[Text | Indented]:
    from rich.text import Text

    text, advice = message(finding, say)
    head = Text(f"{word(finding.severity, say)}: ", STYLES[finding.severity]).append(text.rstrip(), "default")
    yield Indented(head, 2)
    if finding.example is not None:
        yield from example_lines(finding.example, say, explain)
    if finding.severity != "unchecked" or finding.key != "not-written":
        yield Indented(Text(f"{word('advice', say)}: ", "green").append(advice, "default"), 4)
        yield Indented(Text(f"{word('read', say)}: {finding.page}", "dim"), 4)


@dataclass(frozen=True)
class Indented:
    """Wrapped to the width that is left, with nothing behind the last word."""

    text: Text
    by: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        from rich.text import Text

        for line in self.text.wrap(console, options.max_width - self.by):
            line.rstrip()
            yield Text(" " * self.by).append_text(line)


def example_lines(example: Example, say: str, explain: bool) -> Iterator[Indented]:
    """The input in one line, then expected and got side by side."""
    from rich.text import Text

    inputs = dict(example.inputs) | (dict(example.weights) if explain else {})
    given = "  ".join(f"{name} = {flat(value)}" for name, value in inputs.items() if small(value))
    if given:
        yield Indented(Text(f"{word('on', say)} {given}", "cyan"), 4)
    if example.expected is None and example.got is None:
        return
    left, right = grid(example.expected), grid(example.got)
    height = max(len(left), len(right))
    left += [""] * (height - len(left))
    right += [""] * (height - len(right))
    title, other = word("expected", say), word("got", say)
    width = max([cells(title), *map(cells, left)]) + 3
    together = max([width + cells(line) for line in right] or [0]) <= 72
    if together:
        yield Indented(Text(padded(title, width) + other, "dim"), 4)
        for one, two in zip(left, right, strict=True):
            yield Indented(Text(padded(one, width) + two), 4)
        return
    for name, rows in ((title, left), (other, right)):
        for index, row in enumerate(row for row in rows if row):
            head = padded(name if index == 0 else "", max(cells(title), cells(other)) + 2)
            yield Indented(Text(head, "dim").append(row, "default"), 4)


def cells(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def padded(text: str, width: int) -> str:
    return text + " " * (width - cells(text))


def small(value: Any) -> bool:
    return np.size(np.array(listed(value), dtype=object)) <= 24


def number(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return str(bool(value))
    if isinstance(value, int | float):
        value = 0 if abs(value) < 1e-9 else value
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:g}"
    return str(value)


def squeezed(value: Any) -> Any:
    """Without leading axes of length 1."""
    while isinstance(value, list) and len(value) == 1 and isinstance(value[0], list):
        value = value[0]
    return value


def flat(value: Any) -> str:
    value = squeezed(listed(value))
    if isinstance(value, list):
        return "[" + ", ".join(flat(item) if isinstance(item, list) else number(item) for item in value) + "]"
    return number(value)


def grid(value: Any) -> list[str]:
    """One line per row, numbers in columns."""
    value = squeezed(listed(value))
    if isinstance(value, str):
        return value.splitlines() or [""]
    if not isinstance(value, list):
        return [] if value is None else [number(value)]
    rows = matrix(value)
    texts = [[number(item) for item in row[:COLUMNS]] + ["…"] * (len(row) > COLUMNS) for row in rows]
    wide = max((len(text) for row in texts for text in row), default=0)
    more = ["…"] if len(texts) > ROWS else []
    return ["[" + " ".join(text.rjust(wide) for text in row) + "]" for row in texts[:ROWS]] + more


def matrix(value: list[Any]) -> list[list[Any]]:
    if value and isinstance(value[0], list):
        return [row for item in value for row in matrix(item)]
    return [value]
