"""Diagnostics: one mistake, warning or note about a part, with the smallest example that shows it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .mistakes import ANY_PART, MISTAKES
from .mistakes import BY_PART as ANY_PART_PAGES


@dataclass(frozen=True)
class Example:
    """The smallest input that fails, with the expected and the actual result."""

    inputs: Mapping[str, Any]
    expected: Any = None
    got: Any = None
    weights: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "inputs": {name: to_jsonable(value) for name, value in self.inputs.items()},
            "weights": {name: to_jsonable(value) for name, value in self.weights.items()},
            "expected": to_jsonable(self.expected),
            "got": to_jsonable(self.got),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Example:
        return cls(data["inputs"], data["expected"], data["got"], data["weights"])


@dataclass(frozen=True)
class Diagnostic:
    """One result of a check: its key, the part it belongs to, and an example."""

    part: str
    name: str
    key: str
    values: Mapping[str, Any] = field(default_factory=dict)
    example: Example | None = None
    engine: str = "torch"

    @property
    def severity(self) -> str:
        return MISTAKES[self.key].severity

    @property
    def page(self) -> str:
        return (ANY_PART_PAGES.get(self.part) if self.key in ANY_PART else None) or MISTAKES[self.key].page

    def to_dict(self) -> dict[str, Any]:
        return {
            "part": self.part,
            "name": self.name,
            "key": self.key,
            "severity": self.severity,
            "page": self.page,
            "values": dict(self.values),
            "engine": self.engine,
            "example": None if self.example is None else self.example.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Diagnostic:
        example = None if data["example"] is None else Example.from_dict(data["example"])
        return cls(data["part"], data["name"], data["key"], data["values"], example, data["engine"])


def to_jsonable(value: Any) -> Any:
    """Convert to JSON types: arrays become lists, NaN and infinity become strings."""
    if isinstance(value, np.ndarray):
        return to_jsonable(value.tolist())
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    if isinstance(value, np.generic):
        return to_jsonable(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    return value
