"""Normalisation over the last axis. Statistics are computed in float32 or wider."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from clearhead.functional.derivatives import plain_backward, plain_needed
from clearhead.functional.softmax import narrow, widen


def layer_norm(
    x: Float[Tensor, "... D"],
    weight: Float[Tensor, "D"],
    bias: Float[Tensor, "D"] | None,
    eps: float = 1e-5,
) -> Float[Tensor, "... D"]:
    """(x − mean) / √(var + eps) · weight + bias, with the biased variance and eps inside the root.

    >>> layer_norm(torch.tensor([1.0, 3.0]), torch.ones(2), torch.zeros(2), eps=0.0)
    tensor([-1.,  1.])
    """
    wide = widen(x)
    to = wide.dtype
    return narrow(F.layer_norm(wide, weight.shape, weight.to(to), None if bias is None else bias.to(to), eps), x)


def rms_norm(x: Float[Tensor, "... D"], weight: Float[Tensor, "D"], eps: float = 1e-5) -> Float[Tensor, "... D"]:
    """x / √(mean(x²) + eps) · weight.

    >>> rms_norm(torch.tensor([3.0, 3.0]), torch.tensor([1.0, 2.0]), eps=0.0)
    tensor([1., 2.])
    """
    wide = widen(x)
    gain = weight.to(wide.dtype)
    if plain_needed(wide, gain):
        return narrow(plain_rms_norm(wide, gain, eps), x)
    if torch.is_grad_enabled() and (wide.requires_grad or gain.requires_grad):
        return narrow(RMSNormFunction.apply(wide, gain, eps), x)
    return narrow(F.rms_norm(wide, weight.shape, gain, eps), x)


def plain_rms_norm(x: Float[Tensor, "... D"], weight: Float[Tensor, "D"], eps: float) -> Float[Tensor, "... D"]:
    """`rms_norm` in plain operations."""
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


class RMSNormFunction(torch.autograd.Function):
    """With x̂ = x/r and r = √(mean(x²) + eps):  dx = (dy·w − x̂·mean(dy·w·x̂)) / r.

    Written by hand, because autograd's own chain of products passes over memory twice as often.
    """

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "... D"], weight: Float[Tensor, "D"], eps: float) -> Float[Tensor, "... D"]:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, inverse, weight)
        ctx.eps = eps
        return (x * inverse).mul_(weight)

    @staticmethod
    def backward(ctx: Any, d_y: Float[Tensor, "... D"]) -> tuple[Tensor | None, Tensor | None, None]:
        x, inverse, weight = ctx.saved_tensors
        if torch.is_grad_enabled():
            d_x, d_weight = plain_backward(lambda x, weight: plain_rms_norm(x, weight, ctx.eps), (x, weight), d_y)
            return d_x, d_weight, None
        normed = x * inverse
        d_weight = (d_y * normed).reshape(-1, x.shape[-1]).sum(dim=0)
        d_normed = d_y * weight
        along = torch.linalg.vecdot(d_normed, normed)[..., None] / x.shape[-1]
        return d_normed.addcmul_(normed, along, value=-1).mul_(inverse), d_weight, None
