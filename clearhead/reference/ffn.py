"""Feed-forward networks (FFN): what each position does on its own, after attention has mixed positions.

    plain   down · act(up · x)                      D → F → D, F usually 4·D; ReLU (2017), GELU (GPT-2, BERT)
    gated   down · (act(gate · x) ∘ up · x)         three matrices, F usually 8/3·D; SiLU: SwiGLU (LLaMA)

The FFN holds two thirds of a block's weights. A row of `up` is a pattern to look for, the matching column of `down` is
what to add to the residual stream if it is found. Without the activation, the two matrices would be one.

Why so wide. Attention can only take means of what is there. New features are computed here: F = 4·D directions are
tested at once, most of them inactive for a given token. The cost is 2·2·D·F FLOPs per token, 16·D² for F = 4·D, twice
that of the four D × D matrices of attention. A gated network has three matrices; with F = 8/3·D it costs the same.

The activations at a glance:

    x        −3      −1      −0.5     0      0.5     1       3
    relu      0       0       0       0      0.5     1       3
    gelu     −0.00   −0.16   −0.15    0      0.35    0.84    3.00
    silu     −0.14   −0.27   −0.19    0      0.31    0.73    2.86

ReLU has no gradient below 0: a unit that is never active never learns. GELU and SiLU are smooth and dip slightly below
0, so almost every unit gets some gradient.

By hand, with D = 2 and F = 3, ReLU and no biases. Each row of `up` looks for one pattern:

    x      = (1, −1)
    up     = (1, 0), (0, 1), (1, 1)          rows: "first", "second", "both"
    up · x = (1, −1, 0)                      first is there, second is negative, both cancel
    relu   = (1, 0, 0)
    down   = (2, 5, 7), (3, 6, 8)            column j is what unit j adds
    out    = (2, 3)                          column 0 alone: only the first unit was active

A memory of keys and values. The sum Σ_j act(up_j · x) down_j has the form of attention with F fixed keys up_j and F
fixed values down_j, and with an activation in place of the softmax (Geva et al. 2021, "Transformer Feed-Forward Layers
Are Key-Value Memories"). So facts are found here, and editing methods such as ROME write into `down`. Unlike attention,
the keys are the same for every text, and the weights need not sum to 1: several units can be fully active at once.

What training keeps. The backward pass needs x (D numbers), the numbers before the activation and those after it (F
each), for every token. With F = 4·D that is 9·D numbers; attention with a fused kernel keeps about 5·D. Computing them
again in the backward pass saves that memory for one more forward pass (activation checkpointing).

Shapes and cost of one token, D = 4,096 as in LLaMA-7B:

    network    F          matrices      weights      FLOPs
    plain      16,384     2 · D·F       134 million  268 million
    gated      11,008     3 · D·F       135 million  271 million

Mistakes that run without an error:

    gate and up exchanged        the activation is applied to the wrong product; every output is wrong
    tanh for the exact GELU      or the other way round: every output is off by about 0.0003, and greedy text differs
    activation after `down`      the output cannot be negative with ReLU, so the residual stream only grows
    no activation                the two matrices collapse into one of rank D; the loss stalls early
    the factor 8/3               rounded to another multiple than the checkpoint's: at least this is a shape error
"""

from collections.abc import Callable
from math import erf, pi, sqrt

import numpy as np
from jaxtyping import Float

from clearhead.configs import (
    ClampedFeedForwardConfig,
    FeedForwardConfig,
    GatedFeedForwardConfig,
    SwitchedFeedForwardConfig,
)
from clearhead.reference.checks import check_gradient
from clearhead.reference.linear import linear, linear_backward
from clearhead.reference.run import Context, runs
from clearhead.reference.softmax import narrow, widen

Array = Float[np.ndarray, "..."]

# --- Activations -----------------------------------------------------------------------------------------------------
# Each works on every number alone, so its backward multiplies d_out by the derivative at x.


def relu(x: Array) -> Array:
    """max(x, 0): keep what is positive. Nair & Hinton (2010).

    >>> relu(np.array([-1.0, 0.0, 2.0]))
    array([0., 0., 2.])
    """
    return np.maximum(x, 0)


def relu_backward(d_out: Array, x: Array) -> Array:
    """d_out where x > 0, else 0. At 0 itself there is no derivative; 0 is the convention.

    >>> relu_backward(np.ones(3), np.array([-1.0, 0.0, 2.0]))
    array([0., 0., 1.])
    """
    check_gradient(d_out, *x.shape)
    return d_out * (x > 0)


