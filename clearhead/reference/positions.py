"""Where things stand: sinusoids added to the input, ALiBi added to the scores, and the causal mask.

Attention alone does not know order: permute the tokens and the outputs are permuted alike. Position enters in one of
three places: added to the embedding (sinusoidal, learned), by rotating queries and keys (see `rotary.py`), or added to
the scores (ALiBi).

Why order has to be added. For a permutation P of the tokens, attention without positions satisfies f(Px) = P f(x):
"dog bites man" and "man bites dog" give the same vectors in another order. A causal mask breaks the symmetry a little,
since the first token reads one key and the last reads all; causal models without positions learn some order from it
(Haviv et al. 2022).

What a position has to tell. Nearby tokens belong together, so the model must see small distances exactly. Far away
only the rough distance matters. All methods below have that in common: fast and slow clocks, slopes that differ by
head, or buckets that grow with the distance.

    where               how                        known examples           beyond the trained length
    the input           table, learned             GPT-2, BERT, ViT         impossible: there is no row
    the input           sinusoids                  the Transformer of 2017  defined, works badly
    queries and keys    rotation                   LLaMA, most since 2021   works with scaling (YaRN, NTK)
    the scores          −slope · distance          BLOOM, MPT               works
"""

from math import log2

import numpy as np
from jaxtyping import Bool, Float, Int


