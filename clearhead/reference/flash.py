"""Attention by tiles, so that the T × S pattern never exists whole."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Float, Real

from clearhead.reference.attention import Mask, Mixed, check_attention, default_scale, lead_shape, sum_to
from clearhead.reference.softmax import narrow, widen


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
