"""Normalisation over the last axis: each position's vector is rescaled by its own statistics.

    LayerNorm   γ ∘ (x − μ)/√(σ² + ε) + β        μ, σ²: mean and variance of the D numbers of one position
    RMSNorm     γ ∘ x/√(mean(x²) + ε)            no mean, no β

Residual branches add up, so without a norm the numbers grow with depth. The norm gives every sublayer inputs of about
unit size; γ (and β) let the model undo that where it wants to. ε keeps a vector of zeros from being divided by 0, and
belongs inside the root. Statistics are computed in float32 or wider.

A worked vector, x = (1, 2, 3, 6): the mean is 3, the variance (4 + 1 + 0 + 9)/4 = 3.5, so the layer norm without γ and
β is (−1.07, −0.53, 0, 1.60). The mean square is 12.5, so the RMS norm is (0.28, 0.57, 0.85, 1.70).

Geometry: the layer norm removes the part of x along (1, 1, …, 1) and scales the rest to length √D. The RMS norm only
scales. Both forget how long x was, which is why a pre-norm block can add small updates to a residual stream of any
size. Neither mixes positions, so, unlike batch norm, they do the same in training and in decoding, for any batch.

Why size matters at all. A product of two vectors of D numbers of size s is of size s²·√D, and softmax and sigmoid are
flat for large inputs. If x doubled from layer to layer, the attention weights of deep layers would be one-hot and their
gradients 0. A norm before each branch makes the size of its input the same in every layer, whatever was added before.

What the gain is for. After the norm every coordinate has about the same size, but not every feature is equally
important. γ is one number for each coordinate, so the model can raise some and silence others. It is applied to all
positions alike. In large models a few coordinates stay far above the others in every token. These outlier features
make activations hard to store in 8 bits (Dettmers et al. 2022, "LLM.int8()").

Where the norm stands in a block is decided in `stack.py`, not here.

Cost: about 5·D FLOPs per position, next to nothing beside the 24·D² of a block. On real machines a norm is bounded by
memory: it reads and writes D numbers for every position, and fast kernels join it with the product that follows.

A norm makes a layer blind to scale, and that has a second effect: multiplying the matrix W before a norm by 2 changes
nothing in the output, but halves the gradient of W. So weights before a norm that grow learn more slowly. Weight decay
keeps their size, and with it their speed of learning, in balance.

Mistakes that run without an error:

    ε outside the root        x/(√var + ε): close, but not equal; differs most for small vectors
    variance over D − 1       the unbiased one; off by √((D − 1)/D), and no longer equal to any checkpoint's norm
    wrong axis                statistics over positions instead of features; tokens then influence each other
    half precision            the sum of 4,096 squares of numbers near 30 is more than float16 can hold
"""

import numpy as np
from jaxtyping import Float

from clearhead.configs import (
    HeadwiseNormConfig,
    LayerNormConfig,
    OffsetRMSNormConfig,
    PlainLayerNormConfig,
    PlainRMSNormConfig,
    ProjectionNormConfig,
    RMSNormConfig,
)
from clearhead.reference.checks import check_gradient
from clearhead.reference.run import Context, runs
from clearhead.reference.softmax import narrow, widen


