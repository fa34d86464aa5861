"""Normalisation over the last axis, statistics in float32 or wider."""

import numpy as np
from jaxtyping import Float

from clearhead.configs import LayerNormConfig, OffsetRMSNormConfig, RMSNormConfig
from clearhead.reference.run import Here, runs
from clearhead.reference.softmax import narrow, widen


def layer_norm(
    x: Float[np.ndarray, "... D"],
    weight: Float[np.ndarray, "D"],
    bias: Float[np.ndarray, "D"] | None,
    eps: float = 1e-5,
) -> Float[np.ndarray, "... D"]:
    """(x − mean) / √(var + eps) · weight + bias, with the biased variance and eps inside the root.

    Ba, Kiros & Hinton (2016), "Layer Normalization", equation 4.
    """
    normed, _ = _standardize(x, eps)
    out = normed * widen(weight)
    return narrow(out if bias is None else out + widen(bias), x)


def layer_norm_backward(
    d_out: Float[np.ndarray, "... D"],
    x: Float[np.ndarray, "... D"],
    weight: Float[np.ndarray, "D"],
    bias: Float[np.ndarray, "D"] | None,
    eps: float = 1e-5,
) -> tuple[Float[np.ndarray, "... D"], Float[np.ndarray, "D"], Float[np.ndarray, "D"] | None]:
    """With n the normed x and g = weight ∘ d_out: d_x = (g − mean(g) − n ∘ mean(g ∘ n)) / √(var + eps).

    The two means are what the mean and the variance of x owe to each xᵢ. d_weight = Σ d_out ∘ n, d_bias = Σ d_out.
    """
    normed, inverse_std = _standardize(x, eps)
    g = widen(d_out) * widen(weight)
    d_x = (g - g.mean(-1, keepdims=True) - normed * (g * normed).mean(-1, keepdims=True)) * inverse_std
    d_bias = None if bias is None else narrow(_sum_positions(widen(d_out)), bias)
    return narrow(d_x, x), narrow(_sum_positions(d_out * normed), weight), d_bias


def rms_norm(
    x: Float[np.ndarray, "... D"], weight: Float[np.ndarray, "D"], eps: float = 1e-5
) -> Float[np.ndarray, "... D"]:
    """x / √(mean(x²) + eps) · weight: a layer norm that neither subtracts the mean nor adds a bias.

    Zhang & Sennrich (2019), "Root Mean Square Layer Normalization", equation 4.
    """
    normed, _ = _to_unit_square(x, eps)
    return narrow(normed * widen(weight), x)


def rms_norm_backward(
    d_out: Float[np.ndarray, "... D"], x: Float[np.ndarray, "... D"], weight: Float[np.ndarray, "D"], eps: float = 1e-5
) -> tuple[Float[np.ndarray, "... D"], Float[np.ndarray, "D"]]:
    """With n the normed x and g = weight ∘ d_out: d_x = (g − n ∘ mean(g ∘ n)) / √(mean(x²) + eps)."""
    normed, inverse_rms = _to_unit_square(x, eps)
    g = widen(d_out) * widen(weight)
    d_x = (g - normed * (g * normed).mean(-1, keepdims=True)) * inverse_rms
    return narrow(d_x, x), narrow(_sum_positions(d_out * normed), weight)


@runs(LayerNormConfig)
def layer_norm_part(config: LayerNormConfig, x: Float[np.ndarray, "... D"], here: Here) -> Float[np.ndarray, "... D"]:
    """`layer_norm` with a model's own γ and β."""
    return layer_norm(x, here["weight"], here.get("bias"), config.eps)


@runs(RMSNormConfig)
def rms_norm_part(config: RMSNormConfig, x: Float[np.ndarray, "... D"], here: Here) -> Float[np.ndarray, "... D"]:
    """`rms_norm` with a model's own γ."""
    return rms_norm(x, here["weight"], config.eps)


@runs(OffsetRMSNormConfig)
def offset_rms_norm_part(
    config: OffsetRMSNormConfig, x: Float[np.ndarray, "... D"], here: Here
) -> Float[np.ndarray, "... D"]:
    """`rms_norm` with 1 + γ for the gain."""
    return rms_norm(x, 1 + widen(here["weight"]), config.eps)


def _standardize(
    x: Float[np.ndarray, "... D"], eps: float
) -> tuple[Float[np.ndarray, "... D"], Float[np.ndarray, "... 1"]]:
    """x with mean 0 and variance 1 (but for eps), and the factor 1/√(var + eps) that made it so."""
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdims=True)
    return _to_unit_square(centred, eps)  # the mean square of what has mean 0 is its variance


def _to_unit_square(
    x: Float[np.ndarray, "... D"], eps: float
) -> tuple[Float[np.ndarray, "... D"], Float[np.ndarray, "... 1"]]:
    """x with mean square 1 (but for eps), and the factor 1/√(mean(x²) + eps) that made it so."""
    wide = widen(x)
    inverse = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + eps)
    return wide * inverse, inverse


def _sum_positions(x: Float[np.ndarray, "... D"]) -> Float[np.ndarray, "D"]:
    """The weights are shared by all positions, so their gradients add up over them."""
    return x.sum(tuple(range(x.ndim - 1)))
