"""Softmax, and the precision rule of the whole package.

Softmax turns any scores into shares: positive numbers that sum to 1, larger for larger scores.

    softmax(x)ᵢ = exp(xᵢ) / Σⱼ exp(xⱼ)

Computed like this it overflows: exp(89) is already too large for float32. Shifting all scores by a constant c changes
nothing, because exp(xᵢ − c) = exp(xᵢ)/exp(c) and the factor cancels in the quotient. With c = max x the largest
exponent is 0, so nothing overflows, and the denominator is at least 1, so nothing is divided by 0.
(Goodfellow et al. 2016, "Deep Learning", section 4.1.)

Three facts about softmax explain much of the rest of the package:

    it only sees differences      softmax(x + c) = softmax(x), so a score has no meaning alone
    it is a soft argmax           softmax(x/τ) tends to one-hot as τ → 0, and to uniform as τ → ∞
    it saturates                  once one share is near 1, its gradient p(1 − p) is near 0

The first is why scores can be shifted for stability. The second is the temperature of sampling. The third is why
attention divides its scores by √K: without that, wide heads start saturated and hardly learn.

A worked row, x = (1, 2, 3): subtract the maximum, (−2, −1, 0); exponentials, (0.135, 0.368, 1); their sum is 1.503;
shares, (0.090, 0.245, 0.665). Each step of 1 in a score multiplies the share by e ≈ 2.72.
"""

import numpy as np
from jaxtyping import Float, Real

from clearhead.reference.checks import check_gradient


def softmax(x: Real[np.ndarray, "..."], axis: int = -1) -> Float[np.ndarray, "..."]:
    """softmax(x)ᵢ = exp(xᵢ − max x) / Σⱼ exp(xⱼ − max x) along `axis`.

    A row of nothing but −∞ gives zeros: a query that may read no key reads nothing. A NaN stays a NaN.

    >>> softmax(np.array([1.0, 2.0, 3.0])).round(2)
    array([0.09, 0.24, 0.67])

    Any axis works. Along the last axis of scores T × S, each query's row becomes a distribution over the keys.

    >>> softmax(np.array([[0.0, 0.0], [0.0, -np.inf]]))
    array([[0.5, 0.5],
           [1. , 0. ]])
    """
    wide = widen(x)
    top = wide.max(axis, keepdims=True, initial=-np.inf)  # `initial` gives an axis of length 0 a maximum
    top = np.where(np.isneginf(top), 0, top)  # −∞ − (−∞) would be NaN; −∞ − 0 is −∞, and exp of that is 0
    exp = np.exp(wide - top)
    total = exp.sum(axis, keepdims=True)
    # A row of −∞ has total 0. Dividing by 1 instead leaves its zeros as they are.
    return narrow(exp / np.where(total == 0, 1, total), x)


def softmax_backward(
    d_out: Float[np.ndarray, "..."], x: Real[np.ndarray, "..."], axis: int = -1
) -> Float[np.ndarray, "..."]:
    """d_xᵢ = pᵢ · (d_outᵢ − Σⱼ d_outⱼ pⱼ), with p = softmax(x).

    The Jacobian of softmax is ∂pᵢ/∂xⱼ = pᵢ·(δᵢⱼ − pⱼ), as a matrix diag(p) − p pᵀ. Multiplying d_out by it gives the
    formula. The sum is the mean of d_out under p: only what differs from the mean moves x, because raising all scores
    together changes nothing.

    Rows of d_x sum to 0, as they must: a common shift of x has no effect, so the gradient has no part along it.

    >>> d_x = softmax_backward(np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 0.0]))
    >>> d_x.round(3), bool(abs(d_x.sum()) < 1e-12)
    (array([ 0.222, -0.111, -0.111]), True)
    """
    check_gradient(d_out, *x.shape)
    p, d_p = softmax(widen(x), axis), widen(d_out)
    return narrow(p * (d_p - (d_p * p).sum(axis, keepdims=True)), x)


# --- Precision -------------------------------------------------------------------------------------------------------
# float16 overflows at 65,504 and bfloat16 keeps 8 bits of a number, so sums and exponentials of either are computed in
# float32. What the caller gave in half precision, the caller gets back in half precision.


def widen(x: Real[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The type to compute in: float32 for float16 and bfloat16, a float for integers, otherwise x unchanged.

    >>> widen(np.array([1], np.float16)).dtype, widen(np.array([1], np.float64)).dtype
    (dtype('float32'), dtype('float64'))
    """
    return x.astype(np.result_type(x.dtype, np.float32), copy=False)


def narrow(x: Float[np.ndarray, "..."], *like: Real[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """Back to the common type of `like`, the arguments that the caller gave, unless that is an integer type.

    >>> narrow(np.ones(2, np.float32), np.ones(2, np.float16)).dtype
    dtype('float16')
    """
    given = np.result_type(*(array.dtype for array in like))
    return x if given.kind in "biu" else x.astype(given, copy=False)
