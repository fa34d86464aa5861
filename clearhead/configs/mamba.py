"""Mamba: a selective state-space model, a recurrence that decides per token what to remember (Gu & Dao 2023)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .base import Scope, Shape, Step, under
from .masks import Causal, Mask
from .mixer import MixerConfig
from .norm import NormConfig

SELECTED = {"step_norm": "B T J", "write_norm": "B T Z", "read_norm": "B T Z"}
"""What `select` gives, in order, as it is normed."""


@dataclass(frozen=True, kw_only=True)
class MambaConfig(MixerConfig):
    """h = exp(Δ·A)∘h + Δx·write, y = h·read + skip∘x in each of I channels, with Δ, write and read computed from x.

    x comes through a short convolution and y goes out through a gate  (arXiv 2312.00752, algorithm 2 and figure 3).

    >>> MambaConfig(state_dim=4).weights(8)["decay"]
    (4, 16)
    """

    inner: int | None = None  # I; None: 2·dim
    state_dim: int = 16  # Z, numbers that each channel remembers
    conv: int = 4  # tokens that the convolution reads, itself counted
    rank: int | None = None  # J, of the matrix that gives Δ; None: dim/16, rounded up
    conv_bias: bool = True
    bias: bool = False  # of the input and out projections
    select_norm: NormConfig | None = None  # of the numbers that give Δ, of write and of read (Jamba)

    def check(self) -> None:
        self.require_positive("inner", "state_dim", "conv", "rank")

    @property
    def mask(self) -> Mask:
        """A position reads all earlier ones, through h."""
        return Causal()

    def widths(self, dim: int) -> tuple[int, int]:
        """I and J in a model of width `dim`."""
        return self.inner or 2 * dim, self.rank or -(-dim // 16)

    def resolve(self, dim: int = 0) -> MambaConfig:
        inner, rank = self.widths(dim)
        return replace(self, inner=inner, rank=rank)

    def own_scope(self, scope: Scope) -> Scope:
        inner, rank = self.widths(scope["D"])
        return scope.with_sizes("recurrence", I=inner, Z=self.state_dim, O=self.conv - 1, J=rank)

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = self.own_scope(scope)
        tokens = 2 * s["B"] * s["T"]

        def with_bias(name: str, letters: str, bias: bool) -> dict[str, Shape]:
            shape = s.shape(letters)
            return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if bias else {})

        yield s.step(
            "input",
            "X·[W_x W_gate]",
            "B T 2·I",
            weights=with_bias("input", "2·I D", self.bias),
            flops=tokens * 2 * s["I"] * s["D"],
            order="n·d²",
        )
        bias = {"filter_bias": s.shape("I")} if self.conv_bias else {}
        formula = f"silu(x convolved over {self.conv} tokens)"
        yield s.step("conv", formula, "B T I", weights={"filter": s.shape("O+1 I")} | bias, kept=3)
        yield s.step(
            "select",
            "conv·[W_Δ W_write W_read]",
            "B T J+2·Z",
            weights=with_bias("select", "J+2·Z I", False),
            flops=tokens * s.shape("J+2·Z")[0] * s["I"],
            order="n·d²",
        )
        if self.select_norm is not None:
            for name, letters in SELECTED.items():
                yield from under(name, self.select_norm.steps(s, letters))
        yield s.step(
            "step",
            "Δ = softplus(·W + b)",
            "B T I",
            weights=with_bias("step", "I J", True),
            flops=tokens * s["I"] * s["J"],
            order="n·d²",
            kept=2,
        )
        yield s.step(
            "scanned",
            "h·read + skip∘conv, h = exp(Δ·A)∘h + Δ·conv·write",
            "B T I",
            weights={"decay": s.shape("Z I"), "skip": s.shape("I")},
            flops=tokens * s["Z"] * s["I"],
            order="n·d",
            kept=2,  # and h between chunks, which is about as much
        )
        yield s.step("gated", "scanned∘silu(gate)", "B T I", kept=2)
        yield s.step(
            "out",
            "gated·W_O",
            "B T D",
            weights=with_bias("out", "D I", self.bias),
            flops=tokens * s["D"] * s["I"],
            order="n·d²",
            kept=0,
        )

    def state(self, scope: Scope) -> dict[str, Shape]:
        """h, and the last inputs of the convolution. Constant size, however long the text."""
        s = self.own_scope(scope)
        return {"ssm": s.shape("B Z I"), "conv": s.shape("B O I")}
