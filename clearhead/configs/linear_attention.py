"""Linear attention: weights φ(q)·φ(k), so that sums over keys are computed once and not for every query."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from .attention import head_widths
from .base import Config, ConfigError, Scope, Shape, Step
from .masks import Causal, Full, Mask
from .mixer import MixerConfig

CHUNK = 128
"""Positions that a causal pass compares with each other; older ones are read through their sums."""
FAVOR_CHUNK = 32
"""`CHUNK` for the Performer's features, whose sums have a stabiliser for each block of keys."""


def favor_chunk(length: int) -> int:
    """Positions per chunk of a causal Performer: a power of two, no longer than a short text needs."""
    return min(FAVOR_CHUNK, 1 << max(length - 1, 0).bit_length())


@dataclass(frozen=True, kw_only=True)
class EluConfig(Config):
    """φ(x) = elu(x) + 1, as many features as the head is wide  (Katharopoulos et al. 2020, equation 7).

    >>> LinearAttentionConfig(heads=2, kernel=EluConfig()).kernel
    EluConfig()
    """

    formula: ClassVar[str] = "elu + 1"
    shares: ClassVar[bool] = True  # whether weights are divided by their sum

    def count(self, width: int) -> int:
        return width

    def flops(self, width: int) -> int:
        """FLOPs of the features of one vector."""
        return 0


@dataclass(frozen=True, kw_only=True)
class FavorConfig(Config):
    """φ(x) = exp(ω·x − |x|²/2)/√W for W random ω, orthogonal in sets of K, so that E[φ(q)·φ(k)] = exp(q·k): an estimate
    of softmax attention  (Choromanski et al. 2021, Performer, lemma 1 and section 2.4).

    >>> LinearAttentionConfig(heads=2, kernel=FavorConfig(features=16)).kernel
    FavorConfig(features=16, seed=0)
    """

    formula: ClassVar[str] = "ω·x − |x|²/2, exponents"
    shares: ClassVar[bool] = True

    features: int  # W
    seed: int = 0  # of the directions ω; `clearhead.nn.linear_attention.redraw` changes it

    def check(self) -> None:
        self.require_positive("features")
        if self.seed < 0:
            raise ConfigError(f"Favor.seed is {self.seed}, but must be at least 0")

    def count(self, width: int) -> int:
        return self.features

    def flops(self, width: int) -> int:
        return 2 * self.features * width


@dataclass(frozen=True, kw_only=True)
class DotConfig(Config):
    """φ(x) = x: the weights are q·k themselves, of either sign, so they are not divided by their sum, which may be 0.
    Attention without softmax, or a matrix Σ v kᵀ that each token adds to and reads  (Schlag et al. 2021).

    >>> LinearAttentionConfig(heads=2, kernel=DotConfig()).kernel
    DotConfig()
    """

    formula: ClassVar[str] = "x itself"
    shares: ClassVar[bool] = False

    def count(self, width: int) -> int:
        return width

    def flops(self, width: int) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class LinearAttentionConfig(MixerConfig):
    """Σ_j φ(q)·φ(k_j)·v_j / Σ_j φ(q)·φ(k_j) in each of H heads: O(n). With `FavorConfig`, a Performer; `DotConfig`
    leaves out the denominator.

    >>> LinearAttentionConfig(heads=2, mask=Causal()).weights(8)
    {'qkv.weight': (24, 8), 'out.weight': (8, 8)}
    """

    heads: int
    head_dim: int | None = None  # None: dim // heads
    value_dim: int | None = None  # None: head_dim
    mask: Mask = Full()  # or Causal()
    kernel: EluConfig | FavorConfig | DotConfig = EluConfig()
    qkv_bias: bool = False
    out_bias: bool = False

    def check(self) -> None:
        self.require_positive("heads", "head_dim", "value_dim")
        if self.mask not in (Full(), Causal()):
            raise ConfigError(
                f"LinearAttention.mask is {self.mask}, but must be Full() or Causal(): "
                "sums over keys cannot leave out some of them for one query and not for another"
            )

    def widths(self, dim: int) -> tuple[int, int]:
        """K and U in a model of width `dim`."""
        return head_widths(dim, self.heads, self.head_dim, self.value_dim)

    def resolve(self, dim: int = 0) -> LinearAttentionConfig:
        key, value = self.widths(dim)
        return replace(self, head_dim=key, value_dim=value)

    def own_scope(self, scope: Scope) -> Scope:
        key, value = self.widths(scope["D"])
        return scope.with_sizes("attention", H=self.heads, K=key, U=value, W=self.kernel.count(key))

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = self.own_scope(scope)
        (rows,), tokens = s.shape("H·K+H·K+H·U"), 2 * s["B"] * s["T"]
        yield s.step(
            "qkv",
            "X·[W_Q W_K W_V]",
            "B T H·K+H·K+H·U",
            weights={"qkv.weight": (rows, s["D"])} | ({"qkv.bias": (rows,)} if self.qkv_bias else {}),
            flops=tokens * s["D"] * rows,
            order="n·d²",
        )
        for name, letters in (("query", "B H T K"), ("key", "B H T K"), ("value", "B H T U")):
            yield s.step(name, "split into heads", letters, kept=0)
        flops = s["B"] * s["H"] * s["T"] * self.kernel.flops(s["K"])
        for name in ("query_features", "key_features"):
            yield s.step(name, self.kernel.formula, "B H T W", flops=flops, order="n·d·m")
        formula = "φ(Q)·Σφ(K)V / φ(Q)·Σφ(K)" if self.kernel.shares else "Q·ΣKV"
        yield s.step("mixed", formula, "B H T U", flops=self.mixing_flops(s), order="n·d·m")
        yield s.step("concat", "heads side by side", "B T H·U", kept=0)
        (joined,) = s.shape("H·U")
        yield s.step(
            "out",
            "concat·W_O",
            "B T D",
            weights={"out.weight": (s["D"], joined)} | ({"out.bias": (s["D"],)} if self.out_bias else {}),
            flops=tokens * s["D"] * joined,
            order="n·d²",
            kept=0,
        )

    def mixing_flops(self, s: Scope) -> int:
        """FLOPs of adding up the keys and of reading the sums, denominator included; in a causal pass also of comparing
        each chunk with itself."""
        through_sums, pairs = 2 * s["W"] * (s["U"] + 1), s["W"] + s["U"] + 1
        if not self.mask.causal:
            return 2 * s["B"] * s["H"] * s["T"] * through_sums
        favor = isinstance(self.kernel, FavorConfig)
        chunk = favor_chunk(s["T"]) if favor else min(CHUNK, s["T"])
        padded = -(-s["T"] // chunk) * chunk
        if favor:  # blocks of 1, 2, 4 … keys, each read by as many queries
            return s["B"] * s["H"] * padded * (2 * through_sums + (chunk - 1) * pairs)
        return 2 * s["B"] * s["H"] * padded * (through_sums + chunk * pairs)

    def state(self, scope: Scope) -> dict[str, Shape]:
        """The sums over all keys so far, and of the Performer's the exponent that each feature is relative to."""
        s = self.own_scope(scope)
        top = {"top": s.shape("B H W")} if isinstance(self.kernel, FavorConfig) else {}
        return {"sums": s.shape("B H W U+1")} | top