def layer_norm(
    x: Float[np.ndarray, "... D"],
    weight: Float[np.ndarray, "D"],
    bias: Float[np.ndarray, "D"] | None,
    eps: float = 1e-5,
) -> Float[np.ndarray, "... D"]:
    """(x − mean) / √(var + eps) · weight + bias.

    The variance is the biased one, Σ(x − μ)²/D. Ba, Kiros & Hinton (2016), "Layer Normalization", equation 4.

    >>> layer_norm(np.array([1.0, 2.0, 3.0, 6.0]), np.ones(4), np.zeros(4)).round(2)
    array([-1.07, -0.53,  0.  ,  1.6 ])
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
    """d_x = (g − mean(g) − n ∘ mean(g ∘ n)) / √(var + eps), with n the normalised x and g = weight ∘ d_out.

    Every xᵢ also moves the mean and the variance. Those two paths are the two means that are subtracted: after them
    d_x has no component along (1, …, 1) and none along n, because adding a constant to x or scaling x changes nothing.
    d_weight = Σ d_out ∘ n and d_bias = Σ d_out, summed over positions.

    Read it as three corrections to g: without the mean of g, because a common shift of x changes nothing; without its
    part along n, because scaling x changes nothing; and divided by the standard deviation, because x is.

    >>> d_x, d_weight, d_bias = layer_norm_backward(np.ones((2, 4)), np.eye(2, 4), np.ones(4), np.zeros(4))
    >>> d_bias
    array([2., 2., 2., 2.])
    """
    check_gradient(d_out, *x.shape)
    normed, inverse_std = _standardize(x, eps)
    g = widen(d_out) * widen(weight)
    d_x = (g - g.mean(-1, keepdims=True) - normed * (g * normed).mean(-1, keepdims=True)) * inverse_std
    d_bias = None if bias is None else narrow(_sum_positions(widen(d_out)), bias)
    return narrow(d_x, x), narrow(_sum_positions(d_out * normed), weight), d_bias


def rms_norm(
    x: Float[np.ndarray, "... D"], weight: Float[np.ndarray, "D"], eps: float = 1e-5
) -> Float[np.ndarray, "... D"]:
    """x / √(mean(x²) + eps) · weight: a layer norm that neither subtracts the mean nor adds a bias.

    It trains as well and costs less. Zhang & Sennrich (2019), "Root Mean Square Layer Normalization", equation 4.

    >>> rms_norm(np.array([1.0, 2.0, 3.0, 6.0]), np.ones(4)).round(2)
    array([0.28, 0.57, 0.85, 1.7 ])
    """
    normed, _ = _to_unit_square(x, eps)
    return narrow(normed * widen(weight), x)


def rms_norm_backward(
    d_out: Float[np.ndarray, "... D"], x: Float[np.ndarray, "... D"], weight: Float[np.ndarray, "D"], eps: float = 1e-5
) -> tuple[Float[np.ndarray, "... D"], Float[np.ndarray, "D"]]:
    """d_x = (g − n ∘ mean(g ∘ n)) / √(mean(x²) + eps), with n the normalised x and g = weight ∘ d_out.

    As for the layer norm, without the path through the mean. d_x is orthogonal to x (up to eps): moving x along itself
    changes its length only, and the norm divides by that.

    >>> x, d_out = np.array([1.0, 2.0, 3.0, 6.0]), np.array([1.0, 0.0, 0.0, 0.0])
    >>> d_x, _ = rms_norm_backward(d_out, x, np.ones(4), eps=0.0)
    >>> bool(abs(d_x @ x) < 1e-12)
    True
    """
    check_gradient(d_out, *x.shape)
    normed, inverse_rms = _to_unit_square(x, eps)
    g = widen(d_out) * widen(weight)
    d_x = (g - normed * (g * normed).mean(-1, keepdims=True)) * inverse_rms
    return narrow(d_x, x), narrow(_sum_positions(d_out * normed), weight)


@runs(LayerNormConfig)
def layer_norm_part(
    config: LayerNormConfig, x: Float[np.ndarray, "... D"], context: Context
) -> Float[np.ndarray, "... D"]:
    """`layer_norm` with a model's own γ and β (GPT-2, BERT; some families have no β).

    γ starts at 1 and β at 0, so that a fresh norm only normalises. Both are left out of weight decay: pulling γ to 0
    would switch the branch off.
    """
    return layer_norm(x, context["weight"], context.get("bias"), config.eps)


@runs(RMSNormConfig)
def rms_norm_part(config: RMSNormConfig, x: Float[np.ndarray, "... D"], context: Context) -> Float[np.ndarray, "... D"]:
    """`rms_norm` with a model's own γ (LLaMA and most models since).

    Without the mean, one pass over the D numbers is enough, and the result is as good: what helps training is the
    fixed size, not the fixed mean (Zhang & Sennrich 2019, section 4).
    """
    return rms_norm(x, context["weight"], config.eps)


@runs(OffsetRMSNormConfig)
def offset_rms_norm_part(
    config: OffsetRMSNormConfig, x: Float[np.ndarray, "... D"], context: Context
) -> Float[np.ndarray, "... D"]:
    """`rms_norm` with gain 1 + γ (Gemma): weights that start at 0, and weight decay pulls the gain to 1.

    A checkpoint that is loaded into the other kind of norm is off by 1 in every gain, and the text becomes noise.
    """
    return rms_norm(x, 1 + widen(context["weight"]), config.eps)


def _standardize(
    x: Float[np.ndarray, "... D"], eps: float
) -> tuple[Float[np.ndarray, "... D"], Float[np.ndarray, "... 1"]]:
    """x with mean 0 and variance 1 (up to eps), and the factor 1/√(var + eps).

    >>> normed, inverse_std = _standardize(np.array([1.0, 3.0]), 0.0)
    >>> normed, inverse_std
    (array([-1.,  1.]), array([1.]))
    """
    wide = widen(x)
    centred = wide - wide.mean(-1, keepdims=True)
    return _to_unit_square(centred, eps)  # the mean square of a centred vector is its variance


def _to_unit_square(
    x: Float[np.ndarray, "... D"], eps: float
) -> tuple[Float[np.ndarray, "... D"], Float[np.ndarray, "... 1"]]:
    """x with mean square 1 (up to eps), and the factor 1/√(mean(x²) + eps).

    ε = 1e-5 matters only where mean(x²) is as small as that, such as for padding, whose vectors may be all zeros.

    >>> normed, _ = _to_unit_square(np.zeros(3), 1e-5)
    >>> normed                                          # zeros, not NaN
    array([0., 0., 0.])
    """
    wide = widen(x)
    inverse = 1 / np.sqrt((wide * wide).mean(-1, keepdims=True) + eps)
    return wide * inverse, inverse


def _sum_positions(x: Float[np.ndarray, "... D"]) -> Float[np.ndarray, "D"]:
    """Sum over all positions: they share the weights, so their gradients add up.

    >>> _sum_positions(np.ones((2, 3, 4)))              # 2 rows of 3 positions
    array([6., 6., 6., 6.])
    """
    return x.sum(tuple(range(x.ndim - 1)))


@runs(ProjectionNormConfig)
def run_projection_norm(
    config: ProjectionNormConfig, x: Float[np.ndarray, "B H T K"], context: Context
) -> Float[np.ndarray, "B H T K"]:
    """The norm over all heads of a position together: heads side by side, normed, and apart again.

    With one norm per head, a head that is much smaller than the others is scaled up to their size. With one norm over
    all heads (OLMo 2), heads keep their relative sizes. The gain has H·K numbers instead of K.
    """
    B, H, T, K = x.shape
    joint = context.run("norm", config.norm, x.transpose(0, 2, 1, 3).reshape(B, T, H * K))
    return joint.reshape(B, T, H, K).transpose(0, 2, 1, 3)


@runs(PlainLayerNormConfig)
def plain_layer_norm_part(
    config: PlainLayerNormConfig, x: Float[np.ndarray, "... D"], context: Context
) -> Float[np.ndarray, "... D"]:
    """Mean 0 and variance 1, and nothing learned (OLMo).

    The gain is not missing: the matrix that reads the result can hold it, since W·(γ ∘ n) = (W·diag γ)·n.
    """
    return narrow(_standardize(x, config.eps)[0], x)


@runs(PlainRMSNormConfig)
def plain_rms_norm_part(
    config: PlainRMSNormConfig, x: Float[np.ndarray, "... D"], context: Context
) -> Float[np.ndarray, "... D"]:
    """Mean square 1, and nothing learned (Llama 4). A rotation keeps the mean square, so the norm may come first."""
    return narrow(_to_unit_square(x, config.eps)[0], x)


@runs(HeadwiseNormConfig)
def headwise_norm_part(
    config: HeadwiseNormConfig, x: Float[np.ndarray, "B H T K"], context: Context
) -> Float[np.ndarray, "B H T K"]:
    """`layer_norm` of each head without β, with gains of its own for every head (Cohere, StableLM).

    The weight is H K, one row of gains for each head. Queries and keys are then bounded in length, and so are scores.
    """
    return narrow(_standardize(x, config.eps)[0] * widen(context["weight"])[:, None], x)
