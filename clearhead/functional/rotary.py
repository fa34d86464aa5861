"""Rotary position embedding: rotate each pair of coordinates of a query or key by an angle ∝ its position."""

from typing import Any

import torch
from jaxtyping import Float, Real
from torch import Tensor

from clearhead.functional.derivatives import plain_needed
from clearhead.functional.softmax import narrow, widen
from clearhead.reference.rotary import check_angles, check_rotary


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

    >>> rotate(torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.arange(2)).round(decimals=2)
    tensor([[1.0000, 0.0000],
            [0.5400, 0.8400]])
    """
    check_rotary(x, positions, frequencies, layout)
    K = x.shape[-1]
    exact = torch.float32 if x.device.type == "mps" else torch.float64  # MPS has no float64
    if frequencies is None:
        frequencies = theta ** (-torch.arange(0, K, 2, dtype=exact, device=x.device) / K)
    angles = positions.to(exact)[..., None] * frequencies.to(exact)  # … T K/2
    return rotate_by(x, angles.cos(), angles.sin(), layout=layout)


def rotate_by(
    x: Float[Tensor, "... T K"],
    cos: Float[Tensor, "... #T K//2"],
    sin: Float[Tensor, "... #T K//2"],
    *,
    layout: str = "halves",
) -> Float[Tensor, "... T K"]:
    """Rotate each pair by an angle whose cosine and sine are given: for tables that were computed once.

    cos and sin have one number for each of the K/2 pairs and broadcast to x: (T, K/2) serves all batches and heads.

    >>> rotate_by(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0]]), torch.tensor([[1.0]]))  # by a right angle
    tensor([[0., 1.]])
    """
    check_angles(x, cos, sin, layout)
    wide = widen(x)
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    by_hand = torch.is_grad_enabled() and wide.requires_grad and not cos.requires_grad and not sin.requires_grad
    if by_hand and not plain_needed(wide, cos, sin):
        return narrow(Rotation.apply(wide, cos, sin, layout), x)
    a, b = pairs(wide, layout)
    rotated = a * cos - b * sin, a * sin + b * cos
    return narrow(torch.cat(rotated, -1) if layout == "halves" else torch.stack(rotated, -1).flatten(-2), x)


def pairs(x: Float[Tensor, "... K"], layout: str) -> tuple[Float[Tensor, "... K//2"], Float[Tensor, "... K//2"]]:
    """The first and the second coordinates of all pairs, as views."""
    a, b = x.chunk(2, -1) if layout == "halves" else (x[..., 0::2], x[..., 1::2])
    return a, b


class Rotation(torch.autograd.Function):
    """The backward rotates by the opposite angle, so it needs nothing but the angles, and is differentiable itself.

    Written by hand, because autograd's own chain of products passes over memory twice as often.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, layout: str) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.layout = layout
        lead = torch.broadcast_shapes(x.shape[:-1], cos.shape[:-1])
        rotated = x.new_empty(*lead, x.shape[-1])
        (a, b), (first, second) = pairs(x, layout), pairs(rotated, layout)
        torch.mul(a, cos, out=first).addcmul_(b, sin, value=-1)
        torch.mul(a, sin, out=second).addcmul_(b, cos)
        ctx.shape = x.shape
        return rotated

    @staticmethod
    def backward(ctx: Any, d_rotated: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = ctx.saved_tensors
        return rotate_by(d_rotated, cos, -sin, layout=ctx.layout).sum_to_size(ctx.shape), None, None, None
