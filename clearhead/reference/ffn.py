"""The position-wise feed-forward networks, and the activations inside them."""

from collections.abc import Callable
from math import erf, pi, sqrt

import numpy as np
from jaxtyping import Float

from clearhead.configs import FeedForwardConfig, GatedFeedForwardConfig
from clearhead.reference.linear import linear, linear_backward
from clearhead.reference.run import Here, runs
from clearhead.reference.softmax import narrow, widen

Array = Float[np.ndarray, "..."]


def relu(x: Array) -> Array:
    """max(x, 0)."""
    return np.maximum(x, 0)


def relu_backward(d_out: Array, x: Array) -> Array:
    """1 where x > 0, else 0; at 0 itself, 0 by custom."""
    return d_out * (x > 0)


def relu2(x: Array) -> Array:
    """max(x, 0)².  So et al. (2021), "Primer", section 3."""
    return np.maximum(x, 0) ** 2


def relu2_backward(d_out: Array, x: Array) -> Array:
    """2 max(x, 0)."""
    return d_out * 2 * np.maximum(x, 0)


def gelu(x: Array, approximate: str = "none") -> Array:
    """x Φ(x), Φ the normal distribution function (1 + erf(x/√2))/2, or ("tanh") its approximation
    (1 + tanh(√(2/π) (x + 0.044715 x³)))/2, which GPT-2 uses.

    Hendrycks & Gimpel (2016), "Gaussian Error Linear Units", section 2.
    """
    return narrow(widen(x) * _normal_cdf(x, approximate)[0], x)


def gelu_backward(d_out: Array, x: Array, approximate: str = "none") -> Array:
    """Φ(x) + x Φ′(x)."""
    cdf, density = _normal_cdf(x, approximate)
    return narrow(d_out * (cdf + widen(x) * density), x)


def _normal_cdf(x: Array, approximate: str) -> tuple[Array, Array]:
    """Φ and its derivative, exactly or by tanh."""
    wide = widen(x)
    if approximate == "none":
        cdf = (1 + np.vectorize(erf, otypes=[wide.dtype])(wide / sqrt(2))) / 2  # NumPy has no erf of its own
        return cdf, np.exp(-(wide**2) / 2) / sqrt(2 * pi)
    if approximate == "tanh":
        tanh = np.tanh(sqrt(2 / pi) * (wide + 0.044715 * wide * wide * wide))
        return (1 + tanh) / 2, (1 - tanh**2) / 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * wide**2)
    raise ValueError(f'approximate is "none" or "tanh", not {approximate!r}')


def gelu_tanh(x: Array) -> Array:
    """`gelu` by its tanh approximation, under a name of its own for configs."""
    return gelu(x, "tanh")


def gelu_tanh_backward(d_out: Array, x: Array) -> Array:
    return gelu_backward(d_out, x, "tanh")


def silu(x: Array) -> Array:
    """x σ(x), σ(x) = 1/(1 + exp(−x)); also called swish.  Ramachandran et al. (2017), "Searching for Activations"."""
    return narrow(widen(x) * _sigmoid(x), x)


def silu_backward(d_out: Array, x: Array) -> Array:
    """σ(x) (1 + x (1 − σ(x)))."""
    sigmoid = _sigmoid(x)
    return narrow(d_out * sigmoid * (1 + x * (1 - sigmoid)), x)


def _sigmoid(x: Array) -> Array:
    """exp(−log(1 + exp(−x))): logaddexp does not overflow, whatever the sign of x."""
    return np.exp(-np.logaddexp(0, -widen(x)))


ACTIVATIONS: dict[str, Callable[..., np.ndarray]] = {
    "relu": relu,
    "relu2": relu2,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
}
ACTIVATIONS_BACKWARD: dict[str, Callable[..., np.ndarray]] = {
    "relu": relu_backward,
    "relu2": relu2_backward,
    "gelu": gelu_backward,
    "gelu_tanh": gelu_tanh_backward,
    "silu": silu_backward,
}


def feed_forward(
    x: Float[np.ndarray, "... D"],
    up: Float[np.ndarray, "F D"],
    down: Float[np.ndarray, "D F"],
    up_bias: Float[np.ndarray, "F"] | None = None,
    down_bias: Float[np.ndarray, "D"] | None = None,
    activation: str = "relu",
) -> Float[np.ndarray, "... D"]:
    """down · activation(up · x): each position alone, through a wider layer and back.

    Vaswani et al. (2017), "Attention Is All You Need", equation 2.
    """
    check_activation(activation)
    hidden = linear(x, up, up_bias)  # … F
    return linear(ACTIVATIONS[activation](hidden), down, down_bias)


def feed_forward_backward(
    d_out: Float[np.ndarray, "... D"],
    x: Float[np.ndarray, "... D"],
    up: Float[np.ndarray, "F D"],
    down: Float[np.ndarray, "D F"],
    up_bias: Float[np.ndarray, "F"] | None = None,
    down_bias: Float[np.ndarray, "D"] | None = None,
    activation: str = "relu",
) -> tuple[
    Float[np.ndarray, "... D"],
    Float[np.ndarray, "F D"],
    Float[np.ndarray, "D F"],
    Float[np.ndarray, "F"] | None,
    Float[np.ndarray, "D"] | None,
]:
    """d_x, d_up, d_down, d_up_bias, d_down_bias: the forward's three steps, last first."""
    hidden = linear(x, up, up_bias)
    d_active, d_down, d_down_bias = linear_backward(d_out, ACTIVATIONS[activation](hidden), down, down_bias)
    d_hidden = ACTIVATIONS_BACKWARD[activation](d_active, hidden)
    d_x, d_up, d_up_bias = linear_backward(d_hidden, x, up, up_bias)
    return d_x, d_up, d_down, d_up_bias, d_down_bias


