"""Scaled dot-product attention, and the multi-head layer made of it."""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Real

from clearhead import configs
from clearhead.reference.linear import linear
from clearhead.reference.positions import alibi_slopes, causal_mask
from clearhead.reference.rotary import turn_keys, turn_queries
from clearhead.reference.run import Here, runs
from clearhead.reference.softmax import narrow, softmax, widen

Shape = tuple[int, ...]
Mask = Bool[np.ndarray, "... #T #S"] | Bool[np.ndarray, "#S"]
Bias = Real[np.ndarray, "... #T #S"] | Real[np.ndarray, "#S"]
Mixed = Float[np.ndarray, "... T U"]
if TYPE_CHECKING:
    MixedMaybeWeights = Any  # one array or two, by `return_weights`
else:
    MixedMaybeWeights = Mixed | tuple[Mixed, Float[np.ndarray, "... T S"]]


def attention(
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    v: Real[np.ndarray, "... S U"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    rng: np.random.Generator | None = None,
    return_weights: bool = False,
) -> MixedMaybeWeights:
    """softmax(scale · q kᵀ + bias) v, with scale = 1/√K: each query takes the mean of the values its keys point to.

    Vaswani et al. (2017), "Attention Is All You Need", equation 1.
    mask is True where a query may read a key; causal hides the future, the last query seeing the last key.
    A query that may read nothing gets zeros. Leading dimensions broadcast: GQA is q [B,G,R,T,K] with k [B,G,1,S,K].
    The weights returned are those before dropout.
    """
    check_attention(q, k, v, mask=mask, bias=bias)
    weights = attention_weights(attention_scores(q, k, bias, scale), mask, causal)
    kept = weights * _kept(weights.shape, dropout, rng)
    mixed = narrow(kept @ widen(v), q, k, v)
    return (mixed, narrow(weights, q, k, v)) if return_weights else mixed


def attention_backward(
    d_out: Float[np.ndarray, "... T U"],
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    v: Real[np.ndarray, "... S U"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    causal: bool = False,
    scale: float | None = None,
    dropout: float = 0.0,
    rng: np.random.Generator | None = None,
) -> tuple[
    Float[np.ndarray, "..."], Float[np.ndarray, "..."], Float[np.ndarray, "..."], Float[np.ndarray, "..."] | None
]:
    """d_q, d_k, d_v, d_bias (None without a bias), each in the shape of its input.

    With P the weights and M the dropout multipliers: d_P = M ∘ (d_out vᵀ), d_scores = P ∘ (d_P − Σ_S d_P ∘ P), and
    d_q = scale · d_scores k, d_k = scale · d_scoresᵀ q, d_v = (M ∘ P)ᵀ d_out, d_bias = d_scores.
    Under dropout, rng must be in the state that the forward's was in, so that the same weights are dropped.
    """
    weights = attention_weights(attention_scores(q, k, bias, scale), mask, causal)
    kept = _kept(weights.shape, dropout, rng)
    wide_q, wide_k, wide_v, d_mixed = widen(q), widen(k), widen(v), widen(d_out)
    d_weights = d_mixed @ wide_v.swapaxes(-1, -2) * kept  # … T S
    d_scores = weights * (d_weights - (d_weights * weights).sum(-1, keepdims=True))
    scale = default_scale(q, scale)
    d_q = scale * d_scores @ wide_k
    d_k = scale * d_scores.swapaxes(-1, -2) @ wide_q
    d_v = (weights * kept).swapaxes(-1, -2) @ d_mixed
    d_bias = None if bias is None else sum_to(d_scores, bias)
    return sum_to(d_q, q), sum_to(d_k, k), sum_to(d_v, v), d_bias


@runs(configs.AttentionConfig)
def multi_head_attention(
    config: configs.AttentionConfig, x: Float[np.ndarray, "B T D"], here: Here
) -> Float[np.ndarray, "B T D"]:
    """x -> q, k, v by one matrix -> heads -> softmax(qkᵀ/√K)·v -> heads side by side -> out.

    Its rows are H·K for the queries, then G·K for the keys and G·U for the values: grouped-query attention has fewer
    key heads than query heads. In cross-attention the key and value rows read the source.
    """
    K, U = config.widths(x.shape[-1])
    weight, bias = here["qkv.weight"], here.get("qkv.bias")
    rows = slice(0, config.heads * K), slice(config.heads * K, None)
    if here.source is None:
        qkv = here.note("qkv", linear(x, weight, bias))
        q, kv = qkv[..., rows[0]], qkv[..., rows[1]]
    else:
        q, kv = (
            linear(read, weight[part], None if bias is None else bias[part])
            for read, part in zip((x, here.source), rows, strict=True)
        )
    q = here.note("query", split_heads(q, K))  # B H T K
    k = here.note("key", split_heads(kv[..., : config.groups * K], K))  # B G S K
    v = here.note("value", split_heads(kv[..., config.groups * K :], U))  # B G S U
    q = here.note("query_norm", here.run("query_norm", config.qk_norm, q))
    k = here.note("key_norm", here.run("key_norm", config.qk_norm, k))
    readers = [(q, config.mask)]
    if config.rotary is not None:
        turned = turn_queries(config.rotary, q, here.positions)
        readers = [(here.note(name, turned[name]), mask) for name, mask in config.rotary.queries(config.mask).items()]
        k = here.note("key_turned", turn_keys(config.rotary, k, here.positions))
    k, v = here.remember("key", k, 2), here.remember("value", v, 2)
    distance_bias = None if config.score_bias is None else alibi(config.heads, here).astype(x.dtype)
    mixed = attend(readers, k, v, here, bias=distance_bias)
    return here.note("out", linear(merge_heads(mixed, here), here["out.weight"], here.get("out.bias")))


def attend(
    readers: Sequence[tuple[Float[np.ndarray, "B H T K"], configs.Mask]],
    k: Float[np.ndarray, "B G S K"],
    v: Float[np.ndarray, "B G S U"],
    here: Here,
    *,
    bias: Float[np.ndarray, "B H T S"] | None = None,
    scale: float | None = None,
) -> Float[np.ndarray, "B H T U"]:
    """`attention` of a layer, step by step; the R = H/G query heads of a group share its key and value head.

    Several kinds of queries, each with the keys it may read, share one softmax.
    """
    B, H, T, _ = readers[0][0].shape
    G, S = k.shape[1:3]

    def grouped(x: np.ndarray) -> np.ndarray:
        return x.reshape(B, G, H // G, T, x.shape[-1])  # B G R T …

    kinds = [attention_scores(grouped(q), k[:, :, None], None, scale).reshape(B, H, T, S) for q, _ in readers]
    allowed = [here.allowed(mask) for _, mask in readers]
    scores = kinds[0]
    for may, kind in zip(allowed[1:], kinds[1:], strict=True):
        scores = np.where(may, kind, scores)
    scores = here.note("scores", scores if bias is None else scores + widen(bias))
    weights = here.note("weights", attention_weights(scores, np.logical_or.reduce(allowed)))
    mixed = (grouped(weights) @ v[:, :, None]).reshape(B, H, T, v.shape[-1])
    return here.note("mixed", mixed.astype(v.dtype))


def alibi(heads: int, here: Here) -> Float[np.ndarray, "B H T S"]:
    """−slope_h·|i − j| for the positions at hand."""
    distance = abs(here.positions[:, None, :, None] - here.key_positions[:, None, None, :])
    return -np.array(alibi_slopes(heads))[:, None, None] * distance


def split_heads(x: Float[np.ndarray, "B T HK"], width: int) -> Float[np.ndarray, "B H T K"]:
    """[B, T, H·K] -> [B, H, T, K]: reshape, then transpose; the one without the other mixes positions and heads."""
    return x.reshape(*x.shape[:2], -1, width).transpose(0, 2, 1, 3)


def merge_heads(x: Float[np.ndarray, "B H T U"], here: Here) -> Float[np.ndarray, "B T HU"]:
    """[B, H, T, U] -> [B, T, H·U], the way back."""
    B, H, T, U = x.shape
    return here.note("concat", x.transpose(0, 2, 1, 3).reshape(B, T, H * U))


def attention_scores(
    q: Real[np.ndarray, "... T K"], k: Real[np.ndarray, "... S K"], bias: Bias | None = None, scale: float | None = None
) -> Float[np.ndarray, "... T S"]:
    """scale · q kᵀ + bias: how well each key answers each query."""
    scores = widen(q) @ widen(k).swapaxes(-1, -2) * default_scale(q, scale)
    return scores if bias is None else scores + widen(bias)


def attention_weights(
    scores: Float[np.ndarray, "... T S"], mask: Mask | None = None, causal: bool = False
) -> Float[np.ndarray, "... T S"]:
    """Who reads whom, and how much: each row sums to 1, or to 0 where nothing may be read."""
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if causal:
        scores = np.where(causal_mask(*scores.shape[-2:]), scores, -np.inf)
    return softmax(scores)


def _kept(shape: Shape, dropout: float, rng: np.random.Generator | None) -> Float[np.ndarray, "..."] | float:
    """The multipliers of inverted dropout: 0 with probability `dropout`, else 1/(1 − dropout), so the mean is 1."""
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is a probability in [0, 1), not {dropout}")
    if dropout == 0:
        return 1.0
    if rng is None:
        raise ValueError(f"dropout={dropout} needs rng=, a np.random.Generator")
    return (rng.random(shape) >= dropout) / (1 - dropout)


def default_scale(q: Any, scale: float | None) -> float:
    """1/√K, so that a dot product of K unit-variance terms has unit variance again (Vaswani et al., footnote 4)."""
    return q.shape[-1] ** -0.5 if scale is None else scale


def sum_to(d_x: Float[np.ndarray, "..."], x: Real[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The backward of broadcasting: sum the gradient over every axis that x was repeated along."""
    d_x = d_x.sum(tuple(range(d_x.ndim - x.ndim)))
    repeated = tuple(axis for axis in range(x.ndim) if x.shape[axis] == 1)
    return narrow(np.asarray(d_x.sum(repeated, keepdims=True)), x)


def lead_shape(*arrays: Any) -> Shape:
    """The common leading dimensions, all but the last two, after broadcasting."""
    sizes = zip_longest(*(reversed(x.shape[:-2]) for x in arrays if x is not None), fillvalue=1)
    distinct = [set(size) - {1} or {1} for size in sizes]
    if any(len(size) > 1 for size in distinct):
        raise ValueError("leading dimensions do not broadcast")
    return tuple(size.pop() for size in reversed(distinct))


def check_attention(q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, block: int = 1) -> None:
    """One clear sentence for arguments that do not fit, in either engine, before any arithmetic."""
    if mask is not None and not str(mask.dtype).endswith("bool"):
        raise TypeError(
            f"mask is {mask.dtype}, but a mask is boolean, True = may attend; to add to the scores use bias="
        )
    if block < 1:
        raise ValueError(f"block is a number of positions, at least 1, not {block}")
    named = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items() if x is not None)
    fits = (
        min(q.ndim, k.ndim, v.ndim) >= 2
        and 0 < q.shape[-1] == k.shape[-1]
        and k.shape[-2] == v.shape[-2]
        and all(_fits(x, (q.shape[-2], k.shape[-2])) for x in (mask, bias) if x is not None)
    )
    try:
        lead_shape(q, k, v, mask, bias)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            "attention takes q (…, T, K), k (…, S, K), v (…, S, U), and mask and bias that broadcast to (…, T, S), "
            f"not {shapes}"
        )


def _fits(x: Any, pattern: tuple[int, int]) -> bool:
    trailing = tuple(x.shape[-2:])
    return all(size in (1, whole) for size, whole in zip(trailing[::-1], pattern[::-1], strict=False))
