"""Positions that are added: to the embedding (sinusoidal, learned) or to the scores (ALiBi)."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .base import Part, Scope, Step


@dataclass(frozen=True, kw_only=True)
class SinusoidalConfig(Part):
    """PE(pos, 2i) = sin(pos/base^(2i/D)), PE(pos, 2i+1) = cos(…)  (Vaswani et al. 2017, 3.5)."""

    base: float = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"  # the paper's; Marian stores all sines, then all cosines

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.step("", "sin, cos(pos/base^(2i/D))", "B T D", kept=0)


@dataclass(frozen=True, kw_only=True)
class LearnedConfig(Part):
    """A table of `length` vectors; a position past its end is an error."""

    length: int

    def check(self) -> None:
        self.require_positive("length")

    def steps(self, scope: Scope) -> Iterator[Step]:
        weights = {"weight": (self.length, scope["D"])}
        yield scope.step("", "row pos of a learned table", "B T D", weights=weights, kept=0)


@dataclass(frozen=True, kw_only=True)
class AlibiConfig(Part):
    """Adds −slope_h·|i − j| to the scores of head h  (Press et al. 2022)."""


AddedPositionConfig = SinusoidalConfig | LearnedConfig
