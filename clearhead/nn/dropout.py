"""Dropout whose random numbers cost little."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

STEPS = 2**16  # shares that 16 random bits tell apart


class Dropout(nn.Dropout):
    """Each value is 0 with probability p, rounded to a multiple of 2⁻¹⁶; the rest is scaled up so that the mean stays.

    On a CPU, torch draws a number of 64 bits for each value, one after the other. Here one is drawn for four values.
    """

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        dropped = round(self.p * STEPS)
        if not self.training or not 0 < dropped < STEPS or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        count = x.numel()
        drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        kept = (drawn[:count] >= dropped - STEPS // 2).view(x.shape)
        return x * kept.to(x.dtype).mul_(STEPS / (STEPS - dropped))
