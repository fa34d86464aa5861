"""Rotary position embedding (RoPE): rotate each pair of coordinates of a query or key by an angle ∝ its position.

    (a, b)  ↦  (a cos φ − b sin φ, a sin φ + b cos φ)         φ = position · frequency of the pair

A rotation by m of q and by n of k leaves the dot product depending on m − n only: (R_m q)·(R_n k) = q·(R_{n−m} k).
So scores know relative positions although only absolute ones were used, and nothing has to be learned. Fast pairs tell
neighbours apart, slow pairs tell the beginning of a text from its end. Values are never rotated.

Why a rotation. We want the score of a query at position m and a key at position n to depend on n − m only. Take two
coordinates as one complex number. Multiplying q by e^(imφ) and k by e^(inφ) turns their product q·k̄ into
q·k̄·e^(i(m−n)φ): only the difference is left. K/2 such pairs, each with its own φ, are K/2 clocks that run at different
speeds, from one radian per position down to one radian per 10,000.

    pair i       0        K/8      K/4      3K/8     K/2 − 1
    frequency    1        0.1      0.01     0.001    0.0001         θ = 10,000
    turn         6        63       628      6,283    62,832         positions for one full turn

Ways to scale the clocks for a context that is s times longer:

    linear      every frequency / s                      neighbours differ less; needs some training
    NTK         θ · s^(K/(K − 2))                        slow clocks / s, fast clocks unchanged
    YaRN        between the two, pair by pair            unchanged if a clock turned often in training, / s if it never
                                                         completed a turn, a ramp between; and a magnitude for softmax
    Llama 3     the same idea with wavelength limits     unchanged below context/4, / s above context
    dynamic     NTK with s = length/context              only once the text is longer than the trained context
    LongRoPE    a factor for every pair, searched        one set for short texts, one for long

Longer contexts than the model was trained on show the slow clocks angles they have never shown. Scaling (linear, NTK,
YaRN, Llama 3: see `configs/rotary.py`) slows the clocks so that every angle stays within what was trained. θ itself is
larger in newer models, 500,000 in Llama 3.

By hand, one pair with frequency 1. A query (1, 0) at position 2 becomes (cos 2, sin 2) = (−0.42, 0.91). A key (1, 0) at
position 1 becomes (0.54, 0.84). Their dot product is −0.42·0.54 + 0.91·0.84 = 0.54 = cos(2 − 1): the distance is left.

What a head can learn with it. A score is a sum of K/2 cosines of the distance, with amplitudes |q_i||k_i| and phases
that the projections choose. A head that uses fast pairs can peak at "one token back"; a head that uses slow pairs only
hardly notices position and matches content. Both kinds are found in trained models.

Rotation and length. The larger K, the more clocks; the larger θ, the slower the slowest. A context of n positions needs
clocks that turn slower than n: with θ = 10,000 the slowest takes 62,832 positions, so 2,048 are well covered, and at
100,000 even the slowest clock comes round.

Compared with adding positions to the input (`positions.py`): a rotation acts in every layer, on queries and keys only,
and leaves the residual stream and the values free of position. Nothing is learned, so nothing is untrained at a
position that never occurred; but the angles there are new, and a model has to be trained, or scaled, for them.

What is rotated: queries and keys, after their projection and norm, before the scores. Keys are rotated once and cached
in rotated form. Lengths do not change, so the size of scores stays what it was.

Mistakes that run without an error:

    the other layout       "halves" for "interleaved": a model loads and writes nonsense after a few tokens
    the other direction    −φ for φ: works alone, but disagrees with every checkpoint
    rotated values         positions leak into what is copied
    positions from 0       in decoding, where a query continues at position S: all distances are wrong
    angles in float32      long contexts lose the fast clocks: 100,000 · 1 mod 2π needs more digits than it has
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int, Real

from clearhead.configs import DualChunkConfig, QueryScaleConfig, RotaryConfig
from clearhead.reference.checks import check_gradient
from clearhead.reference.softmax import narrow, widen


def rotate(
    x: Float[np.ndarray, "... T K"],
    positions: Real[np.ndarray, "... #T"],
    *,
    theta: float = 10000.0,
    frequencies: Float[np.ndarray, "K//2"] | None = None,
    layout: str = "halves",
) -> Float[np.ndarray, "... T K"]:
    """Rotate pair i of each vector by φ = position · theta^(−2i/K), or by position · frequencies[i].

    Pair i is coordinates (i, i + K/2) in layout "halves" (LLaMA as in transformers), (2i, 2i + 1) in "interleaved"
    (LLaMA as released, GPT-J). The two differ by a permutation of the weights, so checkpoints of either kind load.
    positions is (T,), or broadcasts against the leading dimensions and T of x.
    Su et al. (2021), "RoFormer", equation 34.

    A quarter turn: the pair (1, 0) at an angle of π/2 becomes (0, 1).

    >>> rotate(np.array([[1.0, 0.0]]), np.array([np.pi / 2])).round(6)
    array([[0., 1.]])

    Scores depend on the distance alone: positions (2, 5) and (12, 15) give the same dot product.

    >>> q, k = np.array([[0.3, 0.8, -0.5, 0.1]]), np.array([[0.9, -0.2, 0.4, 0.7]])
    >>> near, far = ((rotate(q, np.array([m])) * rotate(k, np.array([m + 3]))).sum() for m in (2.0, 12.0))
    >>> bool(np.isclose(near, far))
    True
    """
    check_rotary(x, positions, frequencies, layout)
    K = x.shape[-1]
    if frequencies is None:
        frequencies = theta ** (-np.arange(0, K, 2) / K)  # K/2
    # In float64: position 100,000 times frequency 1 has no digit left after the point in float32.
    angles = np.asarray(positions, np.float64)[..., None] * frequencies  # … T K/2
    return rotate_by(x, np.cos(angles), np.sin(angles), layout=layout)


def rotate_backward(
    d_out: Float[np.ndarray, "... T K"],
    x: Float[np.ndarray, "... T K"],
    positions: Real[np.ndarray, "... #T"],
    *,
    theta: float = 10000.0,
    frequencies: Float[np.ndarray, "K//2"] | None = None,
    layout: str = "halves",
) -> Float[np.ndarray, "... T K"]:
    """Rotate d_out back: a rotation matrix is orthogonal, so its transpose is its inverse.

    For one pair: the matrix (c −s; s c) has the transpose (c s; −s c), which is the rotation by −φ.
    So lengths of gradients do not change either: rotary positions can neither amplify nor damp what is learned.

    >>> x = np.array([[1.0, 0.0]])
    >>> rotate_backward(rotate(x, np.array([3.0])), x, np.array([3.0])).round(6)  # turned back
    array([[1., 0.]])
    """
    check_rotary(x, positions, frequencies, layout)
    check_gradient(d_out, *x.shape)
    back = -np.asarray(positions, np.float64)
    return narrow(rotate(d_out, back, theta=theta, frequencies=frequencies, layout=layout), x)


def rotate_by(
    x: Float[np.ndarray, "... T K"],
    cos: Float[np.ndarray, "... #T K//2"],
    sin: Float[np.ndarray, "... #T K//2"],
    *,
    layout: str = "halves",
) -> Float[np.ndarray, "... T K"]:
    """Rotate each pair by an angle whose cosine and sine are given: for tables that were computed once.

    cos and sin have one number for each of the K/2 pairs and broadcast to x: (T, K/2) serves all batches and heads.

    In a model the table is computed once per pass and used by 2·layers rotations. Multimodal models make tables from
    two or three coordinates (row, column, time), a share of the pairs for each.

    >>> turn = np.array([[0.0]]), np.array([[1.0]])                 # cos and sin of a quarter turn
    >>> rotate_by(np.array([[3.0, 4.0]]), *turn)
    array([[-4.,  3.]])
    """
    check_angles(x, cos, sin, layout)
    wide = widen(x)
    cos, sin = cos.astype(wide.dtype), sin.astype(wide.dtype)
    first, second = pair_slices(x.shape[-1], layout)
    a, b = wide[..., first], wide[..., second]
    out = np.empty_like(wide)
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return narrow(out, x)


def rotate_by_backward(
    d_out: Float[np.ndarray, "... T K"],
    x: Float[np.ndarray, "... T K"],
    cos: Float[np.ndarray, "... #T K//2"],
    sin: Float[np.ndarray, "... #T K//2"],
    *,
    layout: str = "halves",
) -> tuple[Float[np.ndarray, "... T K"], Float[np.ndarray, "..."], Float[np.ndarray, "..."]]:
    """d_x, d_cos, d_sin. x is rotated back; with (p, q) = d_out of a pair (a, b): d_cos = a·p + b·q, d_sin = a·q − b·p.

    The last two are summed over every axis along which cos and sin were repeated.

    Derivation: out = (a·c − b·s, a·s + b·c). Its derivative by c is (a, b) and by s it is (−b, a); multiply by (p, q)
    and add. Nobody trains the angles of a fixed table. The gradient is here for learned frequencies and for the tests.

    >>> cos, sin = np.array([[0.0]]), np.array([[1.0]])
    >>> rotate_by_backward(np.array([[0.0, 1.0]]), np.array([[1.0, 0.0]]), cos, sin)[0]  # turned back
    array([[1., 0.]])
    """
    check_angles(x, cos, sin, layout)
    check_gradient(d_out, *x.shape)
    first, second = pair_slices(x.shape[-1], layout)
    a, b, p, q = x[..., first], x[..., second], d_out[..., first], d_out[..., second]
    d_cos, d_sin = _sum_repeated(a * p + b * q, cos), _sum_repeated(a * q - b * p, sin)
    return narrow(rotate_by(d_out, cos, -sin, layout=layout), x), d_cos, d_sin


def _sum_repeated(d_x: Float[np.ndarray, "..."], x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The backward of broadcasting: sum over the axes along which x was repeated.

    cos and sin are used by every head and row, so their gradients are sums over them.
    (B, H, T, K/2) becomes (T, K/2): first the axes that x lacks are summed, then those where it has length 1.
    """
    d_x = d_x.sum(tuple(range(d_x.ndim - x.ndim)))
    return narrow(d_x.sum(tuple(axis for axis in range(x.ndim) if x.shape[axis] == 1), keepdims=True), x)


