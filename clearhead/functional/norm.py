"""Normalisation over the last axis, statistics in float32 or wider."""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.functional.softmax import narrow, widen


def layer_norm(
    x: Float[Tensor, "... D"],
    weight: Float[Tensor, "D"],
    bias: Float[Tensor, "D"] | None,
    eps: float = 1e-5,
) -> Float[Tensor, "... D"]:
    """(x − mean) / √(var + eps) · weight + bias, with the biased variance and eps inside the root."""
    wide = widen(x)
    to = wide.dtype
    return narrow(F.layer_norm(wide, weight.shape, weight.to(to), None if bias is None else bias.to(to), eps), x)


def rms_norm(x: Float[Tensor, "... D"], weight: Float[Tensor, "D"], eps: float = 1e-5) -> Float[Tensor, "... D"]:
    """x / √(mean(x²) + eps) · weight."""
    wide = widen(x)
    gain = weight.to(wide.dtype)
    if torch.is_grad_enabled() and (wide.requires_grad or gain.requires_grad):
        return narrow(RMSNorm.apply(wide, gain, eps), x)
    return narrow(F.rms_norm(wide, weight.shape, gain, eps), x)


class RMSNorm(torch.autograd.Function):
    """With x̂ = x/r and r = √(mean(x²) + eps):  dx = (dy·w − x̂·mean(dy·w·x̂)) / r.

    Written out, because autograd's own chain of products passes over memory twice as often.
    """

    @staticmethod
    def forward(ctx: Any, x: Float[Tensor, "... D"], weight: Float[Tensor, "D"], eps: float) -> Float[Tensor, "... D"]:
        inverse = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        normed = x * inverse
        ctx.save_for_backward(normed, inverse, weight)
        return normed * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_y: Float[Tensor, "... D"]) -> tuple[Tensor, Tensor, None]:
        normed, inverse, weight = ctx.saved_tensors
        d_weight = (d_y * normed).flatten(0, -2).sum(dim=0)
        d_normed = d_y * weight
        along = torch.linalg.vecdot(d_normed, normed)[..., None] / normed.shape[-1]
        return d_normed.addcmul_(normed, along, value=-1).mul_(inverse), d_weight, None
