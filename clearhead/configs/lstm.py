"""The LSTM (long short-term memory): a recurrence in place of attention."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .base import Scope, Shape, Step
from .masks import Causal, Mask
from .mixer import MixerConfig


@dataclass(frozen=True, kw_only=True)
class LSTMConfig(MixerConfig):
    """c = f∘c + i∘g, h = o∘tanh(c), out = h·W_O  (Hochreiter & Schmidhuber 1997; forget gate: Gers et al. 2000).

    i, f, o = σ and g = tanh of x·W_X + h·W_H + b, with h and c of the token before.

    >>> LSTMConfig().weights(8)
    {'input.weight': (32, 8), 'input.bias': (32,), 'recurrent.weight': (32, 8), 'out.weight': (8, 8)}
    """

    hidden: int | None = None  # I; None: dim

    def check(self) -> None:
        self.require_positive("hidden")

    @property
    def mask(self) -> Mask:
        """A position reads all earlier ones, through h and c."""
        return Causal()

    def resolve(self, dim: int = 0) -> LSTMConfig:
        return replace(self, hidden=self.hidden or dim)

    def own_scope(self, scope: Scope) -> Scope:
        return scope.with_sizes("recurrence", I=self.hidden or scope["D"])

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = self.own_scope(scope)
        tokens = 2 * s["B"] * s["T"]
        yield s.step(
            "gates",
            "X·W_X + b",
            "B T 4·I",
            weights={"input.weight": s.shape("4·I D"), "input.bias": s.shape("4·I")},
            flops=tokens * 4 * s["I"] * s["D"],
            order="n·d²",
            kept=0,
        )
        yield s.step(
            "hidden",
            "o∘tanh(c), c = f∘c + i∘g, gates + h·W_H",
            "B T I",
            weights={"recurrent.weight": s.shape("4·I I")},
            flops=tokens * 4 * s["I"] ** 2,
            order="n·d²",
            kept=18,  # torch's kernel keeps a workspace of 15; and x and h by time, and h by rows
        )
        weights = {"out.weight": s.shape("D I")}
        yield s.step("out", "h·W_O", "B T D", weights=weights, flops=tokens * s["D"] * s["I"], order="n·d²", kept=0)

    def state(self, scope: Scope) -> dict[str, Shape]:
        """The last h and c. Constant size, however long the text."""
        s = self.own_scope(scope)
        return {"hidden": s.shape("B I"), "cell": s.shape("B I")}