def apply_rotary(
    config: RotaryConfig, x: Float[np.ndarray, "B H T K"], positions: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B H T K"]:
    """A layer's rotation: its frequencies (scaled for long contexts), its share of the head, YaRN's magnitude.

    Partial rotation: GPT-NeoX rotates a quarter of each head and leaves the rest free of position, so that some
    coordinates can match content at any distance. YaRN multiplies what is rotated by a magnitude slightly above 1,
    which sharpens the softmax over very long contexts.

    A head of GPT-NeoX-20B in numbers: K = 96, of which 24 coordinates, 12 pairs, are rotated and 72 are not.
    Frequencies are those of a head of width 24, so they span the same range in fewer steps.
    """
    width = config.width(x.shape[-1])  # the first `width` coordinates; some models leave the rest unrotated
    frequencies = config.frequencies(x.shape[-1], int(positions.max(initial=0)) + 1)  # the length matters to a few
    rotated = rotate(x[..., :width], positions[:, None], frequencies=frequencies, layout=config.layout)
    return np.concatenate((rotated * x.dtype.type(config.magnitude), x[..., width:]), -1)


def rotary_queries(
    config: RotaryConfig | DualChunkConfig | QueryScaleConfig,
    q: Float[np.ndarray, "B H T K"],
    positions: Int[np.ndarray, "B T"],
) -> dict[str, Float[np.ndarray, "B H T K"]]:
    """The rotated queries by name: one, or three for dual chunk attention.

    Dual chunk attention keeps every distance within the trained context: keys are rotated by their position within
    their chunk, and a query is rotated differently for its own chunk, the chunk before, and all older chunks.

    By hand, chunks of 4: a query at position 9 is in chunk 2, at place 1. Its own chunk's keys are at places 0 and 1,
    so distances are exact. For the chunk before it is rotated as 1 + 4 = 5: position 7 is at place 3, and 5 − 3 = 2 is
    exact too. For older chunks it is rotated as if it stood at the end of the trained context: they are far away.
    An et al. (2024), "Training-Free Long-Context Scaling of Large Language Models".

    Llama 4's layers without rotation scale their queries instead. Over more keys a softmax gets flatter: one key of
    score 5 among 1,000 of score 0 has the weight 0.13, among 100,000 it has 0.0015. Longer queries undo that.
    """
    if isinstance(config, QueryScaleConfig):  # longer queries for a softmax over more keys (Llama 4)
        scale = 1 + config.strength * np.log1p((positions + 1) // config.every)
        return {"query_rotated": q * scale[:, None, :, None].astype(q.dtype)}
    if isinstance(config, RotaryConfig):
        return {"query_rotated": apply_rotary(config, q, positions)}
    return {name: apply_rotary(config.rotary, q, place) for name, place in config.places(positions).items()}


def rotary_keys(
    config: RotaryConfig | DualChunkConfig | QueryScaleConfig,
    k: Float[np.ndarray, "B G T K"],
    positions: Int[np.ndarray, "B T"],
) -> Float[np.ndarray, "B G T K"]:
    """The rotated keys; dual chunk attention counts positions within each chunk.

    The cache holds what this returns. A key is rotated once, when its token arrives, and never again.
    """
    if isinstance(config, QueryScaleConfig):
        return k
    if isinstance(config, RotaryConfig):
        return apply_rotary(config, k, positions)
    return apply_rotary(config.rotary, k, positions % config.chunk)


def pair_slices(K: int, layout: str) -> tuple[slice, slice]:
    """Where the first and the second coordinates of the pairs are.

    A checkpoint in one layout is converted to the other by permuting the rows of W_q and W_k once. Scores stay the
    same, because a dot product does not depend on the order of coordinates.

    >>> pair_slices(6, "halves"), pair_slices(6, "interleaved")
    ((slice(0, 3, None), slice(3, 6, None)), (slice(0, 6, 2), slice(1, 6, 2)))
    """
    if layout == "halves":
        return slice(0, K // 2), slice(K // 2, K)
    return slice(0, K, 2), slice(1, K, 2)


def check_rotary(x: Any, positions: Any, frequencies: Any, layout: str) -> None:
    """Raise one clear sentence for arguments that do not fit, in either engine."""
    if layout not in ("halves", "interleaved"):
        raise ValueError(f'layout is {layout!r}, but must be "halves" or "interleaved"')
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ValueError(f"rotate turns pairs of coordinates: x must be (…, T, K) with K even, not {tuple(x.shape)}")
    pairs, lead = x.shape[-1] // 2, tuple(x.shape[:-1])
    if frequencies is not None and tuple(frequencies.shape) != (pairs,):
        raise ValueError(f"frequencies is {tuple(frequencies.shape)}, but must have one for each of {pairs} pairs")
    fits = len(positions.shape) <= len(lead) and all(
        size in (1, whole) for size, whole in zip(positions.shape[::-1], lead[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"positions {tuple(positions.shape)} do not broadcast to (…, T) of x, {lead}")


def check_angles(x: Any, cos: Any, sin: Any, layout: str) -> None:
    """Raise one clear sentence for cosines and sines that do not fit x, in either engine.

    Broadcasting would accept a table of width 1 and rotate all pairs by one angle, without a word.
    """
    if layout not in ("halves", "interleaved"):
        raise ValueError(f'layout is {layout!r}, but must be "halves" or "interleaved"')
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ValueError(f"rotate turns pairs of coordinates: x must be (…, T, K) with K even, not {tuple(x.shape)}")
    wanted = (*tuple(x.shape[:-1]), x.shape[-1] // 2)
    for name, table in {"cos": cos, "sin": sin}.items():
        fits = len(table.shape) <= len(wanted) and all(
            size in (1, whole) for size, whole in zip(tuple(table.shape)[::-1], wanted[::-1], strict=False)
        )
        if not fits or not len(table.shape) or table.shape[-1] != wanted[-1]:
            raise ValueError(f"{name} is {tuple(table.shape)}, but must broadcast to {wanted}: one for each pair of x")
