"""Softmax, and the rule of precision that the other files borrow."""

import numpy as np
from jaxtyping import Float, Real


def softmax(x: Real[np.ndarray, "..."], axis: int = -1) -> Float[np.ndarray, "..."]:
    """softmax(x)ᵢ = exp(xᵢ − max x) / Σⱼ exp(xⱼ − max x); a row of nothing but −∞ gives zeros.

    Subtracting the maximum changes nothing in the quotient and keeps exp from overflowing
    (Goodfellow et al. 2016, "Deep Learning", section 4.1).
    """
    wide = widen(x)
    top = wide.max(axis, keepdims=True, initial=-np.inf)  # `initial` gives an axis of length 0 a maximum
    top = np.where(np.isneginf(top), 0, top)  # −∞ − (−∞) would be NaN; −∞ − 0 is −∞, and exp of that is 0
    exp = np.exp(wide - top)
    total = exp.sum(axis, keepdims=True)
    return narrow(exp / np.where(total == 0, 1, total), x)


def softmax_backward(
    d_out: Float[np.ndarray, "..."], x: Real[np.ndarray, "..."], axis: int = -1
) -> Float[np.ndarray, "..."]:
    """d_xᵢ = pᵢ · (d_outᵢ − Σⱼ d_outⱼ pⱼ), with p = softmax(x): the Jacobian is diag(p) − p pᵀ."""
    p, d_p = softmax(widen(x), axis), widen(d_out)
    return narrow(p * (d_p - (d_p * p).sum(axis, keepdims=True)), x)


def widen(x: Real[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The type to compute in: float32 for float16 and bfloat16, a float for integers, else x as it is."""
    return x.astype(np.result_type(x.dtype, np.float32), copy=False)


def narrow(x: Float[np.ndarray, "..."], *like: Real[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Back to the type the caller gave, unless that was an integer."""
    given = np.result_type(*(array.dtype for array in like))
    return x if given.kind in "biu" else x.astype(given, copy=False)
