"""The result of a check, as an object, as text and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .diagnostic import Diagnostic


@dataclass
class PartReport:
    """The result for one function or class."""

    name: str
    part: str
    engine: str
    diagnostics: list[Diagnostic] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def passes(self, allow: Sequence[str] = ()) -> bool:
        return all(diagnostic.severity in ("note", *allow) for diagnostic in self.diagnostics)


@dataclass
class CheckReport:
    where: str
    parts: list[PartReport] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)  # lines that could not be run
    syntax: dict[str, Any] | None = None
    file_diagnostics: list[Diagnostic] = field(default_factory=list)  # of the file as a whole
    language: str = "en"

    @property
    def diagnostics(self) -> list[Diagnostic]:
        return [*self.file_diagnostics, *(diagnostic for part in self.parts for diagnostic in part.diagnostics)]

    @property
    def ok(self) -> bool:
        return self.passes()

    def passes(self, allow: Sequence[str] = ()) -> bool:
        """Return True if at least one part was found and every part passes."""
        return (
            bool(self.parts)
            and not self.file_diagnostics
            and self.syntax is None
            and all(p.passes(allow) for p in self.parts)
        )

    def to_dict(self, allow: Sequence[str] = ()) -> dict[str, Any]:
        from .messages import assumption, message

        return {
            "file": self.where,
            "ok": self.passes(allow),
            "parts": [
                {
                    "name": part.name,
                    "part": part.part,
                    "engine": part.engine,
                    "ok": part.passes(allow),
                    "assumed": [{"key": key, "text": assumption(key, self.language)} for key in part.assumed],
                    "diagnostics": [f.to_dict() | message(f, self.language)._asdict() for f in part.diagnostics],
                }
                for part in self.parts
            ],
            "diagnostics": [f.to_dict() | message(f, self.language)._asdict() for f in self.file_diagnostics],
            "problems": self.problems,
            "syntax": self.syntax,
        }

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        from .render import render_lines

        out = Console(file=StringIO(), width=80, color_system=None, highlight=False)
        for line in render_lines(self):
            out.print(line, soft_wrap=False)
        return out.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self.diagnostics)
