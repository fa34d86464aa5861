"""A matrix, and a row of a matrix: the linear layer and the embedding."""

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.reference.checks import check_ids


def linear(
    x: Float[Tensor, "... i"], weight: Float[Tensor, "o i"], bias: Float[Tensor, "o"] | None = None
) -> Float[Tensor, "... o"]:
    """x Wᵀ + b, with the weight [out, in].

    >>> linear(torch.ones((2, 3)), torch.ones((4, 3))).shape
    torch.Size([2, 4])
    """
    return F.linear(x, weight, bias)


def embedding(tokens: Int[Tensor, "..."], weight: Float[Tensor, "V D"]) -> Float[Tensor, "... D"]:
    """weight[token]: the row of each token. Ids must be integers from 0 to V − 1.

    >>> embedding(torch.tensor([2, 0]), torch.eye(3))
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    """
    check_ids(tokens)
    return F.embedding(tokens, weight)
