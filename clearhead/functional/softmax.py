"""Softmax, and the rule of precision that the other files borrow."""

from functools import reduce

import torch
from jaxtyping import Float, Real
from torch import Tensor


def softmax(x: Real[Tensor, "..."], axis: int = -1) -> Float[Tensor, "..."]:
    """softmax(x)ᵢ = exp(xᵢ − max x) / Σⱼ exp(xⱼ − max x); a row of nothing but −∞ gives zeros, also in the gradient.

    >>> softmax(torch.tensor([1.0, 1.0, 1.0, 1.0]))
    tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    wide = widen(x)
    if wide.shape[axis] == 0:
        return narrow(wide, x)
    top = wide.detach().amax(axis, keepdim=True)  # it cancels in the quotient, so no gradient flows through it
    exp = torch.exp(wide - torch.where(top.isneginf(), 0, top))
    total = exp.sum(axis, keepdim=True)
    return narrow(exp / torch.where(total == 0, 1, total), x)


def widen(x: Real[Tensor, "..."]) -> Float[Tensor, "..."]:
    """The type to compute in: float32 for float16, bfloat16 and integers, else x as it is."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return x if x.dtype == wide else x.to(wide)


def widen_alike(*tensors: Real[Tensor, "..."]) -> list[Tensor]:
    """All in the widest of their types to compute in, because torch multiplies no matrices of unequal types."""
    wide = reduce(torch.promote_types, (tensor.dtype for tensor in tensors), torch.float32)
    return [tensor.to(wide) for tensor in tensors]


def narrow(x: Float[Tensor, "..."], *like: Real[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Back to the type the caller gave, unless that was an integer."""
    given = reduce(torch.promote_types, (tensor.dtype for tensor in like))
    return x.to(given) if given.is_floating_point else x
