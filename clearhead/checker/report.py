"""Everything that was found about a file or an object, for people and for programs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from .finding import Finding


@dataclass
class PartReport:
    """One part of the file."""

    name: str
    part: str
    engine: str
    findings: list[Finding] = field(default_factory=list)
    assumed: list[str] = field(default_factory=list)

    def passes(self, allow: Sequence[str] = ()) -> bool:
        return all(finding.severity in ("note", *allow) for finding in self.findings)


@dataclass
class Report:
    where: str
    parts: list[PartReport] = field(default_factory=list)
    problems: list[dict[str, Any]] = field(default_factory=list)  # lines that could not be run
    syntax: dict[str, Any] | None = None
    failed: list[Finding] = field(default_factory=list)  # of the file as a whole
    language: str = "en"

    @property
    def findings(self) -> list[Finding]:
        return [*self.failed, *(finding for part in self.parts for finding in part.findings)]

    @property
    def ok(self) -> bool:
        return self.passes()

    def passes(self, allow: Sequence[str] = ()) -> bool:
        """Something was found, and all of it passes."""
        return bool(self.parts) and not self.failed and self.syntax is None and all(p.passes(allow) for p in self.parts)

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
                    "findings": [f.to_dict() | message(f, self.language)._asdict() for f in part.findings],
                }
                for part in self.parts
            ],
            "findings": [f.to_dict() | message(f, self.language)._asdict() for f in self.failed],
            "problems": self.problems,
            "syntax": self.syntax,
        }

    def __str__(self) -> str:
        from io import StringIO

        from rich.console import Console

        from .show import lines

        out = Console(file=StringIO(), width=80, color_system=None, highlight=False)
        for line in lines(self):
            out.print(line, soft_wrap=False)
        return out.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.findings)
