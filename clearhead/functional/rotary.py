"""Rotary positions: turn each pair of coordinates of a query or key by an angle that grows with its position."""

import torch
from jaxtyping import Float, Real
from torch import Tensor

from clearhead.functional.softmax import narrow, widen
from clearhead.reference.rotary import check_rotary


def rotate(
    x: Float[Tensor, "... T K"],
    positions: Real[Tensor, "... #T"],
    *,
    theta: float = 10000.0,
    frequencies: Float[Tensor, "K//2"] | None = None,
    layout: str = "halves",
) -> Float[Tensor, "... T K"]:
    """(a, b) ↦ (a cos φ − b sin φ, a sin φ + b cos φ), φ = position · theta^(−2i/K) for pair i of K/2.

    Pair i is coordinates (i, i + K/2) in layout "halves" (LLaMA as in transformers), (2i, 2i + 1) in "interleaved".
    positions is (T,), or broadcasts against the leading dimensions and T of x.
    """
    check_rotary(x, positions, frequencies, layout)
    K = x.shape[-1]
    exact = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64
    if frequencies is None:
        frequencies = theta ** (-torch.arange(0, K, 2, dtype=exact, device=x.device) / K)
    angles = positions.to(exact)[..., None] * frequencies.to(exact)  # … T K/2
    return turn(x, angles.cos(), angles.sin(), layout)


def turn(
    x: Float[Tensor, "... T K"],
    cos: Float[Tensor, "... T K//2"],
    sin: Float[Tensor, "... T K//2"],
    layout: str = "halves",
) -> Float[Tensor, "... T K"]:
    """The rotation itself, by angles whose cosines and sines are known."""
    wide = widen(x)
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    if layout == "halves":
        a, b = wide.chunk(2, -1)
        out = torch.cat((a * cos - b * sin, a * sin + b * cos), -1)
    else:
        a, b = wide[..., 0::2], wide[..., 1::2]
        out = torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)
    return narrow(out, x)