def relu2(x: Array) -> Array:
    """max(x, 0)²: like ReLU, but with a slope that grows from 0. So et al. (2021), "Primer", section 3.

    >>> relu2(np.array([-1.0, 0.5, 2.0]))
    array([0.  , 0.25, 4.  ])
    """
    return np.maximum(x, 0) ** 2


def relu2_backward(d_out: Array, x: Array) -> Array:
    """d_out · 2 max(x, 0): continuous at 0, unlike ReLU's, so units fade out instead of switching off.

    >>> relu2_backward(np.ones(3), np.array([-1.0, 0.5, 2.0]))
    array([0., 1., 4.])
    """
    check_gradient(d_out, *x.shape)
    return d_out * 2 * np.maximum(x, 0)


def gelu(x: Array, approximate: str = "none") -> Array:
    """x Φ(x), with Φ(x) = (1 + erf(x/√2))/2 the distribution function of the normal distribution.

    Like ReLU with a smooth corner: x is kept with the probability that a normal number is smaller than x.
    approximate="tanh" replaces Φ by (1 + tanh(√(2/π) (x + 0.044715 x³)))/2, as GPT-2 does; the two differ by up to
    0.0005. Hendrycks & Gimpel (2016), "Gaussian Error Linear Units", section 2.

    >>> gelu(np.array([-1.0, 0.0, 1.0])).round(3)
    array([-0.159,  0.   ,  0.841])
    """
    return narrow(widen(x) * _normal_cdf(x, approximate)[0], x)


def gelu_backward(d_out: Array, x: Array, approximate: str = "none") -> Array:
    """d_out · (Φ(x) + x Φ′(x)), by the product rule.

    At 0 the slope is ½, for large x it is 1. Around x = −0.75 it is 0: there GELU has its minimum of −0.17, and below
    it a larger input gives a smaller output. ReLU has no such dip.

    >>> gelu_backward(np.ones(3), np.array([-0.751791, 0.0, 5.0])).round(3) + 0.0
    array([0. , 0.5, 1. ])
    """
    check_gradient(d_out, *x.shape)
    cdf, density = _normal_cdf(x, approximate)
    return narrow(d_out * (cdf + widen(x) * density), x)


def _normal_cdf(x: Array, approximate: str) -> tuple[Array, Array]:
    """Φ(x) and Φ′(x), exact or by the tanh approximation.

    Φ′(x) is the density of the normal distribution, exp(−x²/2)/√(2π). For the approximation it is the derivative of
    (1 + tanh u)/2 with u = √(2/π)(x + 0.044715 x³): (1 − tanh²u)/2 · u′.
    """
    wide = widen(x)
    if approximate == "none":
        cdf = (1 + np.vectorize(erf, otypes=[wide.dtype])(wide / sqrt(2))) / 2  # NumPy has no erf of its own
        return cdf, np.exp(-(wide**2) / 2) / sqrt(2 * pi)
    if approximate == "tanh":
        tanh = np.tanh(sqrt(2 / pi) * (wide + 0.044715 * wide * wide * wide))
        return (1 + tanh) / 2, (1 - tanh**2) / 2 * sqrt(2 / pi) * (1 + 3 * 0.044715 * wide**2)
    raise ValueError(f'approximate is {approximate!r}, but must be "none" or "tanh"')


def gelu_tanh(x: Array) -> Array:
    """`gelu(x, "tanh")` under a name of its own, so that configs can name it.

    GPT-2 was trained with it because erf was slow on the hardware of the time. A checkpoint must be run with the
    version that it was trained with; the difference is small, and it adds up over the layers.

    >>> float(abs(gelu(np.linspace(-6, 6, 1001)) - gelu_tanh(np.linspace(-6, 6, 1001))).max()) < 5e-4
    True
    """
    return gelu(x, "tanh")


def gelu_tanh_backward(d_out: Array, x: Array) -> Array:
    """`gelu_backward` of the tanh approximation.

    Its derivative is that of the approximation itself, not that of the exact GELU: a gradient must belong to the
    forward pass that was computed, or a check by finite differences fails.

    >>> gelu_tanh_backward(np.ones(3), np.array([-1.0, 0.0, 1.0])).round(3)
    array([-0.083,  0.5  ,  1.083])
    """
    return gelu_backward(d_out, x, "tanh")