def gated_feed_forward(
    x: Float[np.ndarray, "... D"],
    gate: Float[np.ndarray, "F D"],
    up: Float[np.ndarray, "F D"],
    down: Float[np.ndarray, "D F"],
    gate_bias: Float[np.ndarray, "F"] | None = None,
    up_bias: Float[np.ndarray, "F"] | None = None,
    down_bias: Float[np.ndarray, "D"] | None = None,
    activation: str = "silu",
) -> Float[np.ndarray, "... D"]:
    """down · (activation(gate · x) ∘ up · x): one half of the wide layer decides how much of the other passes.

    Shazeer (2020), "GLU Variants Improve Transformer", equation 6: silu gives SwiGLU, gelu GEGLU, relu ReGLU.
    """
    check_activation(activation)
    opened = ACTIVATIONS[activation](linear(x, gate, gate_bias))  # … F
    return linear(opened * linear(x, up, up_bias), down, down_bias)


def gated_feed_forward_backward(
    d_out: Float[np.ndarray, "... D"],
    x: Float[np.ndarray, "... D"],
    gate: Float[np.ndarray, "F D"],
    up: Float[np.ndarray, "F D"],
    down: Float[np.ndarray, "D F"],
    gate_bias: Float[np.ndarray, "F"] | None = None,
    up_bias: Float[np.ndarray, "F"] | None = None,
    down_bias: Float[np.ndarray, "D"] | None = None,
    activation: str = "silu",
) -> tuple[
    Float[np.ndarray, "... D"],
    Float[np.ndarray, "F D"],
    Float[np.ndarray, "F D"],
    Float[np.ndarray, "D F"],
    Float[np.ndarray, "F"] | None,
    Float[np.ndarray, "F"] | None,
    Float[np.ndarray, "D"] | None,
]:
    """d_x, d_gate, d_up, d_down, d_gate_bias, d_up_bias, d_down_bias; x is read twice, so d_x is a sum of two."""
    valve = linear(x, gate, gate_bias)
    opened, raised = ACTIVATIONS[activation](valve), linear(x, up, up_bias)
    d_product, d_down, d_down_bias = linear_backward(d_out, opened * raised, down, down_bias)
    d_valve = ACTIVATIONS_BACKWARD[activation](d_product * raised, valve)
    d_x_gate, d_gate, d_gate_bias = linear_backward(d_valve, x, gate, gate_bias)
    d_x_up, d_up, d_up_bias = linear_backward(d_product * opened, x, up, up_bias)
    return d_x_gate + d_x_up, d_gate, d_up, d_down, d_gate_bias, d_up_bias, d_down_bias


def swiglu(
    x: Float[np.ndarray, "... D"],
    gate: Float[np.ndarray, "F D"],
    up: Float[np.ndarray, "F D"],
    down: Float[np.ndarray, "D F"],
) -> Float[np.ndarray, "... D"]:
    """down · (silu(gate · x) ∘ up · x), LLaMA's feed-forward."""
    return gated_feed_forward(x, gate, up, down, activation="silu")


def swiglu_backward(
    d_out: Float[np.ndarray, "... D"],
    x: Float[np.ndarray, "... D"],
    gate: Float[np.ndarray, "F D"],
    up: Float[np.ndarray, "F D"],
    down: Float[np.ndarray, "D F"],
) -> tuple[Float[np.ndarray, "... D"], Float[np.ndarray, "F D"], Float[np.ndarray, "F D"], Float[np.ndarray, "D F"]]:
    """d_x, d_gate, d_up, d_down."""
    d_x, d_gate, d_up, d_down, *_ = gated_feed_forward_backward(d_out, x, gate, up, down, activation="silu")
    return d_x, d_gate, d_up, d_down


def check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is one of {', '.join(ACTIVATIONS)}, not {activation!r}")


@runs(FeedForwardConfig)
def feed_forward_part(
    config: FeedForwardConfig, x: Float[np.ndarray, "B T D"], here: Here
) -> Float[np.ndarray, "B T D"]:
    """`feed_forward` with a model's own weights, step by step."""
    up = linear(x, here["up.weight"], here.get("up.bias"))
    hidden = here.note("up", ACTIVATIONS[config.activation](up))
    return here.note("down", linear(hidden, here["down.weight"], here.get("down.bias")))


@runs(GatedFeedForwardConfig)
def gated_feed_forward_part(
    config: GatedFeedForwardConfig, x: Float[np.ndarray, "B T D"], here: Here
) -> Float[np.ndarray, "B T D"]:
    """`gated_feed_forward` with a model's own weights, step by step."""
    gate = linear(x, here["gate.weight"], here.get("gate.bias"))
    gate = here.note("gate", ACTIVATIONS[config.activation](gate))
    hidden = here.note("up", gate * linear(x, here["up.weight"], here.get("up.bias")))
    return here.note("down", linear(hidden, here["down.weight"], here.get("down.bias")))
