"""Feed-forward layers, plain and gated: what each position computes on its own.

The tap `pre_activation` is what the activation reads; `up` is what `down` reads.

    x  B T D  ──  up  ──  B T F  ──  activation  ──  down  ──  B T D               plain
    x  B T D  ──  gate, up  ──  B T F each  ──  act(gate) ∘ up  ──  down  ──  B T D    gated

Two thirds of a block's weights are here. The layer reads no other position, so it needs no mask, no state and no cache.

`gate` and `up` are two matrices and not one of 2·F rows: each is quantized, adapted and tapped under its own name. The
decode kernels read both in one pass over x (`kernels/decode.py`). `reference/ffn.py` has the formulas and the backward.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.configs import (
    ClampedFeedForwardConfig,
    FeedForwardConfig,
    GatedFeedForwardConfig,
    SwitchedFeedForwardConfig,
)
from clearhead.functional import ACTIVATIONS
from clearhead.precision.matrix import Linear

from .build import build_part, builds
from .context import Context


@builds(FeedForwardConfig)
class FeedForward(nn.Module):
    """down(activation(up(x))): D → F → D, with F = 4·D by default (2017, GPT-2, BERT)."""

    def __init__(self, config: FeedForwardConfig, dim: int) -> None:
        super().__init__()
        self.activation = config.activation
        hidden = config.width(dim)
        self.up = Linear(dim, hidden, bias=config.bias)
        self.down = Linear(hidden, dim, bias=config.bias)

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        """Taps: pre_activation B T F, up B T F, down B T D."""
        hidden = context.tap("up", ACTIVATIONS[self.activation](context.tap("pre_activation", self.up(x))))
        return context.tap("down", self.down(hidden))


@builds(GatedFeedForwardConfig)
@builds(ClampedFeedForwardConfig)
class GatedFeedForward(nn.Module):
    """down(activation(gate(x)) ⊙ up(x)): the gate decides how much of `up` passes (SwiGLU, GEGLU; LLaMA, Gemma).

    F is 8/3·D by default: three matrices of that width have as many weights as two of width 4·D.
    """

    def __init__(self, config: GatedFeedForwardConfig, dim: int) -> None:
        super().__init__()
        self.config, self.activation = config, config.activation
        hidden = config.width(dim)
        self.gate = Linear(dim, hidden, bias=config.bias)
        self.up = Linear(dim, hidden, bias=config.bias)
        self.down = Linear(hidden, dim, bias=config.bias)

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        """Taps: pre_activation, gate and up, B T F each, and down B T D."""
        hidden = activate(self.config, self.gate(x), self.up(x), context.tap)
        return context.tap("down", self.down(hidden))


@builds(SwitchedFeedForwardConfig)
class SwitchedFeedForward(nn.Module):
    """σ(x·w)·ffn(x): one number for each token says how much of the layer passes (Qwen2-MoE)."""

    def __init__(self, config: SwitchedFeedForwardConfig, dim: int) -> None:
        super().__init__()
        self.ffn = build_part(config.ffn, dim)
        self.switch = nn.Linear(dim, 1, bias=False)  # never quantized: it is one row

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        out = self.ffn(x, context.at("ffn"))
        return out * context.tap("switch", self.switch(x).sigmoid())


def activate(
    config: FeedForwardConfig | GatedFeedForwardConfig,
    gate: Float[Tensor, "... F"] | None,
    up: Float[Tensor, "... F"],
    tap: Callable[[str, Tensor], Tensor] = lambda name, value: value,
) -> Float[Tensor, "... F"]:
    """What `down` reads: activation(up), or activation(gate) ⊙ up.

    Shared with the experts of `moe.py`, which have the same layer in stacked form and pass a tap of their own.
    """
    pre = tap("pre_activation", up if gate is None else gate)
    if isinstance(config, ClampedFeedForwardConfig):
        pre, up = pre.clamp(max=config.limit), up.clamp(-config.limit, config.limit) + 1
        opened = pre * torch.sigmoid(config.steepness * pre)
    else:
        opened = ACTIVATIONS[config.activation](pre)
    return tap("up", opened if gate is None else tap("gate", opened) * up)