def sinusoidal_positions(
    length: int, dim: int, base: float = 10000.0, layout: str = "interleaved"
) -> Float[np.ndarray, "{length} {dim}"]:
    """PE(pos, 2i) = sin(pos / base^(2i/D)), PE(pos, 2i+1) = cos(pos / base^(2i/D)).

    Each pair (sin, cos) is the hand of a clock; clock i takes 2π·base^(2i/D) positions for one turn, from 6 positions
    to 63,000. Moving k positions on turns every hand by a fixed angle, so PE(pos + k) is the same rotation of PE(pos)
    for every pos: "k places back" is one linear map, which attention can learn.
    An odd D has one more sine than cosines. Layout "halves" stores all sines, then all cosines, as Marian does.
    Vaswani et al. (2017), "Attention Is All You Need", section 3.5.

    >>> sinusoidal_positions(3, 4).round(2)
    array([[ 0.  ,  1.  ,  0.  ,  1.  ],
           [ 0.84,  0.54,  0.01,  1.  ],
           [ 0.91, -0.42,  0.02,  1.  ]])
    """
    sines = (dim + 1) // 2
    angles = np.arange(length)[:, None] * base ** (-2 * np.arange(sines) / max(dim, 1))  # length × sines
    if layout == "interleaved":
        at_sines, at_cosines = slice(0, None, 2), slice(1, None, 2)
    elif layout == "halves":
        at_sines, at_cosines = slice(0, sines), slice(sines, None)
    else:
        raise ValueError(f'layout is {layout!r}, but must be "interleaved" or "halves"')
    out = np.empty((length, dim))
    out[:, at_sines] = np.sin(angles)
    out[:, at_cosines] = np.cos(angles[:, : dim // 2])
    return out


def alibi_bias(heads: int, queries: int, keys: int) -> Float[np.ndarray, "{heads} {queries} {keys}"]:
    """−slope_h · |i − j|, added to the scores of head h.

    A key d positions away loses slope·d before the softmax, so its weight falls by exp(−slope·d). Heads with a small
    slope read far, heads with a large slope read near. The last query stands at the last key.
    Press, Smith & Lewis (2022), "Train Short, Test Long", section 3.

    >>> alibi_bias(2, 1, 4)[0, 0]                      # head 0 has slope 1/16; the query stands at key 3
    array([-0.1875, -0.125 , -0.0625, -0.    ])
    """
    if heads < 1:
        raise ValueError(f"alibi_bias needs at least one head, not {heads}")
    i = np.arange(queries)[:, None] + keys - queries
    j = np.arange(keys)
    return -np.array(alibi_slopes(heads))[:, None, None] * abs(i - j)


def alibi_slopes(heads: int) -> list[float]:
    """2^(−8h/H) for h = 1 … H if H is a power of two: 1/2, 1/4 … 1/256 for 8 heads.

    Otherwise the slopes of the next smaller power, then every other slope of the next larger one, as in the authors'
    code (github.com/ofirpress/attention_with_linear_biases, fairseq/models/transformer.py, get_slopes).
    """
    power = 2 ** int(log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
    return slopes + between[: heads - power]


def relative_bias(
    distance: Int[np.ndarray, "... T S"], table: Float[np.ndarray, "H N"], starts: Int[np.ndarray, "M"], mirrored: bool
) -> Float[np.ndarray, "... H T S"]:
    """table[h, bucket(j − i)], added to the scores of head h: T5's learned positions.

    A distance d falls into the last bucket whose `starts` is at most |d|. Near distances have a bucket each; far ones
    share buckets that grow like the logarithm. If `mirrored`, keys after the query have the second half of the table;
    otherwise they fall into the bucket of distance 0. Raffel et al. (2020), section 2.1.

    >>> i, j = np.arange(3)[:, None], np.arange(3)
    >>> relative_bias(j - i, np.arange(4.0)[None], starts=np.array([0, 2]), mirrored=True)[0]
    array([[0., 2., 3.],
           [0., 0., 2.],
           [1., 0., 0.]])
    """
    return np.moveaxis(table.T[relative_buckets(distance, starts, mirrored)], -1, -3)


def relative_bias_backward(
    d_out: Float[np.ndarray, "... H T S"],
    distance: Int[np.ndarray, "... T S"],
    table: Float[np.ndarray, "H N"],
    starts: Int[np.ndarray, "M"],
    mirrored: bool,
) -> Float[np.ndarray, "H N"]:
    """d_table: each number is the sum of the gradients of all scores that it was added to.

    A bucket of far distances is used by many pairs and gets a large gradient; the bucket of distance 0 is used T times.

    >>> i, j = np.arange(3)[:, None], np.arange(3)
    >>> relative_bias_backward(np.ones((1, 3, 3)), j - i, np.zeros((1, 4)), np.array([0, 2]), mirrored=True)
    array([[5., 1., 2., 1.]])
    """
    buckets = relative_buckets(distance, starts, mirrored)
    d_table = np.zeros_like(table.T)
    np.add.at(d_table, buckets, np.moveaxis(d_out, -3, -1))
    return d_table.T


def relative_buckets(
    distance: Int[np.ndarray, "..."], starts: Int[np.ndarray, "M"], mirrored: bool
) -> Int[np.ndarray, "..."]:
    """The bucket of each distance j − i.

    With buckets that start at distances 0, 1, 2 and 4, one direction only:

    >>> relative_buckets(np.array([0, -1, -3, -9, 5]), np.array([0, 1, 2, 4]), mirrored=False)
    array([0, 1, 2, 3, 0])
    """
    apart = abs(distance) if mirrored else np.maximum(-distance, 0)
    return np.searchsorted(starts, apart, side="right") - 1 + (distance > 0) * mirrored * len(starts)


def causal_mask(queries: int, keys: int | None = None) -> Bool[np.ndarray, "{queries} S"]:
    """j ≤ i + S − T: True where query i may read key j, its own position and the past.

    With more keys than queries (S > T) the queries are the last T positions, as in decoding with a KV cache:
    the last query reads the last key.

    causal_mask(3)        causal_mask(2, 4)
    ■ · ·                 ■ ■ ■ ·
    ■ ■ ·                 ■ ■ ■ ■
    ■ ■ ■

    >>> causal_mask(2, 3).astype(int)
    array([[1, 1, 0],
           [1, 1, 1]])
    """
    keys = queries if keys is None else keys
    i, j = np.arange(queries)[:, None], np.arange(keys)
    return j <= i + keys - queries
