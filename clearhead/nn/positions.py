"""Positions that are added to the embedding (sinusoidal, learned) or to the scores (ALiBi)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import AlibiConfig, LearnedConfig, SinusoidalConfig
from clearhead.functional.derivatives import plain_needed
from clearhead.functional.positions import sinusoids
from clearhead.reference.positions import alibi_slopes

from .build import builds
from .context import Context


@builds(SinusoidalConfig)
class Sinusoidal(nn.Module):
    """sin and cos of position/base^(2i/D), added to the embedding. Works for any position (2017).

    No weights: the table is a function, computed for the positions that are asked for.
    """

    def __init__(self, config: SinusoidalConfig, dim: int) -> None:
        super().__init__()
        self.config, self.dim = config, dim

    def forward(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype) -> Float[Tensor, "#B T D"]:
        return sinusoids(positions, self.dim, self.config.base, self.config.layout, dtype)


@builds(LearnedConfig)
class Learned(nn.Module):
    """A learned vector for each position, added to the embedding. Positions past the table raise (GPT-2, BERT)."""

    def __init__(self, config: LearnedConfig, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.length, dim))

    def forward(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype) -> Float[Tensor, "#B T D"]:
        # torch.compile and torch.func cannot look at values, so there the check is left to the caller.
        """The rows of the positions. A position outside the table raises, with its number."""
        if positions.numel() and not torch.compiler.is_compiling() and not plain_needed():
            first, last, length = int(positions.min()), int(positions.max()), len(self.weight)
            if last >= length:
                raise ValueError(f"position {last} is past the {length} learned positions of this model")
            if first < 0:
                raise ValueError(f"position {first} is before the first learned position, 0")
        return F.embedding(positions, self.weight)


@builds(AlibiConfig)
class Alibi(nn.Module):
    """−slope_h·|i − j|, added to the scores of head h: far keys count less (Press et al. 2022).

    The bias depends on positions only, so all layers with the same number of heads share it: it is computed once per
    pass.
    """

    def __init__(self, config: AlibiConfig, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def forward(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#B H T S"]:
        return context.once(("alibi", self.heads, id(context.key_positions)), lambda: self.bias(context, dtype))

    def bias(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#B H T S"]:
        """The bias of every query and key of this pass."""
        slopes = torch.tensor(alibi_slopes(self.heads), dtype=dtype, device=context.positions.device)
        distance = (context.positions[:, None, :, None] - context.key_positions[:, None, None, :]).abs()
        return -slopes[:, None, None] * distance
