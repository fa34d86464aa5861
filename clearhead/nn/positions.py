"""Positions that are added to the embedding (sinusoidal, learned) or to the scores (ALiBi, T5's bias).

Rotary positions turn queries and keys instead; they are in `rotary.py`. A module here gets the positions of a pass and
never counts tokens itself: rows may be padded on the left, packed, or continue a cached text.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import AlibiConfig, LearnedConfig, RelativeBiasConfig, SinusoidalConfig
from clearhead.functional.derivatives import plain_needed
from clearhead.functional.positions import relative_bias, sinusoids
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
        return sinusoids(positions + self.config.start, self.dim, self.config.base, self.config.layout, dtype)


@builds(LearnedConfig)
class Learned(nn.Module):
    """A learned vector for each position, added to the embedding. Positions past the table raise (GPT-2, BERT)."""

    def __init__(self, config: LearnedConfig, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.length, dim))

    def forward(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype) -> Float[Tensor, "#B T D"]:
        """The rows of the positions. A position outside the table raises, with its number."""
        # torch.compile and torch.func cannot look at values, so there the check is left to the caller.
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
        self.heads, self.scale = heads, config.scale

    def forward(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#B H T S"]:
        return context.once(
            ("alibi", self.heads, self.scale, id(context.key_positions)), lambda: self.bias(context, dtype)
        )

    def bias(self, context: Context, dtype: torch.dtype) -> Float[Tensor, "#B H T S"]:
        """The bias of every query and key of this pass."""
        slopes = torch.tensor(alibi_slopes(self.heads), dtype=dtype, device=context.positions.device)
        distance = (context.positions[:, None, :, None] - context.key_positions[:, None, None, :]).abs()
        return -self.scale * slopes[:, None, None] * distance


@builds(RelativeBiasConfig)
class RelativeBias(nn.Module):
    """A learned number for each head and bucket of distances, added to the scores of all layers (T5).

    Unlike ALiBi's slopes it is learned, and its H·N numbers serve the whole stack.
    """

    def __init__(self, config: RelativeBiasConfig, dim: int) -> None:
        super().__init__()
        self.starts, self.mirrored = tuple(config.starts.tolist()), config.mirrored
        self.weight = nn.Parameter(torch.zeros(config.heads, config.buckets))

    def forward(self) -> Float[Tensor, "H N"]:
        """A copy of the table: taps read values, not parameters."""
        return self.weight.clone()

    def over(self, table: Float[Tensor, "H N"]) -> Callable[[Context, torch.dtype], Float[Tensor, "#B H T S"]]:
        """The bias that the table gives to the queries and keys of a context; computed once for all layers."""

        def make(context: Context) -> Float[Tensor, "#B H T S"]:
            distance = context.key_positions[:, None, :] - context.positions[:, :, None]
            starts = torch.tensor(self.starts, device=distance.device)
            return relative_bias(distance, table, starts, self.mirrored)

        return lambda context, dtype: context.once(
            ("relative bias", id(table), id(context.key_positions)), lambda: make(context).to(dtype)
        )
