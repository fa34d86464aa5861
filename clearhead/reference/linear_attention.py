"""Attention through a feature map, as it is defined: every weight φ(q)·φ(k) written down."""

import math

import numpy as np
from jaxtyping import Bool, Float

from clearhead.configs import DotConfig, EluConfig, FavorConfig, LinearAttentionConfig
from clearhead.reference.attention import merge_heads, split_heads, sum_to
from clearhead.reference.linear import linear
from clearhead.reference.positions import causal_mask
from clearhead.reference.run import Here, runs


def elu_features(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """elu(x) + 1: x + 1 above zero, eˣ below; always positive  (Katharopoulos et al. 2020, equation 7)."""
    return np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))


def elu_features_backward(d_out: Float[np.ndarray, "..."], x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """1 above zero, eˣ below."""
    return d_out * np.exp(np.minimum(x, 0))


def positive_features(
    x: Float[np.ndarray, "... K"], directions: Float[np.ndarray, "W K"]
) -> Float[np.ndarray, "... W"]:
    """exp(ω·x − |x|²/2)/√W for every direction ω. Over ω ~ N(0, I), E[φ(q)·φ(k)] = exp(q·k).

    Choromanski et al. (2021), "Rethinking Attention with Performers", lemma 1.
    """
    exponent = x @ directions.T - 0.5 * (x * x).sum(-1, keepdims=True)
    return np.exp(exponent) / math.sqrt(len(directions))


def positive_features_backward(
    d_out: Float[np.ndarray, "... W"], x: Float[np.ndarray, "... K"], directions: Float[np.ndarray, "W K"]
) -> tuple[Float[np.ndarray, "... K"], Float[np.ndarray, "W K"]]:
    """With g = d_out ∘ φ(x): d_x = Σ_ω g·ω − x·Σ_ω g, d_ω = Σ g·x."""
    g = d_out * positive_features(x, directions)
    flat, rows = g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1])
    return g @ directions - x * g.sum(-1, keepdims=True), flat.T @ rows


def linear_attention(
    q: Float[np.ndarray, "... T W"],
    k: Float[np.ndarray, "... S W"],
    v: Float[np.ndarray, "... S U"],
    causal: bool = False,
) -> Float[np.ndarray, "... T U"]:
    """Σ_j (q·k_j) v_j / Σ_j q·k_j over positive features; causal: over the keys up to the query's own place."""
    weights = _kernel(q, k, causal)
    return weights @ v / weights.sum(-1, keepdims=True)


def linear_attention_backward(
    d_out: Float[np.ndarray, "... T U"],
    q: Float[np.ndarray, "... T W"],
    k: Float[np.ndarray, "... S W"],
    v: Float[np.ndarray, "... S U"],
    causal: bool = False,
) -> tuple[Float[np.ndarray, "... T W"], Float[np.ndarray, "... S W"], Float[np.ndarray, "... S U"]]:
    """With a the weights and p = a/Σa: d_v = pᵀ d_out, d_a = (d_out vᵀ − d_out·out)/Σa, d_q = d_a k, d_k = d_aᵀ q."""
    weights = _kernel(q, k, causal)
    total = weights.sum(-1, keepdims=True)
    shares = weights / total
    d_shares = d_out @ v.swapaxes(-1, -2)
    d_weights = (d_shares - (d_shares * shares).sum(-1, keepdims=True)) / total
    if causal:
        d_weights = d_weights * causal_mask(*weights.shape[-2:])
    d_q, d_k, d_v = d_weights @ k, d_weights.swapaxes(-1, -2) @ q, shares.swapaxes(-1, -2) @ d_out
    return sum_to(d_q, q), sum_to(d_k, k), sum_to(d_v, v)


def _kernel(
    q: Float[np.ndarray, "... T W"], k: Float[np.ndarray, "... S W"], causal: bool
) -> Float[np.ndarray, "... T S"]:
    weights = q @ k.swapaxes(-1, -2)
    return weights * causal_mask(*weights.shape[-2:]) if causal else weights


