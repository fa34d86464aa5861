"""Dropout with cheap random numbers."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

STEPS = 2**16  # probabilities are multiples of 1/STEPS: 16 random bits decide whether a value is dropped


class Dropout(nn.Dropout):
    """Set each value to 0 with probability p (rounded to a multiple of 2⁻¹⁶); scale the rest to keep the mean.

    On a CPU, torch draws 64 random bits for each value, one after the other. Here 64 bits serve four values.
    """

    def forward(self, x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
        """x with a share of its numbers set to 0 and the rest scaled up, in training; otherwise x itself."""
        dropped = round(self.p * STEPS)
        if not self.training or not 0 < dropped < STEPS or x.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(x)
        count = x.numel()
        drawn = torch.empty(-(-count // 4), dtype=torch.int64).random_(-(2**63), None).view(torch.int16)
        kept = (drawn[:count] >= dropped - STEPS // 2).view(x.shape)
        return x * kept.to(x.dtype).mul_(STEPS / (STEPS - dropped))
