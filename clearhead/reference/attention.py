"""Scaled dot-product attention: written out, and tiled so that the T × S pattern never exists whole."""

from collections.abc import Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Real

from clearhead.reference.positions import causal_mask
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
    weights = _weights(q, k, mask, bias, causal, scale)
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
    weights = _weights(q, k, mask, bias, causal, scale)
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


def flash_attention(
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    v: Real[np.ndarray, "... S U"],
    *,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    block: int = 128,
) -> Mixed:
    """`attention` to the last digits but one, in O(T + S) extra memory: tiles of block × block scores, one at a time.

    It does the same FLOPs (fewer under `causal`, whose future tiles are skipped) and saves the traffic of the pattern.
    Dao et al. (2022), "FlashAttention", algorithm 1; Milakov & Gimelshein (2018) for the online softmax.
    """
    check_attention(q, k, v, mask=mask, block=block)
    mixed, _ = _flash_forward(q, k, v, mask, causal, scale, block)
    return narrow(mixed, q, k, v)


def _flash_forward(
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    v: Real[np.ndarray, "... S U"],
    mask: Mask | None,
    causal: bool,
    scale: float | None,
    block: int,
) -> tuple[Mixed, Float[np.ndarray, "... T 1"]]:
    """The mixed values, and log Σ exp(scores) of each row: all that the backward needs to rebuild any tile."""
    lead = lead_shape(q, k, v, mask)
    T, S, U = q.shape[-2], k.shape[-2], v.shape[-1]
    wide = np.result_type(q.dtype, k.dtype, v.dtype, np.float32)
    out = np.zeros((*lead, T, U), wide)
    log_total = np.full((*lead, T, 1), np.inf, wide)  # exp(score − ∞) = 0: the weight of a row that reads nothing
    for rows in _slices(T, block):
        # Seen so far, for each row: the largest score, the sum of exp(score − top), and that sum weighted by v.
        top = np.full((*lead, rows.stop - rows.start, 1), -np.inf, wide)
        total = np.zeros_like(top)
        mixed = np.zeros((*lead, rows.stop - rows.start, U), wide)
        for columns in _slices(_reach(rows, T, S, causal), block):
            scores = _tile(q, k, mask, causal, scale, rows, columns)
            new_top = np.maximum(top, scores.max(-1, keepdims=True))
            shift = np.where(np.isneginf(new_top), 0, new_top)
            exp = np.exp(scores - shift)
            rescale = np.exp(top - shift)  # what was summed under the old maximum, brought under the new one
            total = rescale * total + exp.sum(-1, keepdims=True)
            mixed = rescale * mixed + exp @ widen(v[..., columns, :])
            top = new_top
        empty = total == 0
        out[..., rows, :] = mixed / np.where(empty, 1, total)
        log_total[..., rows, :] = np.where(empty, np.inf, top + np.log(np.where(empty, 1, total)))
    return out, log_total


def flash_attention_backward(
    d_out: Float[np.ndarray, "... T U"],
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    v: Real[np.ndarray, "... S U"],
    *,
    mask: Mask | None = None,
    causal: bool = False,
    scale: float | None = None,
    block: int = 128,
) -> tuple[Float[np.ndarray, "..."], Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """d_q, d_k, d_v, tile by tile: P = exp(scores − log_total) is rebuilt, used and dropped.

    The row sum Σ_S d_P ∘ P of `attention_backward` equals d_out · out, which needs no pattern.
    Dao (2023), "FlashAttention-2", algorithm 2.
    """
    out, log_total = _flash_forward(q, k, v, mask, causal, scale, block)
    T, S = q.shape[-2], k.shape[-2]
    factor = default_scale(q, scale)
    lead = out.shape[:-2]
    d_q, d_k, d_v = (np.zeros(lead + x.shape[-2:], out.dtype) for x in (q, k, v))
    row_sum = (d_out * out).sum(-1, keepdims=True)
    for rows in _slices(T, block):
        q_rows, d_rows = widen(q[..., rows, :]), widen(d_out[..., rows, :])
        for columns in _slices(_reach(rows, T, S, causal), block):
            k_columns, v_columns = widen(k[..., columns, :]), widen(v[..., columns, :])
            weights = np.exp(_tile(q, k, mask, causal, scale, rows, columns) - log_total[..., rows, :])
            d_weights = d_rows @ v_columns.swapaxes(-1, -2)
            d_scores = factor * weights * (d_weights - row_sum[..., rows, :])
            d_q[..., rows, :] += d_scores @ k_columns
            d_k[..., columns, :] += d_scores.swapaxes(-1, -2) @ q_rows
            d_v[..., columns, :] += weights.swapaxes(-1, -2) @ d_rows
    return sum_to(d_q, q), sum_to(d_k, k), sum_to(d_v, v)


def _weights(
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    mask: Mask | None,
    bias: Bias | None,
    causal: bool,
    scale: float | None,
) -> Float[np.ndarray, "... T S"]:
    """Who reads whom, and how much: each row sums to 1, or to 0 where nothing may be read."""
    scores = widen(q) @ widen(k).swapaxes(-1, -2) * default_scale(q, scale)  # … T S
    if bias is not None:
        scores = scores + widen(bias)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if causal:
        scores = np.where(causal_mask(q.shape[-2], k.shape[-2]), scores, -np.inf)
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


def _tile(
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    mask: Mask | None,
    causal: bool,
    scale: float | None,
    rows: slice,
    columns: slice,
) -> Float[np.ndarray, "..."]:
    """The scores of some queries against some keys, −∞ where they may not be read."""
    T, S = q.shape[-2], k.shape[-2]
    scores = widen(q[..., rows, :]) @ widen(k[..., columns, :]).swapaxes(-1, -2) * default_scale(q, scale)
    if mask is not None:
        whole = np.broadcast_to(mask, (*mask.shape[:-2], T, S))  # a view
        scores = np.where(whole[..., rows, columns], scores, -np.inf)
    if causal:
        i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)
        scores = np.where(j <= i + S - T, scores, -np.inf)
    return scores


def _slices(length: int, block: int) -> Iterator[slice]:
    return (slice(start, min(start + block, length)) for start in range(0, length, block))


def _reach(rows: slice, T: int, S: int, causal: bool) -> int:
    """How many keys the last of these rows may read: under `causal`, tiles beyond it are wholly in the future."""
    return max(0, rows.stop + S - T) if causal else S


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
