"""A short causal convolution between two gates: a mixer of neighbouring tokens (LFM2, Amini et al. 2025)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .base import Scope, Shape, Step
from .masks import Causal, Mask, Window
from .mixer import MixerConfig


@dataclass(frozen=True, kw_only=True)
class ShortConvConfig(MixerConfig):
    """y = read∘conv(write∘x) in each channel, with write, read and x computed from the input by one matrix.

    Its cost per token is that of attention's projections, whatever the length  (arXiv 2511.23404, section 2).

    >>> ShortConvConfig().weights(8)
    {'input.weight': (24, 8), 'filter': (3, 8), 'out.weight': (8, 8)}
    """

    conv: int = 3  # tokens that the convolution reads, the newest included
    conv_bias: bool = False
    bias: bool = False  # of the input and out projections

    def check(self) -> None:
        self.require_positive("conv")

    @property
    def mask(self) -> Mask:
        """A position reads itself and the few before it."""
        return Causal() & Window(self.conv)

    def own_scope(self, scope: Scope) -> Scope:
        return scope.with_sizes("recurrence", O=self.conv - 1)

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = self.own_scope(scope)
        tokens = 2 * s["B"] * s["T"]

        def with_bias(name: str, letters: str) -> dict[str, Shape]:
            shape = s.shape(letters)
            return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if self.bias else {})

        yield s.step(
            "input",
            "X·[W_write W_read W_x]",
            "B T 3·D",
            weights=with_bias("input", "3·D D"),
            flops=tokens * 3 * s["D"] ** 2,
            order="n·d²",
        )
        bias = {"filter_bias": s.shape("D")} if self.conv_bias else {}
        formula = f"write∘x convolved over {self.conv} tokens"
        yield s.step("conv", formula, "B T D", weights={"filter": s.shape("O+1 D")} | bias, kept=2)
        yield s.step("gated", "read∘conv", "B T D")
        yield s.step(
            "out",
            "gated·W_O",
            "B T D",
            weights=with_bias("out", "D D"),
            flops=tokens * s["D"] ** 2,
            order="n·d²",
            kept=0,
        )

    def state(self, scope: Scope) -> dict[str, Shape]:
        """The last inputs of the convolution. Constant size, however long the text."""
        return {"conv": self.own_scope(scope).shape("B O D")}
