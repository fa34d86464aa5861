"""Attention over a few mixtures of all positions (Wang et al. 2020, Linformer)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .attention import head_widths
from .base import ConfigError, Scope, Step
from .masks import Full, Mask
from .mixer import MixerConfig


@dataclass(frozen=True, kw_only=True)
class LinformerConfig(MixerConfig):
    """softmax(Q(EXW_K)ᵀ/√K)·(FXW_V): keys and values of W rows, each a learned mixture of the positions below `length`.

    The heads share E and F, as the paper's "headwise sharing" has it; `shared`: E = F, its "key-value sharing".

    >>> LinformerConfig(heads=2, length=64, rows=4, shared=True).weights(8)
    {'key_rows.weight': (4, 64), 'qkv.weight': (24, 8), 'out.weight': (8, 8)}
    """

    heads: int
    length: int  # positions that E and F have columns for
    rows: int  # W, the paper's k
    shared: bool = False
    head_dim: int | None = None  # None: dim // heads
    value_dim: int | None = None  # None: head_dim
    mask: Mask = Full()
    out_bias: bool = False
    dropout: float = 0.0  # on the weights

    def check(self) -> None:
        self.require_positive("heads", "length", "rows", "head_dim", "value_dim")
        self.require_share("dropout")
        if self.mask != Full():
            raise ConfigError(
                f"Linformer.mask is {self.mask}, but must be Full(): all positions are mixed into {self.rows} rows "
                "before any query reads them, so none can be hidden from it; for a causal model use LinearAttention"
            )

    @property
    def longest(self) -> int:
        return self.length

    def widths(self, dim: int) -> tuple[int, int]:
        """K and U in a model of width `dim`."""
        return head_widths(dim, self.heads, self.head_dim, self.value_dim)

    def resolve(self, dim: int = 0) -> LinformerConfig:
        key, value = self.widths(dim)
        return replace(self, head_dim=key, value_dim=value)

    def steps(self, scope: Scope) -> Iterator[Step]:
        key, value = self.widths(scope["D"])
        s = scope.with_sizes("attention", H=self.heads, K=key, U=value, W=self.rows)
        if s["T"] > self.length:
            raise ConfigError(f"length is {s['T']}, but this model's Linformer has {self.length} positions")
        tokens, few = 2 * s["B"] * s["T"], 2 * s["B"] * s["W"]
        mixing = {"key_rows.weight": (self.rows, self.length)}
        if not self.shared:
            mixing["value_rows.weight"] = (self.rows, self.length)
        for name, weight in zip(("key_rows", "value_rows"), mixing, strict=False):
            yield s.step(
                name,
                "mixtures of X",
                "B W D",
                weights={weight: mixing[weight]},
                flops=tokens * s["W"] * s["D"],
                order="n·d·m",
            )
        (rows,) = s.shape("H·K+H·K+H·U")
        for name, letters, formula, count in (
            ("query", "B H T K", "X·W_Q", tokens),
            ("key", "B H W K", "EX·W_K", few),
            ("value", "B H W U", "FX·W_V", few),
        ):
            yield s.step(
                name,
                formula,
                letters,
                weights={"qkv.weight": (rows, s["D"])} if name == "query" else {},
                flops=count * s["D"] * self.heads * (value if name == "value" else key),
                order="n·d²" if name == "query" else "m·d²",
            )
        pairs = tokens * s["H"] * s["W"]
        yield s.step("scores", "QKᵀ/√K", "B H T W", flops=pairs * s["K"], order="n·d·m", kept=0)
        yield s.step("weights", "softmax over the rows", "B H T W", kept=0)
        yield s.step("mixed", "weights·V", "B H T U", flops=pairs * s["U"], order="n·d·m")
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