def silu(x: Array) -> Array:
    """x σ(x), with σ(x) = 1/(1 + exp(−x)); also called swish.

    Ramachandran et al. (2017), "Searching for Activation Functions".

    For large x it is x, for very negative x it is 0, and its minimum is −0.278 at x ≈ −1.278.

    >>> silu(np.array([-1.0, 0.0, 1.0])).round(3)
    array([-0.269,  0.   ,  0.731])
    """
    return narrow(widen(x) * _sigmoid(x), x)


def silu_backward(d_out: Array, x: Array) -> Array:
    """d_out · σ(x) (1 + x (1 − σ(x))), because σ′ = σ (1 − σ).

    >>> silu_backward(np.ones(1), np.zeros(1))
    array([0.5])
    """
    check_gradient(d_out, *x.shape)
    sigmoid = _sigmoid(x)
    return narrow(d_out * sigmoid * (1 + x * (1 - sigmoid)), x)


def _sigmoid(x: Array) -> Array:
    """σ(x) = exp(−log(1 + exp(−x))): `logaddexp` does not overflow, whatever the sign of x.

    >>> _sigmoid(np.array([-1000.0, 0.0, 1000.0]))
    array([0. , 0.5, 1. ])
    """
    return np.exp(-np.logaddexp(0, -widen(x)))


def gelu_quick(x: Array) -> Array:
    """x · σ(1.702 x): an older, cheaper approximation of gelu (CLIP).

    The logistic curve σ(1.702 x) is within 0.01 of Φ(x), so the product is within 0.03 of the exact GELU. That is too
    far for a checkpoint that was trained with another version.

    >>> gelu_quick(np.array([-1.0, 0.0, 1.0])).round(3)
    array([-0.154,  0.   ,  0.846])
    """
    return narrow(widen(x) * _sigmoid(1.702 * widen(x)), x)


def gelu_quick_backward(d_out: Array, x: Array) -> Array:
    """d_out · σ(ax)·(1 + ax·(1 − σ(ax))), a = 1.702.

    It is silu's derivative at ax: x σ(ax) = silu(ax)/a, and the inner factor a cancels the outer 1/a.

    >>> gelu_quick_backward(np.ones(3), np.array([-1.0, 0.0, 1.0])).round(3)
    array([-0.068,  0.5  ,  1.068])
    """
    check_gradient(d_out, *x.shape)
    sigmoid = _sigmoid(1.702 * widen(x))
    return narrow(d_out * sigmoid * (1 + 1.702 * x * (1 - sigmoid)), x)


ACTIVATIONS: dict[str, Callable[..., np.ndarray]] = {
    "relu": relu,
    "relu2": relu2,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "gelu_quick": gelu_quick,
    "silu": silu,
}
ACTIVATIONS_BACKWARD: dict[str, Callable[..., np.ndarray]] = {
    "relu": relu_backward,
    "relu2": relu2_backward,
    "gelu": gelu_backward,
    "gelu_tanh": gelu_tanh_backward,
    "gelu_quick": gelu_quick_backward,
    "silu": silu_backward,
}

# --- The networks ----------------------------------------------------------------------------------------------------


