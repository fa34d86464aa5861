"""Mamba-2: a state-space model whose heads each forget at one rate, so that it is also a masked attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .base import ConfigError, Scope, Shape, Step, under
from .masks import Causal, Mask
from .mixer import MixerConfig
from .norm import NormConfig, RMSNormConfig


@dataclass(frozen=True, kw_only=True)
class Mamba2Config(MixerConfig):
    """h = exp(Δ·A)·h + Δ·write ⊗ x, y = read·h + skip·x in each of H heads; Δ, write and read are computed from x.

    Δ and A are one number for each head, write and read are shared by the heads of a group. x, write and read come
    through a short convolution, and y goes out through a gate and a norm  (Dao & Gu 2024, arXiv 2405.21060).

    >>> Mamba2Config(heads=2, head_dim=8, state_dim=4).weights(8)["out.weight"]
    (8, 16)
    """

    heads: int  # H
    head_dim: int = 64  # K
    groups: int = 1  # G, of heads that share write and read
    state_dim: int = 128  # Z, numbers that each channel remembers
    conv: int = 4  # tokens that the convolution reads, itself counted
    conv_bias: bool = True
    bias: bool = False  # of the input and out projections
    norm: NormConfig = RMSNormConfig()  # after the gate

    def check(self) -> None:
        self.require_positive("heads", "head_dim", "groups", "state_dim", "conv")
        if self.heads % self.groups:
            raise ConfigError(f"heads={self.heads} is not a multiple of groups={self.groups}")

    @property
    def mask(self) -> Mask:
        """A position reads all earlier ones, through h."""
        return Causal()

    @property
    def inner(self) -> int:
        """I: the width of all heads together."""
        return self.heads * self.head_dim

    @property
    def convolved(self) -> int:
        """How many channels the convolution has: x, write and read."""
        return self.inner + 2 * self.groups * self.state_dim

    def own_scope(self, scope: Scope) -> Scope:
        sizes = {"H": self.heads, "K": self.head_dim, "G": self.groups, "Z": self.state_dim}
        return scope.with_sizes("recurrence", I=self.inner, O=self.conv - 1, **sizes)

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = self.own_scope(scope)
        tokens = 2 * s["B"] * s["T"]

        def with_bias(name: str, letters: str) -> dict[str, Shape]:
            shape = s.shape(letters)
            return {f"{name}.weight": shape} | ({f"{name}.bias": shape[:1]} if self.bias else {})

        yield s.step(
            "input",
            "X·[W_gate W_x W_write W_read W_Δ]",
            "B T 2·I+2·G·Z+H",
            weights=with_bias("input", "2·I+2·G·Z+H D"),
            flops=tokens * s.shape("2·I+2·G·Z+H")[0] * s["D"],
            order="n·d²",
        )
        bias = {"filter_bias": s.shape("I+2·G·Z")} if self.conv_bias else {}
        formula = f"silu(x, write, read convolved over {self.conv} tokens)"
        filters = {"filter": s.shape("O+1 I+2·G·Z")}
        yield s.step("conv", formula, "B T I+2·G·Z", weights=filters | bias, kept=3)
        yield s.step("step", "Δ = softplus(· + b)", "B T H", weights={"step_bias": s.shape("H")}, kept=2)
        yield s.step(
            "scanned",
            "read·h + skip·x, h = exp(Δ·A)·h + Δ·write ⊗ x",
            "B T I",
            weights={"decay": s.shape("H"), "skip": s.shape("H")},
            flops=tokens * s["Z"] * s["I"],
            order="n·d",
            kept=2,
        )
        yield s.step("gated", "scanned∘silu(gate)", "B T I", kept=2)
        yield from under("norm", self.norm.steps(s, "B T I"))
        yield s.step(
            "out",
            "normed·W_O",
            "B T D",
            weights=with_bias("out", "D I"),
            flops=tokens * s["D"] * s["I"],
            order="n·d²",
            kept=0,
        )

    def state(self, scope: Scope) -> dict[str, Shape]:
        """h, and the last inputs of the convolution. Constant size, however long the text."""
        s = self.own_scope(scope)
        return {"ssm": s.shape("B H Z K"), "conv": s.shape("B O I+2·G·Z")}
