"""Rotary position embedding (RoPE): rotate each pair of coordinates of a query or key by an angle ∝ its position.

    (a, b)  ↦  (a cos φ − b sin φ, a sin φ + b cos φ)         φ = position · frequency of the pair

A rotation by m of q and by n of k leaves the dot product depending on m − n only: (R_m q)·(R_n k) = q·(R_{n−m} k).
So scores know relative positions although only absolute ones were used, and nothing has to be learned. Fast pairs tell
neighbours apart, slow pairs tell the beginning of a text from its end. Values are never rotated.
"""

from typing import Any

import numpy as np
from jaxtyping import Float, Int, Real

from clearhead.configs import DualChunkConfig, RotaryConfig
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
    """Rotate d_out back: a rotation matrix is orthogonal, so its transpose is its inverse."""
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
    """
    check_angles(x, cos, sin, layout)
    check_gradient(d_out, *x.shape)
    first, second = pair_slices(x.shape[-1], layout)
    a, b, p, q = x[..., first], x[..., second], d_out[..., first], d_out[..., second]
    d_cos, d_sin = _sum_repeated(a * p + b * q, cos), _sum_repeated(a * q - b * p, sin)
    return narrow(rotate_by(d_out, cos, -sin, layout=layout), x), d_cos, d_sin


def _sum_repeated(d_x: Float[np.ndarray, "..."], x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The backward of broadcasting: sum over the axes along which x was repeated."""
    d_x = d_x.sum(tuple(range(d_x.ndim - x.ndim)))
    return narrow(d_x.sum(tuple(axis for axis in range(x.ndim) if x.shape[axis] == 1), keepdims=True), x)


def apply_rotary(
    config: RotaryConfig, x: Float[np.ndarray, "B H T K"], positions: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B H T K"]:
    """A layer's rotation: its frequencies (scaled for long contexts), its share of the head, YaRN's magnitude."""
    width = config.width(x.shape[-1])  # the first `width` coordinates; some models leave the rest unrotated
    frequencies = config.frequencies(x.shape[-1], int(positions.max(initial=0)) + 1)  # the length matters to a few
    rotated = rotate(x[..., :width], positions[:, None], frequencies=frequencies, layout=config.layout)
    return np.concatenate((rotated * x.dtype.type(config.magnitude), x[..., width:]), -1)


def rotary_queries(
    config: RotaryConfig | DualChunkConfig, q: Float[np.ndarray, "B H T K"], positions: Int[np.ndarray, "B T"]
) -> dict[str, Float[np.ndarray, "B H T K"]]:
    """The rotated queries by name: one, or three for dual chunk attention.

    Dual chunk attention keeps every distance within the trained context: keys are rotated by their position within
    their chunk, and a query is rotated differently for its own chunk, the chunk before, and all older chunks.
    """
    if isinstance(config, RotaryConfig):
        return {"query_rotated": apply_rotary(config, q, positions)}
    return {name: apply_rotary(config.rotary, q, place) for name, place in config.places(positions).items()}


def rotary_keys(
    config: RotaryConfig | DualChunkConfig, k: Float[np.ndarray, "B G T K"], positions: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B G T K"]:
    """The rotated keys; dual chunk attention counts positions within each chunk."""
    if isinstance(config, RotaryConfig):
        return apply_rotary(config, k, positions)
    return apply_rotary(config.rotary, k, positions % config.chunk)


def pair_slices(K: int, layout: str) -> tuple[slice, slice]:
    """Where the first and the second coordinates of the pairs are."""
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
    """Raise one clear sentence for cosines and sines that do not fit x, in either engine."""
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
