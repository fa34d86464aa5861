"""Position-wise feed-forward layers, plain and gated."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from .base import ConfigError, Part, Scope, Step, under

Activation = Literal["relu", "relu2", "gelu", "gelu_tanh", "gelu_quick", "silu"]


@dataclass(frozen=True, kw_only=True)
class FeedForwardConfig(Part):
    """down(activation(up(x)))  (Vaswani et al. 2017, 3.3).

    >>> FeedForwardConfig(hidden=32, bias=False).weights(8)
    {'up.weight': (32, 8), 'down.weight': (8, 32)}
    """

    traceable: ClassVar[bool] = True

    hidden: int | None = None  # F; None: 4·dim
    activation: Activation = "gelu"
    bias: bool = True

    def check(self) -> None:
        self.require_positive("hidden")

    def width(self, dim: int) -> int:
        return self.hidden or 4 * dim

    def resolve(self, dim: int = 0) -> FeedForwardConfig:
        return replace(self, hidden=self.width(dim))

    def matrices(self, dim: int) -> dict[str, tuple[int, int]]:
        """The shape [out, in] of each matrix, in the order in which they run."""
        return {"up": (self.width(dim), dim), "down": (dim, self.width(dim))}

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield from feed_forward_steps(self, scope, {"up": f"{self.activation}(X·W_up)", "down": "·W_down"})


@dataclass(frozen=True, kw_only=True)
class GatedFeedForwardConfig(Part):
    """down(activation(gate(x)) ⊙ up(x)); SwiGLU with silu, GEGLU with gelu  (Shazeer 2020).

    >>> GatedFeedForwardConfig(hidden=24).weights(8)
    {'gate.weight': (24, 8), 'up.weight': (24, 8), 'down.weight': (8, 24)}
    """

    traceable: ClassVar[bool] = True

    hidden: int | None = None  # F; None: 8/3·dim, as many weights as a plain layer of 4·dim
    activation: Activation = "silu"
    bias: bool = False

    def check(self) -> None:
        self.require_positive("hidden")

    def width(self, dim: int) -> int:
        return self.hidden or 8 * dim // 3

    def resolve(self, dim: int = 0) -> GatedFeedForwardConfig:
        return replace(self, hidden=self.width(dim))

    def matrices(self, dim: int) -> dict[str, tuple[int, int]]:
        return {"gate": (self.width(dim), dim), "up": (self.width(dim), dim), "down": (dim, self.width(dim))}

    def steps(self, scope: Scope) -> Iterator[Step]:
        formulas = {"gate": f"{self.activation}(X·W_gate)", "up": "gate ⊙ X·W_up", "down": "·W_down"}
        yield from feed_forward_steps(self, scope, formulas)


@dataclass(frozen=True, kw_only=True)
class ClampedFeedForwardConfig(GatedFeedForwardConfig):
    """down(g·σ(steepness·g) ⊙ (u + 1)), g = min(gate(x), limit), u = up(x) cut to ±limit  (gpt-oss).

    >>> ClampedFeedForwardConfig(hidden=24, limit=7.0).weights(8)
    {'gate.weight': (24, 8), 'up.weight': (24, 8), 'down.weight': (8, 24)}
    """

    limit: float = 7.0
    steepness: float = 1.702

    def check(self) -> None:
        super().check()
        self.require_positive("limit", "steepness")
        if self.activation != "silu":
            raise ConfigError(f"ClampedFeedForward.activation is {self.activation!r}, but must be 'silu'")

    def steps(self, scope: Scope) -> Iterator[Step]:
        gate = f"g·σ({self.steepness:g}·g), g = min(X·W_gate, {self.limit:g})"
        formulas = {"gate": gate, "up": f"gate ⊙ (1 + clip(X·W_up, ±{self.limit:g}))", "down": "·W_down"}
        yield from feed_forward_steps(self, scope, formulas)


@dataclass(frozen=True, kw_only=True)
class SwitchedFeedForwardConfig(Part):
    """σ(x·w)·ffn(x): a learned switch decides for each token how much of the layer passes  (Qwen2-MoE).

    >>> SwitchedFeedForwardConfig(ffn=FeedForwardConfig(hidden=32, bias=False)).weights(8)
    {'ffn.up.weight': (32, 8), 'ffn.down.weight': (8, 32), 'switch.weight': (1, 8)}
    """

    ffn: FeedForwardConfig | GatedFeedForwardConfig

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes(scope.part or "ffn")
        yield from under("ffn", self.ffn.steps(s))
        yield s.step(
            "switch",
            "σ(X·w)",
            "B T 1",
            weights={"switch.weight": (1, s["D"])},
            flops=2 * s["B"] * s["T"] * s["D"],
            order="n·d",
        )


def feed_forward_steps(
    config: FeedForwardConfig | GatedFeedForwardConfig, scope: Scope, formulas: dict[str, str]
) -> Iterator[Step]:
    s = scope.with_sizes(scope.part or "ffn", F=config.width(scope["D"]))
    for name, (rows, columns) in config.matrices(s["D"]).items():
        yield s.step(
            name,
            formulas[name],
            "B T D" if name == "down" else "B T F",
            weights={f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if config.bias else {}),
            flops=2 * s["B"] * s["T"] * rows * columns,
            order="n·d²",
            # The backward pass needs the values before and after an activation or product; of relu only those after.
            kept=0 if name == "down" else 1 if config.activation == "relu" and name == "up" else 2,
        )
