"""Rotary positions: turn each pair of coordinates of a query or key by an angle that grows with its position."""

from typing import Any

import numpy as np
from jaxtyping import Float, Int, Real

from clearhead.configs import DualChunkConfig, RotaryConfig
from clearhead.reference.softmax import narrow, widen


def rotate(
    x: Float[np.ndarray, "... T K"],
    positions: Real[np.ndarray, "... #T"],
    *,
    theta: float = 10000.0,
    frequencies: Float[np.ndarray, "K//2"] | None = None,
    layout: str = "halves",
) -> Float[np.ndarray, "... T K"]:
    """(a, b) ↦ (a cos φ − b sin φ, a sin φ + b cos φ), φ = position · theta^(−2i/K) for pair i of K/2.

    Of two turned vectors, only the difference of the positions is left in the dot product.
    Pair i is coordinates (i, i + K/2) in layout "halves" (LLaMA as in transformers), (2i, 2i + 1) in "interleaved".
    positions is (T,), or broadcasts against the leading dimensions and T of x.
    Su et al. (2021), "RoFormer", equation 34.
    """
    check_rotary(x, positions, frequencies, layout)
    K = x.shape[-1]
    if frequencies is None:
        frequencies = theta ** (-np.arange(0, K, 2) / K)  # K/2
    angles = np.asarray(positions, np.float64)[..., None] * frequencies  # … T K/2
    wide = widen(x)
    cos, sin = np.cos(angles).astype(wide.dtype), np.sin(angles).astype(wide.dtype)
    first, second = pair_slices(K, layout)
    a, b = wide[..., first], wide[..., second]
    out = np.empty_like(wide)
    out[..., first] = a * cos - b * sin
    out[..., second] = a * sin + b * cos
    return narrow(out, x)


def rotate_backward(
    d_out: Float[np.ndarray, "... T K"],
    x: Float[np.ndarray, "... T K"],
    positions: Real[np.ndarray, "... #T"],
    *,
    theta: float = 10000.0,
    frequencies: Float[np.ndarray, "K//2"] | None = None,
    layout: str = "halves",
) -> Float[np.ndarray, "... T K"]:
    """The transpose of a rotation is the rotation back."""
    back = -np.asarray(positions, np.float64)
    return narrow(rotate(d_out, back, theta=theta, frequencies=frequencies, layout=layout), x)


def turn_by(
    config: RotaryConfig, x: Float[np.ndarray, "B H T K"], positions: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B H T K"]:
    """A layer's rotation: its own frequencies over its own part of the head, and its magnitude."""
    width = config.width(x.shape[-1])
    frequencies = config.frequencies(x.shape[-1])
    turned = rotate(x[..., :width], positions[:, None], frequencies=frequencies, layout=config.layout)
    return np.concatenate((turned * x.dtype.type(config.magnitude), x[..., width:]), -1)


def turn_queries(
    config: RotaryConfig | DualChunkConfig, q: Float[np.ndarray, "B H T K"], positions: Int[np.ndarray, "B T"]
) -> dict[str, Float[np.ndarray, "B H T K"]]:
    """Every kind of query that attention needs: one, or one for each distance of chunks."""
    if isinstance(config, RotaryConfig):
        return {"query_turned": turn_by(config, q, positions)}
    return {name: turn_by(config.rotary, q, place) for name, place in config.places(positions).items()}


def turn_keys(
    config: RotaryConfig | DualChunkConfig, k: Float[np.ndarray, "B G T K"], positions: Int[np.ndarray, "B T"]
) -> Float[np.ndarray, "B G T K"]:
    if isinstance(config, RotaryConfig):
        return turn_by(config, k, positions)
    return turn_by(config.rotary, k, positions % config.chunk)


def pair_slices(K: int, layout: str) -> tuple[slice, slice]:
    """Where the first and the second coordinates of the pairs are."""
    if layout == "halves":
        return slice(0, K // 2), slice(K // 2, K)
    return slice(0, K, 2), slice(1, K, 2)


def check_rotary(x: Any, positions: Any, frequencies: Any, layout: str) -> None:
    """One clear sentence for arguments that do not fit, in either engine."""
    if layout not in ("halves", "interleaved"):
        raise ValueError(f'layout is "halves" or "interleaved", not {layout!r}')
    if x.ndim < 2 or x.shape[-1] % 2:
        raise ValueError(f"rotate turns pairs, so x is (…, T, K) with K even, not {tuple(x.shape)}")
    if frequencies is not None and tuple(frequencies.shape) != (x.shape[-1] // 2,):
        raise ValueError(f"frequencies is one for each of {x.shape[-1] // 2} pairs, not {tuple(frequencies.shape)}")
    room = tuple(x.shape[:-1])
    fits = len(positions.shape) <= len(room) and all(
        size in (1, whole) for size, whole in zip(positions.shape[::-1], room[::-1], strict=False)
    )
    if not fits:
        raise ValueError(f"positions {tuple(positions.shape)} do not broadcast to (…, T) of x, {room}")
