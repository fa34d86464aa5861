"""Docstrings and help texts are plain: paragraphs, `code` in backticks, and indented blocks shown as they stand."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

SPECIAL = re.compile(r"([*_|\\])")


def to_rst(lines: list[str]) -> list[str]:
    """The same text as reStructuredText that means nothing else: indented and aligned lines become literal blocks."""
    out: list[str] = []
    for paragraph in "\n".join(lines).split("\n\n"):
        block = paragraph.strip("\n").split("\n")
        aligned = sum(bool(re.search(r"\S {2,}\S", line)) for line in block) > len(block) / 2
        if aligned or any(line.startswith(" ") for line in block):
            out += ["::", "", *(f"    {line}" for line in block), ""]
        else:
            out += [*(prose(line) for line in block), ""]
    return out


def prose(line: str) -> str:
    """A line of text with `code` as inline literals and every other mark escaped."""
    pieces = re.split(r"`+([^`]+)`+", line)
    return "".join(f"``{piece}``" if i % 2 else SPECIAL.sub(r"\\\1", piece) for i, piece in enumerate(pieces))


def convert(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    lines[:] = to_rst(lines)


def escape_bars(app: Sphinx, context: Any, lines: list[str]) -> None:
    """Keep `a|b` in a help text from being read as a substitution; a line that starts with a bar keeps its layout."""
    for i, line in enumerate(lines):
        begin = re.match(r"\s*\| ?", line)
        at = begin.end() if begin else 0
        lines[i] = line[:at] + line[at:].replace("|", r"\|")


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("autodoc-process-docstring", convert)
    for part in ("description", "options", "arguments", "epilog"):
        app.connect(f"sphinx-click-process-{part}", escape_bars)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
