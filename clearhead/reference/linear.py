"""The linear layer: a matrix from one width to another.

    y = x Wᵀ + b        x: … in      W: out in      b: out      y: … out

Each output is one row of W, dotted with x, plus its bias. Leading dimensions (batch, position) are independent.
Checkpoints store W as [out, in], and so does this package.

Nearly all of a Transformer's weights and FLOPs are in linear layers: queries, keys, values and the output of attention,
and the two or three matrices of a feed-forward network. One token costs 2·in·out FLOPs, a multiplication and an
addition for each weight. That is where the rule of thumb "2 FLOPs per parameter and token" comes from. The backward
pass has two products of the same size, for x and for W, so training costs 6 FLOPs per parameter and token.

Why a bias is often absent: after a norm with its own bias it adds nothing new, and models without biases train as well.
"""

import numpy as np
from jaxtyping import Float

from clearhead.reference.checks import check_gradient


def linear(
    x: Float[np.ndarray, "... i"], weight: Float[np.ndarray, "o i"], bias: Float[np.ndarray, "o"] | None = None
) -> Float[np.ndarray, "... o"]:
    """x Wᵀ + b, with the weight [out, in]: one row for each output.

    >>> linear(np.array([1.0, 2.0]), np.array([[3.0, 4.0]]), np.array([5.0]))
    array([16.])
    """
    out = x @ weight.T
    return out if bias is None else out + bias


def linear_backward(
    d_out: Float[np.ndarray, "... o"],
    x: Float[np.ndarray, "... i"],
    weight: Float[np.ndarray, "o i"],
    bias: Float[np.ndarray, "o"] | None = None,
) -> tuple[Float[np.ndarray, "... i"], Float[np.ndarray, "o i"], Float[np.ndarray, "o"] | None]:
    """d_x = d_out W, d_W = d_outᵀ x, d_b = Σ d_out.

    From yₒ = Σᵢ Wₒᵢ xᵢ + bₒ: ∂yₒ/∂xᵢ = Wₒᵢ, ∂yₒ/∂Wₒᵢ = xᵢ, ∂yₒ/∂bₒ = 1. All positions share W and b, so their
    gradients are summed over every leading dimension.

    Check the shapes: d_x is (… o)(o i) = … i, and d_W is (o N)(N i) = o i, with N positions in all. If shapes fit in
    only one way, the formula is usually right.

    >>> d_x, d_weight, _ = linear_backward(np.array([1.0]), np.array([1.0, 2.0]), np.array([[3.0, 4.0]]))
    >>> d_x, d_weight
    (array([3., 4.]), array([[1., 2.]]))
    """
    check_gradient(d_out, *x.shape[:-1], len(weight))
    # Flatten (batch, position, …) into rows: the sum over positions is then the inner sum of one matrix product.
    d_rows, rows = d_out.reshape(-1, d_out.shape[-1]), x.reshape(-1, x.shape[-1])
    return d_out @ weight, d_rows.T @ rows, None if bias is None else d_rows.sum(0)
