"""Normalisation over the last axis."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .base import Part, Scope, Step, under


@dataclass(frozen=True, kw_only=True)
class LayerNormConfig(Part):
    """γ·(x − μ)/√(σ² + ε) + β  (Ba et al. 2016).

    >>> LayerNormConfig().weights(8)
    {'weight': (8,), 'bias': (8,)}
    """

    eps: float = 1e-5
    bias: bool = True

    def steps(self, scope: Scope, letters: str = "B T D") -> Iterator[Step]:
        width = scope.shape(letters)[-1]
        weights = {"weight": (width,)} | ({"bias": (width,)} if self.bias else {})
        yield scope.with_sizes("norm").step("", "γ·(x − μ)/√(σ² + ε) + β", letters, weights=weights)


@dataclass(frozen=True, kw_only=True)
class RMSNormConfig(Part):
    """γ·x/√(mean(x²) + ε)  (Zhang & Sennrich 2019).

    >>> RMSNormConfig().weights(8)
    {'weight': (8,)}
    """

    eps: float = 1e-5

    def steps(self, scope: Scope, letters: str = "B T D") -> Iterator[Step]:
        weights = {"weight": (scope.shape(letters)[-1],)}
        yield scope.with_sizes("norm").step("", "γ·x/√(mean(x²) + ε)", letters, weights=weights)


@dataclass(frozen=True, kw_only=True)
class OffsetRMSNormConfig(Part):
    """(1 + γ)·x/√(mean(x²) + ε): γ is kept as its distance from one, so that decay pulls it there  (Gemma).

    >>> OffsetRMSNormConfig().weights(8)
    {'weight': (8,)}
    """

    eps: float = 1e-6

    def steps(self, scope: Scope, letters: str = "B T D") -> Iterator[Step]:
        weights = {"weight": (scope.shape(letters)[-1],)}
        yield scope.with_sizes("norm").step("", "(1 + γ)·x/√(mean(x²) + ε)", letters, weights=weights)


@dataclass(frozen=True, kw_only=True)
class PlainLayerNormConfig(Part):
    """(x − μ)/√(σ² + ε), without weights  (OLMo).

    >>> PlainLayerNormConfig().weights(8)
    {}
    """

    eps: float = 1e-5

    def steps(self, scope: Scope, letters: str = "B T D") -> Iterator[Step]:
        yield scope.with_sizes("norm").step("", "(x − μ)/√(σ² + ε)", letters)


@dataclass(frozen=True, kw_only=True)
class PlainRMSNormConfig(Part):
    """x/√(mean(x²) + ε), without weights  (Llama 4, of queries and keys).

    >>> PlainRMSNormConfig().weights(8)
    {}
    """

    eps: float = 1e-5

    def steps(self, scope: Scope, letters: str = "B T D") -> Iterator[Step]:
        yield scope.with_sizes("norm").step("", "x/√(mean(x²) + ε)", letters)


NormConfig = LayerNormConfig | RMSNormConfig | OffsetRMSNormConfig | PlainLayerNormConfig | PlainRMSNormConfig


@dataclass(frozen=True, kw_only=True)
class ProjectionNormConfig(Part):
    """A norm over all heads of q, or of k, together: over the whole projection  (OLMo 2).

    >>> AttentionConfig(heads=2, qk_norm=ProjectionNormConfig()).weights(8)["key_norm.norm.weight"]
    (8,)
    """

    norm: NormConfig = RMSNormConfig()

    def steps(self, scope: Scope, letters: str = "B H T K") -> Iterator[Step]:
        batch, heads, length, width = letters.split()
        for step in under("norm", self.norm.steps(scope, f"{batch} {length} {heads}·{width}")):
            yield replace(step, name="", letters=letters, shape=scope.shape(letters))


@dataclass(frozen=True, kw_only=True)
class HeadwiseNormConfig(Part):
    """A LayerNorm without bias over each head, with gains of its own for every head  (Cohere, StableLM).

    >>> AttentionConfig(heads=2, head_dim=4, qk_norm=HeadwiseNormConfig(width=4)).weights(8)["key_norm.weight"]
    (2, 4)
    """

    width: int  # K
    eps: float = 1e-5

    def check(self) -> None:
        self.require_positive("width")

    def steps(self, scope: Scope, letters: str = "B H T K") -> Iterator[Step]:
        _, heads, _, width = letters.split()
        weights = {"weight": scope.shape(f"{heads} {width}")}
        yield scope.with_sizes("norm").step("", "γ·(x − μ)/√(σ² + ε)", letters, weights=weights)