def random_directions(features: int, width: int, seed: int) -> Float[np.ndarray, "W K"]:
    """Directions that are each normal, and orthogonal in sets of K: a rotation that prefers none, and lengths drawn
    apart from it. Orthogonal ones estimate better than independent ones (Choromanski et al. 2021, theorem 2)."""
    rng = np.random.default_rng(seed)
    sets = []
    for _ in range(-(-features // width)):
        rotation, triangle = np.linalg.qr(rng.standard_normal((width, width)))
        sets.append(rotation * np.sign(np.diag(triangle)))  # without the signs some rotations are likelier than others
    lengths = np.linalg.norm(rng.standard_normal((features, width)), axis=1, keepdims=True)
    return np.concatenate(sets)[:features] * lengths


def stable_features(
    kernel: EluConfig | FavorConfig | DotConfig, x: Float[np.ndarray, "B H T K"]
) -> tuple[Float[np.ndarray, "B H T W"], Float[np.ndarray, "B H T"]]:
    """Features of any size, and the logarithm of what they were divided by.

    The softmax of attention is of q·k/√K, so both are divided by √√K; the largest feature of each vector is 1.
    """
    if isinstance(kernel, EluConfig):
        return elu_features(x), np.zeros(x.shape[:-1], x.dtype)
    if isinstance(kernel, DotConfig):
        return x, np.zeros(x.shape[:-1], x.dtype)
    x = x * x.shape[-1] ** -0.25
    exponent = x @ random_directions(kernel.features, x.shape[-1], kernel.seed).astype(x.dtype).T
    top = exponent.max(-1)
    return np.exp(exponent - top[..., None]), top - 0.5 * (x * x).sum(-1)


@runs(LinearAttentionConfig)
def linear_attention_part(
    config: LinearAttentionConfig, x: Float[np.ndarray, "B T D"], here: Here
) -> Float[np.ndarray, "B T D"]:
    """x -> q, k, v -> features -> φ(q)·φ(k_j) of every pair, as shares of their sum -> mixed values -> out."""
    K, U = config.widths(x.shape[-1])
    rows = config.heads * K
    qkv = here.note("qkv", linear(x, here["qkv.weight"], here.get("qkv.bias")))
    q = here.note("query", split_heads(qkv[..., :rows], K))
    k = here.note("key", split_heads(qkv[..., rows : 2 * rows], K))
    v = here.note("value", split_heads(qkv[..., 2 * rows :], U))
    (q, _), (k, top) = stable_features(config.kernel, q), stable_features(config.kernel, k)
    q, k = here.note("query_features", q), here.note("key_features", k)
    k, top, v = here.remember("key", k, 2), here.remember("top", top, 2), here.remember("value", v, 2)
    readers = here.readable[:, here.readable.shape[1] - x.shape[1] :]
    allowed = here.allowed(config.mask) & readers[:, None, :, None]  # padding reads nothing
    weights = here.note("weights", weighed(q, k, top, allowed, config.kernel.shares))
    mixed = here.note("mixed", weights @ v)
    return here.note("out", linear(merge_heads(mixed, here), here["out.weight"], here.get("out.bias")))


def weighed(
    q: Float[np.ndarray, "B H T W"],
    k: Float[np.ndarray, "B H S W"],
    top: Float[np.ndarray, "B H S"],
    allowed: Bool[np.ndarray, "B 1 T S"],
    shares: bool,
) -> Float[np.ndarray, "B H T S"]:
    """φ(q)·φ(k)·e^top of the keys that may be read, the largest top of these taken out; as shares of their sum or as
    they are."""
    tops = np.where(allowed, top[:, :, None], -np.inf)
    largest = tops.max(-1, keepdims=True, initial=-np.inf)
    factor = np.exp(tops - np.where(np.isneginf(largest), 0, largest))
    weights = q @ k.swapaxes(-1, -2) * factor
    total = weights.sum(-1, keepdims=True)
    return weights / np.where(total == 0, 1, total) if shares else weights
