"""Rotary position embedding: pairs of coordinates of q and k are rotated by position × frequency.

    (a, b) ↦ (a cos φ − b sin φ, a sin φ + b cos φ),     φ = position · frequency

Cosines and sines depend on positions only. They are computed once per pass, in float64 before they are rounded, and
shared by all layers with the same frequencies (`context.once`). Keys go into the cache already rotated.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import DualChunkConfig, Mask, QueryScaleConfig, RotaryConfig
from clearhead.functional.rotary import rotate_by

from .build import build_part, builds
from .context import Context


@builds(RotaryConfig)
class Rotary(nn.Module):
    """Rotates q and k, so that their dot products depend on relative positions only (Su et al. 2021).

    Holds no tensor: the angles of a pass are computed once, in float64, and shared by all layers.
    """

    def __init__(self, config: RotaryConfig, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.width = config.width(head_dim)
        self.head_dim = head_dim
        self.frequencies = tuple(config.frequencies(head_dim).tolist())

    def forward(
        self, x: Float[Tensor, "B H T K"], positions: Int[Tensor, "#B T"], context: Context
    ) -> Float[Tensor, "B H T K"]:
        """x with its first `width` coordinates rotated; the rest stays as it is (partial rotation)."""
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        cos, sin = self.angles(positions, wide, context)
        rotated = rotate_by(x[..., : self.width], cos, sin, layout=self.config.layout)
        return rotated if self.width == x.shape[-1] else torch.cat((rotated, x[..., self.width :]), dim=-1)

    def keys(self, k: Float[Tensor, "B G T K"], context: Context) -> Float[Tensor, "B G T K"]:
        return self(k, context.positions, context)

    def queries(self, q: Float[Tensor, "B H T K"], mask: Mask, context: Context) -> list[tuple[Tensor, Mask]]:
        """The rotated queries, each with the mask of the keys it reads."""
        return [(context.tap("query_rotated", self(q, context.positions, context)), mask)]

    def angles(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype, context: Context) -> tuple[Tensor, Tensor]:
        """cos and sin of every angle, `B 1 T K/2`; computed once for all layers."""
        key = (self.config, self.frequencies, id(positions))
        return context.once(key, lambda: self.compute_angles(positions, dtype))

    def compute_angles(self, positions: Int[Tensor, "#B T"], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """In float64, since position 100,000 times frequency 1 has no digits left in float32.

        YaRN's magnitude multiplies cos and sin, and so the rotated part.
        """
        exact = torch.float32 if positions.device.type == "mps" else torch.float64
        length = int(positions.max()) + 1 if self.config.varies and positions.numel() else 0
        used = self.config.frequencies(self.head_dim, length) if length else self.frequencies
        frequencies = torch.tensor(used, dtype=exact, device=positions.device)
        angles = positions[:, None, :, None].to(exact) * frequencies
        return (angles.cos() * self.config.magnitude).to(dtype), (angles.sin() * self.config.magnitude).to(dtype)


@builds(DualChunkConfig)
class DualChunk(nn.Module):
    """Dual chunk attention: three rotated queries per token, for its own chunk, the one before, and all older ones.

    No distance then exceeds the trained context, so a model reads longer texts untrained (An et al. 2024).
    """

    def __init__(self, config: DualChunkConfig, head_dim: int) -> None:
        super().__init__()
        self.config = config
        self.rotary = build_part(config.rotary, head_dim)

    def places(self, context: Context) -> dict[str, Int[Tensor, "#B T"]]:
        """For each kind of query, the position it is rotated by: within its chunk, or at a fixed distance to older
        ones.
        """
        key = ("places", self.config.chunk, self.config.length, id(context.positions))
        return context.once(key, lambda: self.config.places(context.positions))

    def keys(self, k: Float[Tensor, "B G T K"], context: Context) -> Float[Tensor, "B G T K"]:
        """Keys are rotated by their position within their chunk, so their angle never exceeds what was trained."""
        return self.rotary(k, self.places(context)["query_rotated"], context)

    def queries(self, q: Float[Tensor, "B H T K"], mask: Mask, context: Context) -> list[tuple[Tensor, Mask]]:
        """The rotated queries, each with the mask of the keys it reads."""
        places = self.places(context)
        masks = self.config.queries(mask)
        return [(context.tap(name, self.rotary(q, places[name], context)), masks[name]) for name in masks]


@builds(QueryScaleConfig)
class QueryScale(nn.Module):
    """In place of a rotation: later queries are longer, so a softmax over many keys stays sharp (Llama 4)."""

    def __init__(self, config: QueryScaleConfig, head_dim: int) -> None:
        super().__init__()
        self.config = config

    def keys(self, k: Float[Tensor, "B G T K"], context: Context) -> Float[Tensor, "B G T K"]:
        return k

    def queries(self, q: Float[Tensor, "B H T K"], mask: Mask, context: Context) -> list[tuple[Tensor, Mask]]:
        """The queries, scaled by position, with the mask of the keys they read."""
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        steps = ((context.positions + 1) // self.config.every).to(wide)
        scale = (1 + self.config.strength * steps.log1p()).to(q.dtype)[:, None, :, None]
        return [(context.tap("query_rotated", q * scale), mask)]
