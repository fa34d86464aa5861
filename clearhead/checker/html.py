"""Render a report as HTML for notebooks: verdict, smallest counterexample as coloured matrices, and hint."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np

from .diagnostic import Diagnostic, Example, to_jsonable
from .messages import assumption, message, part_name, word
from .render import MARKS, STYLES, format_number, rows_of

if TYPE_CHECKING:
    from .report import CheckReport, PartReport

COLOURS = {"red": "#c0392b", "yellow": "#b7791f", "cyan": "#2b6cb0", "magenta": "#805ad5", "green": "#2f855a"}
ROWS, COLUMNS = 8, 8


def render_html(report: CheckReport) -> str:
    """Return the whole report as one <div>."""
    language = report.language
    lines = [f"<b>{escape(report.where)}</b>"]
    if report.syntax is not None:
        lines.append(colour_span(word("syntax", language).format(**report.syntax), "red"))
    lines += [colour_span(word("problem", language).format(**problem), "yellow") for problem in report.problems]
    lines += [render_diagnostic(diagnostic, language) for diagnostic in report.file_diagnostics]
    lines += [render_part(part, language) for part in report.parts]
    body = "".join(f"<div>{line}</div>" for line in lines)
    return f'<div style="font-family:sans-serif;line-height:1.5">{body}</div>'


def colour_span(text: str, colour: str) -> str:
    return f'<span style="color:{COLOURS[colour]}">{escape(text)}</span>'


def render_part(part: PartReport, language: str) -> str:
    mark, colour = MARKS[part.verdict]
    kind = escape(part_name(part.part, language))
    head = f"{colour_span(mark, colour)} <b>{escape(part.name)}</b> <small>{kind}</small>"
    shown = [d for d in part.diagnostics if d.severity != "note"]
    body = "".join(render_diagnostic(diagnostic, language) for diagnostic in shown)
    if part.assumed:
        texts = "; ".join(assumption(key, language) for key in part.assumed)
        body += f"<small>{escape(word('assumed', language))}: {escape(texts)}</small>"
    return f'<div style="margin-top:.6em">{head}<div style="margin-left:1.2em">{body}</div></div>'


def render_diagnostic(diagnostic: Diagnostic, language: str) -> str:
    text, advice = message(diagnostic, language)
    severity = colour_span(word(diagnostic.severity, language) + ": ", STYLES[diagnostic.severity])
    example = "" if diagnostic.example is None else render_example(diagnostic.example, language)
    hint = f"{colour_span(word('advice', language) + ': ', 'green')}{escape(advice)}"
    return f"<div>{severity}{escape(text)}{example}<div>{hint}</div></div>"


def render_example(example: Example, language: str) -> str:
    """Return inputs, expected and actual result side by side as tables."""
    results = {word("expected", language): example.expected, word("got", language): example.got}
    named = [*example.inputs.items(), *results.items()]
    cells = [
        f'<td style="vertical-align:top;padding:0 1em 0 0"><small>{escape(str(name))}</small>{render_array(value)}</td>'
        for name, value in named
        if value is not None
    ]
    return f'<table style="border:none"><tr>{"".join(cells)}</tr></table>' if cells else ""


def render_array(value: Any) -> str:
    """Return an array as a table whose cells are coloured by value; anything else as text."""
    value = to_jsonable(value)
    if not isinstance(value, list):
        return f"<pre>{escape(format_number(value))}</pre>"
    rows = rows_of(value)[:ROWS]
    numbers = [abs(item) for row in rows for item in row if isinstance(item, int | float)]
    top = max([number for number in numbers if np.isfinite(number)], default=0.0) or 1.0
    body = "".join("<tr>" + "".join(render_cell(item, top) for item in row[:COLUMNS]) + "</tr>" for row in rows)
    return f'<table style="border-collapse:collapse;font-family:monospace">{body}</table>'


def render_cell(item: Any, top: float) -> str:
    """Blue for positive, red for negative numbers; NaN and infinity are yellow."""
    colour = "255,214,10,.6"
    if isinstance(item, int | float):
        colour = f"{'66,133,244' if item >= 0 else '234,67,53'},{min(abs(item) / top, 1) * 0.6:.2f}"
    style = f"background:rgba({colour});padding:1px 6px;text-align:right;border:1px solid #ccc"
    return f'<td style="{style}">{escape(format_number(item))}</td>'