def feed_forward(
    x: Float[np.ndarray, "... D"],
    up: Float[np.ndarray, "F D"],
    down: Float[np.ndarray, "D F"],
    up_bias: Float[np.ndarray, "F"] | None = None,
    down_bias: Float[np.ndarray, "D"] | None = None,
    activation: str = "relu",
) -> Float[np.ndarray, "... D"]:
    """down · activation(up · x): widen each position from D to F numbers, cut off, and narrow back to D.

    Vaswani et al. (2017), "Attention Is All You Need", equation 2.

    Shapes: x … D, hidden … F, out … D. Each position is computed alone, so batch and positions are only leading
    dimensions.

    >>> feed_forward(np.array([1.0, -1.0]), up=np.eye(2), down=np.array([[2.0, 5.0]]))      # relu cuts the −1 off
    array([2.])
    """
    check_activation(activation)
    hidden = linear(x, up, up_bias)  # … D → … F
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
    """d_x, d_up, d_down, d_up_bias, d_down_bias: the chain rule, from the last step of the forward to the first.

        hidden = up · x + b₁         active = act(hidden)           out = down · active + b₂
        d_active = downᵀ d_out       d_hidden = d_active ∘ act′     d_x = upᵀ d_hidden

    The input of each matrix times the gradient of its output gives the gradient of the matrix.

    A unit whose activation is flat at this token (ReLU below 0) has d_hidden = 0: neither its row of `up` nor its share
    of d_x gets anything from this token. With 90 % of units inactive, a token trains a tenth of the layer.

    >>> x, up, down = np.array([1.0, -1.0]), np.eye(2), np.array([[2.0, 5.0]])
    >>> d_x, d_up, d_down, *_ = feed_forward_backward(np.ones(1), x, up, down)
    >>> d_x, d_down                            # the second unit is off: it passes nothing on and learns nothing
    (array([2., 0.]), array([[1., 0.]]))
    """
    check_activation(activation)
    check_gradient(d_out, *x.shape[:-1], len(down))
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
    """down · (activation(gate · x) ∘ up · x): one matrix decides how much of the other's output passes.

    At equal parameters it trains better than the plain network; nobody knows why ("divine benevolence", as the paper
    puts it). Shazeer (2020), "GLU Variants Improve Transformer", equation 6: silu gives SwiGLU, gelu GEGLU, relu ReGLU.

    The product of two linear functions of x is quadratic, so a gated network can compare two features of a token, which
    a plain one can only approximate. A gate near 0 switches a direction off for this token.

    With the activation replaced by 1 the layer would be `down · up · x`, one linear map. With it replaced by the
    identity it would be bilinear: every output a sum of products of two features.

    >>> one = np.ones((1, 1))
    >>> gated_feed_forward(np.array([3.0]), one, one, one, activation="relu")      # relu(3) · 3
    array([9.])
    """
    check_activation(activation)
    gated = ACTIVATIONS[activation](linear(x, gate, gate_bias))  # … F
    return linear(gated * linear(x, up, up_bias), down, down_bias)


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
    """d_x, d_gate, d_up, d_down, d_gate_bias, d_up_bias, d_down_bias.

    Product rule: what reaches the gate was multiplied by the values, and what reaches the values by the gate. Both
    `gate` and `up` read x, so d_x is the sum of what comes back through each.

        product = act(before) ∘ values           before = gate · x          values = up · x
        d_values = d_product ∘ act(before)       d_before = d_product ∘ values ∘ act′(before)

    A gate that is shut (act near 0) stops the gradient of `values`, but not its own: d_before is multiplied by the
    values, so the gate can learn to open again.

    >>> x, one, down = np.array([1.0, 2.0]), np.eye(2), np.ones((1, 2))
    >>> gated_feed_forward_backward(np.ones(1), x, one, one, down, activation="relu")[0]  # the gradient of x
    array([2., 4.])
    """
    check_activation(activation)
    check_gradient(d_out, *x.shape[:-1], len(down))
    before = linear(x, gate, gate_bias)
    gated, values = ACTIVATIONS[activation](before), linear(x, up, up_bias)
    d_product, d_down, d_down_bias = linear_backward(d_out, gated * values, down, down_bias)
    d_before = ACTIVATIONS_BACKWARD[activation](d_product * values, before)
    d_x_gate, d_gate, d_gate_bias = linear_backward(d_before, x, gate, gate_bias)
    d_x_up, d_up, d_up_bias = linear_backward(d_product * gated, x, up, up_bias)
    return d_x_gate + d_x_up, d_gate, d_up, d_down, d_gate_bias, d_up_bias, d_down_bias


def swiglu(
    x: Float[np.ndarray, "... D"],
    gate: Float[np.ndarray, "F D"],
    up: Float[np.ndarray, "F D"],
    down: Float[np.ndarray, "D F"],
) -> Float[np.ndarray, "... D"]:
    """down · (silu(gate · x) ∘ up · x): the feed-forward network of LLaMA and most models since.

    LLaMA-7B: D = 4,096 and F = 11,008, which is 8/3·D rounded up to a multiple of 256.

    >>> swiglu(np.array([1.0, 2.0]), gate=np.eye(2), up=np.eye(2), down=np.ones((1, 2))).round(3)
    array([4.254])
    """
    return gated_feed_forward(x, gate, up, down, activation="silu")


