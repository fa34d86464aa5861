"""A matrix: the way from one width to another."""

import numpy as np
from jaxtyping import Float


def linear(
    x: Float[np.ndarray, "... i"], weight: Float[np.ndarray, "o i"], bias: Float[np.ndarray, "o"] | None = None
) -> Float[np.ndarray, "... o"]:
    """x Wᵀ + b. The weight is [out, in], as checkpoints store it: one row for each output."""
    out = x @ weight.T
    return out if bias is None else out + bias


def linear_backward(
    d_out: Float[np.ndarray, "... o"],
    x: Float[np.ndarray, "... i"],
    weight: Float[np.ndarray, "o i"],
    bias: Float[np.ndarray, "o"] | None = None,
) -> tuple[Float[np.ndarray, "... i"], Float[np.ndarray, "o i"], Float[np.ndarray, "o"] | None]:
    """d_x = d_out W, d_W = d_outᵀ x, d_b = Σ d_out, the last two summed over every leading dimension."""
    d_rows, rows = d_out.reshape(-1, d_out.shape[-1]), x.reshape(-1, x.shape[-1])  # positions in one row each
    return d_out @ weight, d_rows.T @ rows, None if bias is None else d_rows.sum(0)
