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

    @property
    def verdict(self) -> str:
        """Return "wrong", "unchecked", "fragile" or "right": the most severe diagnostic decides."""
        found = {diagnostic.severity for diagnostic in self.diagnostics}
        return next((severity for severity in ("wrong", "unchecked", "fragile") if severity in found), "right")


@dataclass
class CheckReport:
    where: str
    parts: list[PartReport] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)  # lines that could not be run
    syntax: dict[str, Any] | None = None
    file_diagnostics: list[Diagnostic] = field(default_factory=list)  # about the file as a whole
    language: str = "en"
    confined: dict[str, bool] | None = None  # whether network and writes were blocked; None: ran in this process

    @property
    def diagnostics(self) -> list[Diagnostic]:
        return [*self.file_diagnostics, *(diagnostic for part in self.parts for diagnostic in part.diagnostics)]

    @property
    def ok(self) -> bool:
        return self.passes()

    def passes(self, allow: Sequence[str] = ()) -> bool:
        """Return True if at least one part was found and every part passes."""
        is_whole = bool(self.parts) and not self.file_diagnostics and self.syntax is None
        return is_whole and all(part.passes(allow) for part in self.parts)

    @property
    def verdict(self) -> str:
        """Return "wrong", "unchecked", "fragile" or "right" for the whole file."""
        found = {part.verdict for part in self.parts} | {d.severity for d in self.file_diagnostics}
        if self.syntax is not None or "wrong" in found:
            return "wrong"
        return next((v for v in ("unchecked", "fragile") if v in found), "right" if self.parts else "unchecked")

    def exit_code(self, strict: bool = False, allow: Sequence[str] = ()) -> int:
        """Return 0 for right, 1 for wrong, 3 for not checked, 4 for fragile only (1 if strict, 0 if allowed)."""
        code = {"right": 0, "wrong": 1, "unchecked": 3, "fragile": 4}[self.verdict]
        if code == 4:
            return 1 if strict else 0 if "fragile" in allow else 4
        return code

    def to_dict(self, allow: Sequence[str] = ()) -> dict[str, Any]:
        from .messages import assumption, message

        return {
            "file": self.where,
            "ok": self.passes(allow),
            "verdict": self.verdict,
            "confined": self.confined,
            "parts": [
                {
                    "name": part.name,
                    "part": part.part,
                    "engine": part.engine,
                    "ok": part.passes(allow),
                    "verdict": part.verdict,
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

        out = Console(file=StringIO(), width=80, color_system=None, highlight=False, force_jupyter=False)
        for line in render_lines(self):
            out.print(line, soft_wrap=False)
        return out.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def _repr_html_(self) -> str:
        from .html import render_html

        return render_html(self)

    def __iter__(self) -> Iterator[Diagnostic]:
        return iter(self.diagnostics)
