"""Normalisation over the last axis, statistics in float32 or wider."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

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
    return narrow(F.rms_norm(wide, weight.shape, weight.to(wide.dtype), eps), x)
