"""Positions that are added: to the embedding (sinusoidal, learned) or to the scores (ALiBi, T5's bias)."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from .base import ConfigError, Part, Scope, Step


@dataclass(frozen=True, kw_only=True)
class SinusoidalConfig(Part):
    """PE(pos, 2i) = sin(pos/base^(2i/D)), PE(pos, 2i+1) = cos(…)  (Vaswani et al. 2017, 3.5).

    >>> TokenEmbeddingConfig(vocabulary=100, position=SinusoidalConfig()).weights(8)  # it has no weights
    {'tokens.weight': (100, 8)}
    """

    base: float = 10000.0
    layout: Literal["interleaved", "halves"] = "interleaved"  # the paper's; Marian stores all sines, then all cosines
    start: int = 0  # the first token's position

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.step("", "sin, cos(pos/base^(2i/D))", "B T D", kept=0)


@dataclass(frozen=True, kw_only=True)
class LearnedConfig(Part):
    """A table of `length` vectors; a position past its end is an error.

    >>> LearnedConfig(length=512).weights(8)
    {'weight': (512, 8)}
    """

    length: int

    def check(self) -> None:
        self.require_positive("length")

    def steps(self, scope: Scope) -> Iterator[Step]:
        weights = {"weight": (self.length, scope["D"])}
        yield scope.step("", "row pos of a learned table", "B T D", weights=weights, kept=0)


@dataclass(frozen=True, kw_only=True)
class AlibiConfig(Part):
    """Adds −slope_h·|i − j| to the scores of head h  (Press et al. 2022).

    >>> AttentionConfig(heads=4, mask=Causal(), score_bias=AlibiConfig()).score_bias
    AlibiConfig(scale=1.0)
    """

    scale: float = 1.0  # of the slopes; Falcon adds ALiBi before it divides by √K

    def check(self) -> None:
        self.require_positive("scale")


@dataclass(frozen=True, kw_only=True)
class RelativeBiasConfig(Part):
    """Adds a learned number to the scores, one for each head and bucket of distances  (T5, Raffel et al. 2020, 2.1).

    Half of the buckets hold one distance each. The others grow with the logarithm of the distance, up to `limit`.
    If `mirrored`, later keys have buckets of their own; otherwise they share the bucket of distance 0.

    >>> RelativeBiasConfig(heads=4).weights(8)
    {'weight': (4, 32)}
    """

    heads: int  # H
    buckets: int = 32
    limit: int = 128
    mirrored: bool = True

    def check(self) -> None:
        self.require_positive("heads", "buckets", "limit")
        if self.buckets % 4 or self.limit <= self.one_sided // 2:
            raise ConfigError(
                f"RelativeBias.buckets is {self.buckets}, but must be a multiple of 4, and limit, {self.limit}, above "
                f"{self.one_sided // 2}"
            )

    @property
    def one_sided(self) -> int:
        """How many buckets there are for keys on one side of the query."""
        return self.buckets // 2 if self.mirrored else self.buckets

    @property
    def starts(self) -> np.ndarray:
        """The smallest distance of each bucket on one side."""
        exact = self.one_sided // 2
        distances = np.arange(exact, self.limit + 1, dtype=np.float32)
        grown = np.log(distances / np.float32(exact)) / np.float32(math.log(self.limit / exact)) * np.float32(exact)
        bucket = np.minimum(exact + grown.astype(int), self.one_sided - 1)  # float32, as in the original code
        first = exact + np.searchsorted(bucket, np.arange(exact, self.one_sided))
        return np.concatenate((np.arange(exact), first))

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("attention", H=self.heads)
        letters = f"H {self.buckets}"
        yield s.step("", "added to the scores by distance", letters, weights={"weight": s.shape(letters)}, kept=0)


AddedPositionConfig = SinusoidalConfig | LearnedConfig