def swiglu_backward(
    d_out: Float[np.ndarray, "... D"],
    x: Float[np.ndarray, "... D"],
    gate: Float[np.ndarray, "F D"],
    up: Float[np.ndarray, "F D"],
    down: Float[np.ndarray, "D F"],
) -> tuple[Float[np.ndarray, "... D"], Float[np.ndarray, "F D"], Float[np.ndarray, "F D"], Float[np.ndarray, "D F"]]:
    """d_x, d_gate, d_up, d_down: `gated_feed_forward_backward` without biases.

    By hand for x = (1, 2) and matrices of 1: each coordinate is silu(x)·x, so its slope is silu′(x)·x + silu(x). At 1
    that is 0.928·1 + 0.731 = 1.659, the first number below.

    >>> x, one, down = np.array([1.0, 2.0]), np.eye(2), np.ones((1, 2))
    >>> swiglu_backward(np.ones(1), x, one, one, down)[0].round(3)  # the gradient of x
    array([1.659, 3.943])
    """
    d_x, d_gate, d_up, d_down, *_ = gated_feed_forward_backward(d_out, x, gate, up, down, activation="silu")
    return d_x, d_gate, d_up, d_down


def check_activation(activation: str) -> None:
    """Raise one clear sentence for an unknown activation, in either engine.

    >>> check_activation("relu")                       # known: nothing happens
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation is {activation!r}, but must be one of {', '.join(ACTIVATIONS)}")


@runs(FeedForwardConfig)
def feed_forward_part(
    config: FeedForwardConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """`feed_forward` with a model's own weights, step by step.

    Taps, in order: `pre_activation` B T F, `up` B T F, `down` B T D. The numbers after the activation are sparse with
    ReLU: often more than 90 % of them are 0.
    """
    up = context.tap("pre_activation", linear(x, context["up.weight"], context.get("up.bias")))  # before the activation
    hidden = context.tap("up", ACTIVATIONS[config.activation](up))
    return context.tap("down", linear(hidden, context["down.weight"], context.get("down.bias")))


@runs(GatedFeedForwardConfig)
@runs(ClampedFeedForwardConfig)
def gated_feed_forward_part(
    config: GatedFeedForwardConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """`gated_feed_forward` with a model's own weights, step by step.

    Taps, in order: `pre_activation` and `gate` B T F, `up` B T F (the product, after gating), `down` B T D. Checkpoints
    call these matrices gate_proj, up_proj and down_proj, or w1, w3 and w2; a role says which is which.
    """
    gate = context.tap("pre_activation", linear(x, context["gate.weight"], context.get("gate.bias")))
    gate = context.tap("gate", open_gate(config, gate))
    up = linear(x, context["up.weight"], context.get("up.bias"))
    hidden = context.tap("up", gate * gated_values(config, up))
    return context.tap("down", linear(hidden, context["down.weight"], context.get("down.bias")))


def open_gate(config: GatedFeedForwardConfig, gate: Array) -> Array:
    """activation(gate); gpt-oss cuts off large numbers first, and has a steeper sigmoid.

    The cut bounds what one token can write into the residual stream, which keeps products in few bits accurate.

    With limit 7 and steepness 1.702 (gpt-oss), a gate of 20 is cut to 7 and passes 7·σ(11.9) = 7. Negative gates are
    not cut from below: x·σ(1.702 x) is near 0 there already.
    """
    if isinstance(config, ClampedFeedForwardConfig):
        gate = np.minimum(gate, config.limit)
        return narrow(gate * _sigmoid(config.steepness * gate), gate)
    return ACTIVATIONS[config.activation](gate)


def gated_values(config: GatedFeedForwardConfig, up: Array) -> Array:
    """What the gate lets pass: up, which gpt-oss cuts to ±limit and raises by 1.

    With the 1 the product is gate·(up + 1) = gate + gate·up: at up = 0 the layer is a plain network of the gate, so a
    fresh model starts out as that.
    """
    return np.clip(up, -config.limit, config.limit) + 1 if isinstance(config, ClampedFeedForwardConfig) else up


@runs(SwitchedFeedForwardConfig)
def switched_feed_forward_part(
    config: SwitchedFeedForwardConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """σ(x·w)·ffn(x): one number for each token says how much of the layer passes (Qwen2-MoE).

    It stands in front of the shared expert, which otherwise would add to every token alike.
    The switch is one row of D weights. σ(0) = ½, so a fresh model passes about half of the output.
    """
    out = context.run("ffn", config.ffn, x)
    return out * context.tap("switch", narrow(_sigmoid(linear(x, context["switch.weight"])), x))
