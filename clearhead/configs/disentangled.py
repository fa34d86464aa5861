"""Disentangled attention: contents and distances have vectors of their own, and meet in the scores (DeBERTa)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from .attention import head_widths
from .base import ConfigError, Part, Scope, Step, under
from .masks import Full, Mask
from .mixer import MixerConfig
from .norm import NormConfig


@dataclass(frozen=True, kw_only=True)
class DistanceVectorsConfig(Part):
    """A learned vector for every distance i − j, which all layers of a stack read.

    Up to half of the buckets hold one distance each. The others grow with the logarithm of the distance, up to `limit`.

    >>> DistanceVectorsConfig(limit=4).weights(8)
    {'weight': (8, 8)}
    """

    limit: int  # farther distances count as this one
    buckets: int | None = None  # on each side; None: one for each distance
    norm: NormConfig | None = None

    def check(self) -> None:
        self.require_positive("limit", "buckets")
        if self.buckets is not None and (self.buckets < 4 or self.limit <= self.buckets // 2 + 1):
            raise ConfigError(
                f"DistanceVectors.buckets is {self.buckets}, but must be at least 4, and limit, {self.limit}, above "
                f"{self.buckets // 2 + 1}"
            )

    @property
    def span(self) -> int:
        """How many vectors there are on each side."""
        return self.buckets or self.limit

    @property
    def lookup(self) -> np.ndarray:
        """The bucket of each distance from 0 to `limit`."""
        distances = np.arange(self.limit + 1)
        if self.buckets is None:
            return distances
        middle = self.buckets // 2
        far = np.maximum(distances, middle).astype(np.float32) / np.float32(middle)
        grown = np.ceil(np.log(far) / np.log(np.float32((self.limit - 1) / middle)) * np.float32(middle - 1)) + middle
        return np.where(distances <= middle, distances, grown).astype(int)  # float32, as in the original code

    def places(self, distance: Any, lookup: Any) -> Any:
        """The row of the table for each distance; `lookup` is `self.lookup` as an array of the caller's library."""
        near = lookup[abs(distance).clip(max=self.limit)]
        return ((distance > 0) * near - (distance < 0) * near + self.span).clip(0, 2 * self.span - 1)

    def steps(self, scope: Scope) -> Iterator[Step]:
        letters = f"{2 * self.span} D"
        table = {"weight": scope.shape(letters)}
        yield scope.with_sizes("attention").step("", "a vector for each distance", letters, weights=table, kept=0)
        if self.norm is not None:
            yield from under("norm", self.norm.steps(scope, letters))


@dataclass(frozen=True, kw_only=True)
class DisentangledAttentionConfig(MixerConfig):
    """softmax((q_i·k_j + q_i·K_{i−j} + Q_{i−j}·k_j)/√(3K))·V, with K and Q projected from the stack's distance vectors.

    He et al. (2021), "DeBERTa", section 3.1.

    >>> DisentangledAttentionConfig(heads=2).weights(8)["qkv.weight"]
    (24, 8)
    """

    heads: int
    head_dim: int | None = None  # None: dim // heads
    terms: tuple[Literal["content to position", "position to content"], ...] = (
        "content to position",
        "position to content",
    )
    own_positions: bool = False  # distances have matrices of their own; otherwise those of the contents
    dropout: float = 0.0  # on the weights

    def check(self) -> None:
        self.require_positive("heads", "head_dim")
        self.require_share("dropout")
        if not self.terms or len({*self.terms}) != len(self.terms):
            raise ConfigError(f"DisentangledAttention.terms is {self.terms}, but must name one or two different terms")

    @property
    def mask(self) -> Mask:
        return Full()

    @property
    def reads_distances(self) -> bool:
        return True

    @property
    def projected(self) -> tuple[str, ...]:
        """What distances are projected to, in the order of the matrix's rows: queries, then keys."""
        both = "position to content", "content to position"
        return tuple(term for term in both if term in self.terms or not self.own_positions)

    def width(self, dim: int) -> int:
        return head_widths(dim, self.heads, self.head_dim, None)[0]

    def resolve(self, dim: int = 0) -> DisentangledAttentionConfig:
        return replace(self, head_dim=self.width(dim), terms=tuple(sorted(self.terms)))

    def scale(self, dim: int) -> float:
        """1/√(K·(1 + terms)): each term adds as much variance as q·k."""
        return (self.width(dim) * (1 + len(self.terms))) ** -0.5

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("attention", H=self.heads, K=self.width(scope["D"]))
        (rows,) = s.shape("H·K")
        tokens, pairs = 2 * s["B"] * s["T"], 2 * s["B"] * s["H"] * s["T"] * s["S"]
        matrix = {"qkv.weight": (3 * rows, s["D"]), "qkv.bias": (3 * rows,)}
        flops = tokens * 3 * rows * s["D"]
        yield s.step("qkv", "X·[W_Q W_K W_V]", "B T 3·H·K", weights=matrix, flops=flops, order="n·d²")
        for name in ("query", "key", "value"):
            yield s.step(name, "split into heads", "B H T K", kept=0)
        count = len(self.terms) * rows
        own = {"positions.weight": (count, s["D"]), "positions.bias": (count,)} if self.own_positions else {}
        formula = " + ".join(
            {"content to position": "q_i·K_{i−j}", "position to content": "Q_{i−j}·k_j"}[term] for term in self.terms
        )
        yield s.step("position_scores", formula, "B H T S", weights=own, flops=pairs * s["K"], order="n²·d")
        yield s.step("scores", "(QKᵀ + position scores)·scale", "B H T S", flops=pairs * s["K"], order="n²·d", kept=0)
        yield s.step("weights", "softmax", "B H T S", kept=0)
        yield s.step("mixed", "weights·V", "B H T K", flops=pairs * s["K"], order="n²·d")
        yield s.step("concat", "heads side by side", "B T H·K", kept=0)
        yield s.step(
            "out",
            "concat·W_O",
            "B T D",
            weights={"out.weight": (s["D"], rows), "out.bias": (s["D"],)},
            flops=tokens * rows * s["D"],
            order="n·d²",
            kept=0,
        )
