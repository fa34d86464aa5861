"""A short causal convolution between two gates, a cheap mixer (LFM2).

    write, read, x = input(x).chunk(3)        B T D each
    out(read ∘ conv(write ∘ x))               conv: a filter of a few tokens for each channel

Constant cost per token and a state of a few vectors: the cheapest mixer here, for use between attention layers.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.configs import ShortConvConfig
from clearhead.precision.matrix import Linear

from .build import builds
from .cache import StateAllocator
from .context import Context
from .convolution import ConvState, convolve_rows
from .packing import dense_rows


@builds(ShortConvConfig)
class ShortConv(nn.Module):
    """write, read, x by one matrix -> read∘conv(write∘x) -> out.

    Decoding keeps the last few inputs of the convolution.
    """

    def __init__(self, config: ShortConvConfig, dim: int) -> None:
        super().__init__()
        self.fused = {"input": (dim, dim, dim)}
        self.input = Linear(dim, 3 * dim, bias=config.bias)
        self.filter = nn.Parameter(torch.empty(config.conv, dim))
        self.filter_bias = nn.Parameter(torch.empty(dim)) if config.conv_bias else None
        self.out = Linear(dim, dim, bias=config.bias)

    def init_weights(self) -> None:
        """Start the filter like torch's convolutions: uniform, of variance 1/(3·taps)."""
        with torch.no_grad():
            nn.init.uniform_(self.filter, -(len(self.filter) ** -0.5), len(self.filter) ** -0.5)

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: ConvState | None = None
    ) -> Float[Tensor, "B T D"]:
        """Gate, convolve, gate, project. Taps: input B T 3·D, conv, gated and out B T D."""
        row = dense_rows(context, len(x))
        write, read, x = context.tap("input", self.input(x)).chunk(3, dim=-1)
        conv = row.scatter(convolve_rows(row.gather(write * x), self.filter, self.filter_bias, row, state))
        gated = context.tap("gated", read * context.tap("conv", conv))
        return context.tap("out", self.out(gated))

    def init_state(self, allocator: StateAllocator) -> ConvState:
        """The convolution's last O inputs, 0 before the first token."""
        reach, dim = len(self.filter) - 1, self.filter.shape[1]
        return ConvState(allocator.zeros(reach, dim))
