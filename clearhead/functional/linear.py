"""The two ways into a Transformer's width: a matrix, and a row of a matrix."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


def linear(
    x: Float[Tensor, "... i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None
) -> Float[Tensor, "... o"]:
    """x Wᵀ + b, with the weight [out, in]."""
    return F.linear(x, weight, bias)


def embedding(tokens: Int[Tensor, "..."], weight: Float[Tensor, "V D"]) -> Float[Tensor, "... D"]:
    """weight[token]."""
    return F.embedding(tokens, weight)
