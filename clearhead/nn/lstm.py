"""The LSTM as a mixer: everything about the past passes through h and c, whose size is fixed.

    i, f, o = σ(W x + R h + b)    g = tanh(W x + R h + b)    c ← f∘c + i∘g    h ← o∘tanh(c)

Sequences of different lengths run together: `packing.py` orders the tokens by time, as torch's kernel wants them. It is
here as the baseline that Transformers replaced: `clearhead compare` and `clearhead lab lstm` measure it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import LSTMConfig
from clearhead.functional.lstm import lstm_kernel, lstm_written_out

from .build import builds
from .cache import StateAllocator
from .context import Context
from .packing import packed_sequences


@dataclass
class LSTMState:
    """h and c of each row. Constant size, however long the text."""

    can_rewind: ClassVar[bool] = False

    hidden: Float[Tensor, "B I"]
    cell: Float[Tensor, "B I"]

    def select(self, rows: Int[Tensor, "B"]) -> None:
        self.hidden, self.cell = self.hidden[rows], self.cell[rows]


@builds(LSTMConfig)
class LSTM(nn.Module):
    """Gates of x and h; token after token c = f∘c + i∘g, h = o∘tanh(c); then a projection of h to width D.

    `input` has 4·I rows, those of i, f, g and o, in torch's order; `recurrent` has the same rows for h.
    """

    def __init__(self, config: LSTMConfig, dim: int) -> None:
        super().__init__()
        width = config.hidden or dim
        self.input = nn.Linear(dim, 4 * width)
        self.recurrent = nn.Linear(width, 4 * width, bias=False)
        self.out = nn.Linear(width, dim, bias=False)

    def init_weights(self) -> None:
        """Start with the forget gate open, so that gradients reach far back (Jozefowicz et al. 2015)."""
        nn.init.ones_(self.input.bias.chunk(4)[1])

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: LSTMState | None = None
    ) -> Float[Tensor, "B T D"]:
        """h of every token, projected to width D. Padding gives 0.

        Without taps one call of torch's kernel runs all sequences. A tap that replaces the gates needs the
        written-out loop, token after token.
        """
        order = packed_sequences(context, len(x))
        zeros = self.recurrent.weight.new_zeros(len(order.rows), self.recurrent.weight.shape[1])
        h, c = (zeros, zeros) if state is None else (state.hidden[order.rows], state.cell[order.rows])
        written_out = not context.fused or context.replaces("gates")
        if written_out or context.reads("gates"):
            gates = context.tap("gates", self.input(x))
        if written_out:
            mixed, h, c = lstm_written_out(order.gather(gates), order.sizes, self.recurrent.weight, h, c)
        else:
            weights = self.input.weight, self.recurrent.weight, self.input.bias
            with torch.autocast(x.device.type, enabled=False):  # the kernel takes half precision on few processors
                mixed, h, c = lstm_kernel(order.gather(x.to(h.dtype)), order.sizes, *weights, h, c)
        if state is not None:
            state.hidden[order.rows], state.cell[order.rows] = h.detach(), c.detach()
        return context.tap("out", self.out(context.tap("hidden", order.scatter(mixed, x))))

    def init_state(self, allocator: StateAllocator) -> LSTMState:
        """h and c of 0, I numbers each, for every row."""
        width = self.recurrent.weight.shape[1]
        return LSTMState(allocator.zeros(width), allocator.zeros(width))
