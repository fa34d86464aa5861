"""What a check has to say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .mistakes import ANY_PART, MISTAKES
from .mistakes import BY_PART as ANY_PART_PAGES


@dataclass(frozen=True)
class Example:
    """The smallest input on which it fails, and what should have come out."""

    inputs: Mapping[str, Any]
    expected: Any = None
    got: Any = None
    weights: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return {
            "inputs": {name: listed(value) for name, value in self.inputs.items()},
            "weights": {name: listed(value) for name, value in self.weights.items()},
            "expected": listed(self.expected),
            "got": listed(self.got),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Example:
        return cls(data["inputs"], data["expected"], data["got"], data["weights"])


@dataclass(frozen=True)
class Finding:
    """A mistake by its key, where it is, and how it shows."""

    part: str
    name: str
    key: str
    values: Mapping[str, Any] = field(default_factory=dict)
    example: Example | None = None

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
            "example": None if self.example is None else self.example.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Finding:
        example = None if data["example"] is None else Example.from_dict(data["example"])
        return cls(data["part"], data["name"], data["key"], data["values"], example)


def listed(value: Any) -> Any:
    """Arrays as lists, numbers that JSON lacks as words."""
    if isinstance(value, np.ndarray):
        return listed(value.tolist())
    if isinstance(value, list | tuple):
        return [listed(item) for item in value]
    if isinstance(value, np.generic):
        return listed(value.item())
    if isinstance(value, float):
        return value if np.isfinite(value) else str(value)
    return value
