"""FlashAttention: exact attention that never stores the T × S weights.

At 32,768 tokens the weights of one head are 4 GB in float32. A processor spends more time moving them than computing
them. FlashAttention computes block × block tiles of scores, uses each at once, and forgets it. The difficulty is the
softmax, whose denominator needs the whole row. It is built up tile by tile ("online softmax"):

    top ← max(top, scores of the tile)          total ← total · e^(old top − top) + Σ e^(scores − top)
                                                mixed ← mixed · e^(old top − top) + e^(scores − top) v

and mixed/total at the end of a row is its softmax-weighted mean. The FLOPs are the same as those of plain attention;
what is saved is memory, O(T + S) instead of O(T·S), and with it time.
Dao et al. (2022), "FlashAttention", algorithm 1; Milakov & Gimelshein (2018) for the online softmax.

Why the online softmax is right. Suppose the row's scores come in two tiles, a and b, with maxima m_a and m_b. After
tile a: total = Σ e^(a − m_a). When tile b raises the maximum to m, every old term must become e^(a − m), which is e^(a
− m_a) · e^(m_a − m): one factor for the whole sum. The same factor corrects the mixture of values, since it is a sum of
the same exponentials. After the last tile both are relative to the true maximum, and it cancels in the quotient.

What is kept for the backward pass is one number per row, log Σ exp(scores) = top + log total. From it any tile of
weights can be computed again as exp(scores − log_total). So the backward pass has five matrix products instead of four,
and is still faster, because memory is the bottleneck.

    plain attention     memory T·S       reads and writes the T × S table several times
    flash attention     memory T + S     each tile lives in the processor's cache for as long as it is needed

By hand, one row with the scores (1, 3, 2) and the values (10, 20, 30), in tiles of two keys:

    tile (1, 3)     top 3     total e^(−2) + 1 = 1.135      mixed 10·e^(−2) + 20 = 21.35
    tile (2)        top 3     total 1.135 + e^(−1) = 1.503  mixed 21.35 + 30·e^(−1) = 32.39
    end             mixed/total = 21.55                     softmax (0.09, 0.665, 0.245) · v = 21.55

Had the second tile held a 5, `rescale` = e^(3 − 5) would have shrunk the old sums first. The largest score of the row
is not known until the last tile, and nothing has to be read twice.

Why this is faster on real hardware. A GPU computes 150 to 200 FLOPs in the time in which it reads one byte of its main
memory (A100: 312 TFLOP/s in bfloat16, 1.6 to 2.0 TB/s). Attention with K = 64 does 2·64 FLOPs for each
score that it writes and reads back several times, so plain attention waits for memory. In tiles the scores never leave
the processor. The number of FLOPs is the same, and somewhat larger in the backward pass.

Choosing the block. A tile of scores, its queries, keys and values must fit into the fast memory M: about block² +
4·block·K numbers. With M = 192 KB and K = 64 that is 128, the default here. Any size gives the same result up to
rounding, which the tests check with tiles that do not divide the length.

What cannot be had: the weights. Nothing of size T × S exists, so a map of attention has to be computed separately, for
the rows that are asked for. The PyTorch engine does that (see `nn/attention_view.py`).

How much memory traffic is saved. With fast memory for M numbers, plain attention moves about T·K + T² numbers, and
FlashAttention about T²·K²/M (Dao et al. 2022, theorem 2). For K = 64 and M = 49,152 (96 KB of float16) the second is
T²/12. The paper measured up to 3 times the speed of plain attention, since not all time is spent on memory.

Causal tiles in numbers: T = S = 1,024 and block = 128 give 8 × 8 = 64 tiles. 28 lie wholly in the future and are
skipped, 8 are crossed by the diagonal and masked inside, and 28 need no mask at all.

Why results differ in the last digits. Plain attention sums a row in one order, tiles in another, and float addition is
not associative. So two block sizes agree to about 1e-6 in float32, and not bit by bit.

Mistakes that run without an error, and how they show:

    `mixed` not rescaled         right for one tile, wrong for longer texts: test with at least three tiles
    softmax of each tile         every tile sums to 1, so the row is a mean of means; distant keys weigh too much
    sums in half precision       the total of 10,000 weights stops growing; keep top, total and mixed in float32
    −∞ − (−∞)                    NaN in every row that has read nothing yet, such as rows of padding
    the diagonal, if T < S       query i stands at position i + S − T; without that shift decoding reads one key

The code below has the same loops as a GPU kernel: rows of queries outside, columns of keys inside.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Real

from clearhead.reference.attention import (
    Bias,
    Mask,
    Mixed,
    attention_scores,
    check_attention,
    default_scale,
    lead_shape,
    softcap_slope,
    sum_to,
)
from clearhead.reference.checks import check_gradient
from clearhead.reference.softmax import narrow, widen


def flash_attention(
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    v: Real[np.ndarray, "... S U"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 128,
) -> Mixed:
    """The same result as `attention`, up to rounding, from block × block tiles of scores, one at a time.

    Under `causal` the tiles that lie wholly in the future are skipped, which halves the FLOPs of a long text.

    Shapes: q … T K, k … S K, v … S U, out … T U. Scores exist as … block block at a time; mask and bias broadcast to
    … T S and are cut to the tile. `block` changes the memory and the speed, not the result.

    There is no dropout here. A kernel that has it derives each tile's random numbers from the tile's place, so that the
    backward pass can draw them again.

    >>> rng = np.random.default_rng(0)
    >>> q, k, v = (rng.normal(size=(5, 4)) for _ in range(3))
    >>> from clearhead.reference.attention import attention
    >>> bool(np.allclose(flash_attention(q, k, v, block=2), attention(q, k, v)))
    True
    """
    check_attention(q, k, v, mask=mask, bias=bias, softcap=softcap, block=block)
    tiles = Tiles(q, k, mask, bias, causal, scale, softcap, block)
    mixed, _ = _flash_forward(tiles, v)
    return narrow(mixed, q, k, v)


@dataclass(frozen=True)
class Tiles:
    """The scores of one attention, computed tile by tile.

    It holds the inputs and no scores: `scores(rows, columns)` computes one tile when it is asked, and computes it again
    in the backward pass. Masks and biases are cut to the tile, so they may be small arrays that broadcast.

    Tiles of a causal table with T = S = 6 and block = 2: ■ is computed, ▲ is masked inside, and · is skipped.

        ▲ · ·
        ■ ▲ ·
        ■ ■ ▲
    """

    q: Real[np.ndarray, "... T K"]
    k: Real[np.ndarray, "... S K"]
    mask: Mask | None
    bias: Bias | None
    causal: bool
    scale: float | None
    softcap: float | None
    block: int

    def rows(self) -> Iterator[slice]:
        """The queries, `block` at a time: T/block rows of tiles, the last one shorter."""
        return _slices(self.q.shape[-2], self.block)

    def columns(self, rows: slice) -> Iterator[slice]:
        """The keys that some of these queries may read, `block` at a time: under `causal`, none in their future.

        With T queries at the end of S keys, query i reads keys up to i + S − T. The last query of these rows is
        rows.stop − 1, so no key at or after rows.stop + S − T is ever read.

        A step of decoding has T = 1 and S = 8: rows.stop = 1, so keys up to 1 + 8 − 1 = 8, all of them, are read.
        """
        T, S = self.q.shape[-2], self.k.shape[-2]
        return _slices(max(0, rows.stop + S - T) if self.causal else S, self.block)

    def scores(self, rows: slice, columns: slice) -> Float[np.ndarray, "..."]:
        """scale · q kᵀ + bias of one tile, −∞ where a key may not be read.

        The causal rule uses the numbers of rows and columns in the whole table, so a tile that lies under the diagonal
        is computed without a mask, and one that the diagonal crosses is cut.
        """
        T, S = self.q.shape[-2], self.k.shape[-2]
        bias = None if self.bias is None else _tile(self.bias, T, S, rows, columns)
        q, k = self.q[..., rows, :], self.k[..., columns, :]
        scores = attention_scores(q, k, bias, default_scale(self.q, self.scale), self.softcap)
        if self.mask is not None:
            scores = np.where(_tile(self.mask, T, S, rows, columns), scores, -np.inf)
        if self.causal:
            i, j = np.arange(rows.start, rows.stop)[:, None], np.arange(columns.start, columns.stop)
            scores = np.where(j <= i + S - T, scores, -np.inf)
        return scores


def _flash_forward(tiles: Tiles, v: Real[np.ndarray, "... S U"]) -> tuple[Mixed, Float[np.ndarray, "... T 1"]]:
    """The mixed values, and log Σ exp(scores) of each row: all that the backward needs to rebuild any tile.

    For each row of tiles the loop keeps three things, all relative to the largest score seen so far: `top`, `total` and
    `mixed`. A row that has read no key yet has top = −∞. Subtracting −∞ from −∞ would give NaN, so 0 is subtracted
    instead; exp(−∞ − 0) is 0, which is what a masked score must contribute.
    """
    q, k = tiles.q, tiles.k
    lead = lead_shape(q, k, v, tiles.mask, tiles.bias)
    T, U = q.shape[-2], v.shape[-1]
    wide = np.result_type(q.dtype, k.dtype, v.dtype, np.float32)
    out = np.zeros((*lead, T, U), wide)
    log_total = np.full((*lead, T, 1), np.inf, wide)  # exp(score − ∞) = 0: the weight of a row that reads nothing
    for rows in tiles.rows():
        # Of the keys seen so far, for each row: the largest score, Σ exp(score − top), and Σ exp(score − top)·v.
        top = np.full((*lead, rows.stop - rows.start, 1), -np.inf, wide)
        total = np.zeros_like(top)
        mixed = np.zeros((*lead, rows.stop - rows.start, U), wide)
        for columns in tiles.columns(rows):
            scores = tiles.scores(rows, columns)
            new_top = np.maximum(top, scores.max(-1, keepdims=True))
            shift = np.where(np.isneginf(new_top), 0, new_top)
            exp = np.exp(scores - shift)
            rescale = np.exp(top - shift)  # what was summed relative to the old maximum, made relative to the new one
            total = rescale * total + exp.sum(-1, keepdims=True)
            mixed = rescale * mixed + exp @ widen(v[..., columns, :])
            top = new_top
        # A row that may read nothing has total 0. Its output is 0, and its log_total of +∞ makes every later weight 0.
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
    bias: Bias | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    block: int = 128,
) -> tuple[
    Float[np.ndarray, "..."], Float[np.ndarray, "..."], Float[np.ndarray, "..."], Float[np.ndarray, "..."] | None
]:
    """d_q, d_k, d_v, d_bias, tile by tile: the weights P = exp(scores − log_total) are rebuilt, used and dropped.

    The formulas are those of `attention_backward`. Its row sum Σ_S d_P ∘ P would need a whole row of P; it equals
    d_out · out, because Σ_S (d_out·v_S) P_S = d_out · Σ_S P_S v_S. Dao (2023), "FlashAttention-2", algorithm 2.

    A row in numbers: weights (¼, ¾), values (4, 8), d_out = 2. Then out = 7 and d_P = (8, 16), so Σ d_P ∘ P = 2 + 12 =
    14, and d_out · out = 2·7 = 14. d_scores = (¼·(8 − 14), ¾·(16 − 14)) = (−1.5, 1.5): they sum to 0, as they must.

    Memory: d_q, d_k and d_v have the size of their inputs, and each row adds two numbers, log_total and row_sum. A bias
    is the exception: its gradient is T × S by definition, unless it broadcasts.

    The order of loops is a choice. Here queries are outside, so d_q of a row is complete when its inner loop ends,
    while d_k and d_v are added to from every row. A GPU kernel prefers keys outside, since then each thread block owns
    its d_k and d_v and needs no locks.

    The same gradients as the plain backward, from tiles that do not divide the length:

    >>> from clearhead.reference.attention import attention_backward
    >>> rng = np.random.default_rng(0)
    >>> d_out, q, k, v = (rng.normal(size=(5, 4)) for _ in range(4))
    >>> ours, plain = (f(d_out, q, k, v, causal=True)[:3] for f in (flash_attention_backward, attention_backward))
    >>> all(np.allclose(a, b) for a, b in zip(ours, plain, strict=True))
    True
    """
    check_attention(q, k, v, mask=mask, bias=bias, softcap=softcap, block=block)
    tiles = Tiles(q, k, mask, bias, causal, scale, softcap, block)
    out, log_total = _flash_forward(tiles, v)
    check_gradient(d_out, *out.shape)
    factor = default_scale(q, scale)
    lead, (T, S) = out.shape[:-2], (q.shape[-2], k.shape[-2])
    d_q, d_k, d_v = (np.zeros(lead + x.shape[-2:], out.dtype) for x in (q, k, v))
    d_bias = None if bias is None else np.zeros((*lead, T, S), out.dtype)
    row_sum = (d_out * out).sum(-1, keepdims=True)
    # Three nested pieces of work for each tile: rebuild P, go back through the softmax, add to d_q, d_k and d_v.
    for rows in tiles.rows():
        q_rows, d_rows = widen(q[..., rows, :]), widen(d_out[..., rows, :])
        for columns in tiles.columns(rows):
            k_columns, v_columns = widen(k[..., columns, :]), widen(v[..., columns, :])
            # Rebuild this tile of P. Its rows are complete softmax rows already: log_total knows their denominators.
            weights = np.exp(tiles.scores(rows, columns) - log_total[..., rows, :])
            d_weights = d_rows @ v_columns.swapaxes(-1, -2)
            d_scores = weights * (d_weights - row_sum[..., rows, :])
            # The bias is added after the scale and the cap, so it takes d_scores before their derivatives.
            if d_bias is not None:
                d_bias[..., rows, columns] = d_scores
            d_scores = factor * d_scores * softcap_slope(attention_scores(q_rows, k_columns, None, factor), softcap)
            d_q[..., rows, :] += d_scores @ k_columns
            d_k[..., columns, :] += d_scores.swapaxes(-1, -2) @ q_rows
            d_v[..., columns, :] += weights.swapaxes(-1, -2) @ d_rows
    d_given = None if bias is None or d_bias is None else sum_to(d_bias, bias)
    return sum_to(d_q, q), sum_to(d_k, k), sum_to(d_v, v), d_given


def _tile(table: Real[np.ndarray, "..."] | Mask, T: int, S: int, rows: slice, columns: slice) -> np.ndarray:
    """The tile of a mask or bias that broadcasts to (…, T, S). The broadcast is a view and takes no memory.

    >>> _tile(np.array([[1.0, 2.0, 3.0]]), 4, 3, slice(0, 2), slice(1, 3))
    array([[2., 3.],
           [2., 3.]])
    """
    return np.broadcast_to(table, (*table.shape[:-2], T, S))[..., rows, columns]


def _slices(length: int, block: int) -> Iterator[slice]:
    """0 … block, block … 2·block, up to `length`.

    >>> [(part.start, part.stop) for part in _slices(5, 2)]
    [(0, 2), (2, 4), (4, 5)]
    """
    return (slice(start, min(start + block, length)) for start in range(0, length, block))
