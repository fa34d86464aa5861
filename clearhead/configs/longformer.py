"""Longformer's attention: a window, and global tokens that read and are read with projections of their own."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .base import ConfigError, Scope, Shape, Step
from .masks import Global, Mask, Window
from .mixer import MixerConfig
from .tiles import pairs


@dataclass(frozen=True, kw_only=True)
class LongformerConfig(MixerConfig):
    """Everyone reads its window and the first `tokens` positions; those read all, by q, k and v of a second matrix.

    Beltagy et al. 2020, "Longformer", 3.1. Without the second matrix it is `AttentionConfig` with the same mask.

    >>> LongformerConfig(heads=2, window=4, tokens=1).weights(8)
    {'qkv.weight': (24, 8), 'global_qkv.weight': (24, 8), 'out.weight': (8, 8)}
    """

    heads: int
    window: int  # the size of the `Window`: the paper's w = 512 is 257
    tokens: int  # how many positions are global; 0: the second matrix is not used
    qkv_bias: bool = False
    out_bias: bool = False
    dropout: float = 0.0  # on the weights

    def check(self) -> None:
        self.require_positive("heads", "window")
        self.require_share("dropout")
        if self.tokens < 0:
            raise ConfigError(f"Longformer.tokens is {self.tokens}, but must be at least 0")

    @property
    def mask(self) -> Mask:
        return Window(self.window) | Global(self.tokens)

    def width(self, dim: int) -> int:
        """K in a model of width `dim`."""
        if dim % self.heads:
            raise ConfigError(f"dim={dim} is not a multiple of heads={self.heads}")
        return dim // self.heads

    def absorbs(self, count: int, dim: int) -> bool:
        """Whether `count` global tokens take fewer multiplications if they read x itself, not its keys and values."""
        return count * (self.heads - 1) < dim

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("attention", H=self.heads, K=self.width(scope["D"]))
        count = min(self.tokens, s["T"])
        square = 2 * s["B"] * s["D"] ** 2  # of one projection of one token
        products = 2 * s["B"] * s["H"] * s["K"]  # of one query and one key

        def projection(name: str, formula: str, letters: str, rows: int, bias: bool, flops: int) -> Step:
            weights: dict[str, Shape] = {f"{name}.weight": (rows * s["D"], s["D"])}
            weights |= {f"{name}.bias": (rows * s["D"],)} if bias else {}
            return s.step(name, formula, letters, weights=weights, flops=flops, order="n·d²")

        yield projection("qkv", "X·[W_Q W_K W_V]", "B T 3·D", 3, self.qkv_bias, 3 * s["T"] * square)
        for name in ("query", "key", "value"):
            yield s.step(name, "split into heads", "B H T K", kept=0)
        near = pairs((self.mask,), s["T"]) * products
        yield s.step("scores", "QKᵀ/√K", "B H T T", flops=near, order="n·w·d", kept=0)
        yield s.step("weights", f"softmax where {self.mask.kind()} allows", "B H T T", kept=0)
        yield s.step("local", "weights·V", "B H T K", flops=near, order="n·w·d")
        if count:
            absorbs = self.absorbs(count, s["D"])
            flops = (count + 2 * (count if absorbs else s["T"])) * square
            yield projection("global_qkv", "first·W_Q, X·[W_K W_V], global", "B T 2·D", 3, self.qkv_bias, flops)
            far = count * s["T"] * products * (s["H"] if absorbs else 1)
            yield s.step("global.scores", "QKᵀ/√K, global", f"B H {count} T", flops=far, order="n·d", kept=0)
            yield s.step("global.weights", "softmax", f"B H {count} T", kept=0)
            yield s.step("global.mixed", "weights·V, global", f"B H {count} K", flops=far, order="n·d", kept=0)
            yield s.step("mixed", "local, but the global rows in their places", "B H T K")
        else:
            unused = projection("global_qkv", "", "B T 2·D", 3, self.qkv_bias, 0).weights
            yield s.step("mixed", "local: no token is global", "B H T K", weights=unused, kept=0)
        yield s.step("concat", "heads side by side", "B T D", kept=0)
        yield projection("out", "concat·W_O", "B T D", 1, self.out_bias, s["T"] * square)

    def state(self, scope: Scope) -> dict[str, Shape]:
        """Nothing: the global tokens read later ones, so there is no decoding."""
        return {}
