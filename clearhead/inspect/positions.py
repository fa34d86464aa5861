"""Plot position encodings: compute the numbers of each figure and draw it. Needs only NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.configs import LinearScaling, Llama3Scaling, NTKScaling, RotaryConfig, YarnScaling
from clearhead.reference.positions import alibi_bias, alibi_slopes, sinusoidal_positions

from .plotting import DIVERGING, SEQUENTIAL, colours, figure, heat, save

SIZES = {
    "length": (2, 1 << 16),
    "dim": (8, 1 << 12),
    "step": (1, 1 << 16),
    "heads": (1, 1 << 10),
    "trained": (2, 1 << 40),
}
"""The smallest and largest allowed values; a picture has no room for more."""
NAMED = 16  # maximum number of labelled lines in a picture
PAIRED = 1 << 10  # maximum number of positions in a pairwise table


@dataclass(frozen=True, kw_only=True)
class Positions:
    """What to draw: the sizes of the encoding and of the rotary heads, and the rotary scaling."""

    length: int = 100
    dim: int = 64  # width of the sinusoids and of a rotary head
    base: float = 10000.0  # base of the sinusoids, and rotary's θ
    step: int = 5  # k in the rotation from pos to pos + k
    heads: int = 8  # ALiBi's heads
    factor: float = 8.0  # rotary scaling factor
    trained: int = 4096  # context length in training
    theme: str = "light"

    def __post_init__(self) -> None:
        for name, (least, most) in SIZES.items():
            if not least <= getattr(self, name) <= most:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be from {least:,} to {most:,}")
        if self.dim % 2:
            raise ValueError(f"dim is {self.dim}, but must be even: dimensions come in pairs")
        if not (1 < self.base < math.inf and 1 <= self.factor < math.inf):
            raise ValueError(f"base must be above 1 and factor at least 1, not {self.base} and {self.factor}")

    @property
    def table(self) -> Float[np.ndarray, "T D"]:
        return sinusoidal_positions(self.length, self.dim, self.base)


def rotation(dim: int, step: int, base: float = 10000.0) -> Float[np.ndarray, "{dim} {dim}"]:
    """R with R·PE(pos) = PE(pos + step) for every pos: rotates each pair of dimensions (Vaswani et al. 2017, 3.5)."""
    angles = step * base ** (-np.arange(0, dim, 2) / dim)
    turn, sines, cosines = np.zeros((dim, dim)), np.arange(0, dim, 2), np.arange(1, dim, 2)
    turn[sines, sines] = turn[cosines, cosines] = np.cos(angles)
    turn[sines, cosines], turn[cosines, sines] = np.sin(angles), -np.sin(angles)
    return turn


def products(distances: Float[np.ndarray, "N"], dim: int, base: float = 10000.0) -> Float[np.ndarray, "N"]:
    """PE(pos)·PE(pos + k) = Σᵢ cos(k·ωᵢ), for any pos and each distance k."""
    return np.cos(np.outer(distances, base ** (-np.arange(0, dim, 2) / dim))).sum(1)


def rotaries(asked: Positions) -> dict[str, RotaryConfig]:
    """Return plain rotary positions, and those scaled by `factor` with each of the four methods."""
    scalings = {
        "plain": None,
        "linear": LinearScaling(factor=asked.factor),
        "NTK": NTKScaling(factor=asked.factor),
        "Llama 3": Llama3Scaling(factor=asked.factor, length=asked.trained),
        "YaRN": YarnScaling(factor=asked.factor, length=asked.trained),
    }
    return {name: RotaryConfig(theta=asked.base, scaling=scaling) for name, scaling in scalings.items()}


def wavelengths(asked: Positions) -> dict[str, Float[np.ndarray, "Pairs"]]:
    """Return the wavelength of each pair: the number of positions in one full turn."""
    return {name: 2 * np.pi / config.frequencies(asked.dim) for name, config in rotaries(asked).items()}


def numbers(asked: Positions) -> dict[str, Any]:
    """Return the numbers behind the figures."""
    table = sinusoidal_positions(asked.length + asked.step, asked.dim, asked.base)
    moved = table[: asked.length] @ rotation(asked.dim, asked.step, asked.base).T
    far = np.arange(asked.length, dtype=np.float64)
    return {
        "sinusoidal": {
            "wavelengths": (2 * np.pi * asked.base ** (np.arange(0, asked.dim, 2) / asked.dim)).tolist(),
            "products": products(far, asked.dim, asked.base).tolist(),
            "rotation_error": float(abs(moved - table[asked.step :]).max()),
        },
        "rotary": {name: waves.tolist() for name, waves in wavelengths(asked).items()},
        "alibi": alibi_slopes(asked.heads),
    }


# ---- the figures


def draw_curves(picture: Any, asked: Positions) -> None:
    """Draw the first 8 dimensions, with a panel for each pair of sine and cosine."""
    picture.suptitle(f"Sinusoidal positions: the first 8 of {asked.dim} dimensions")
    at = np.linspace(0, asked.length - 1, 8 * asked.length)
    first, second = colours(asked.theme)[:2]
    for pair, axis in enumerate(picture.subplots(4, 1, sharex=True, sharey=True)):
        frequency = asked.base ** (-2 * pair / asked.dim)
        for name, wave, dim, colour, line in (("sin", np.sin, 0, first, "-"), ("cos", np.cos, 1, second, "--")):
            axis.plot(at, wave(at * frequency), line, color=colour, linewidth=1.2)
            axis.plot(asked.table[:, 2 * pair + dim], ".", color=colour, markersize=3)
            axis.plot([], [], line, marker=".", color=colour, label=f"dim {2 * pair + dim}: {name}")
        axis.set_title(f"round in {2 * np.pi / frequency:.1f} positions", fontsize=8, loc="left")
        axis.grid(alpha=0.4)
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)
        axis.set_ylabel("PE")
    axis.set_xlabel("position")


def draw_table(picture: Any, asked: Positions) -> None:
    """Draw every position's vector as a row of colours."""
    axis = picture.subplots()
    image = heat(axis, asked.table, -1, 1, DIVERGING)
    axis.set(xlabel="dimension", ylabel="position", title=f"Sinusoidal positions, base {asked.base:g}")
    picture.colorbar(image, ax=axis, label="PE(pos, dim)")


def draw_products(picture: Any, asked: Positions) -> None:
    """Draw PE(a)·PE(b) by a and b, and by their distance alone."""
    picture.suptitle("Dot products of sinusoidal positions depend on the distance alone")
    left, right = picture.subplots(1, 2, width_ratios=(1, 1.25))
    step = -(-asked.length // PAIRED)
    table = asked.table[::step]
    cosines = table @ table.T / (asked.dim / 2)
    image = heat(left, cosines, float(cosines.min()), 1)
    for axis in (left.xaxis, left.yaxis):
        axis.set_major_formatter(lambda place, _: f"{step * place:g}")
    left.set(xlabel="position b", ylabel="position a", title=f"{asked.dim} dimensions", box_aspect=1)
    picture.colorbar(image, ax=left, label="PE(a)·PE(b) / (D/2)", shrink=0.8)
    far = np.arange(-asked.length + 1, asked.length, dtype=np.float64)
    styles = ("-", "--", "-.", ":")
    for dim, line in zip(sorted({16, asked.dim, 128, 512}), styles, strict=False):
        right.plot(far, products(far, dim, asked.base) / (dim / 2), line, label=f"D = {dim}", linewidth=1.4)
    right.set(xlabel="distance b − a (positions)", ylabel="PE(a)·PE(b) / (D/2)", title="by distance")
    right.grid(alpha=0.4)
    right.legend(frameon=False)


def draw_rotation(picture: Any, asked: Positions) -> None:
    """Draw the matrix that shifts every position by k, and each pair's rotation as a clock hand."""
    k, turn = asked.step, rotation(asked.dim, asked.step, asked.base)
    error = numbers(asked)["sinusoidal"]["rotation_error"]
    picture.suptitle(f"PE(pos + {k}) = R·PE(pos), one rotation R for every position   (largest error {error:.0e})")
    left, right = picture.subplots(1, 2, width_ratios=(1.25, 1))
    shown = min(asked.dim, 32)
    image = heat(left, turn[:shown, :shown], -1, 1, DIVERGING)
    of = "" if shown == asked.dim else f", first {shown} of {asked.dim} dimensions"
    left.set(xlabel="dimension of PE(pos)", ylabel=f"dimension of PE(pos + {k})", title=f"R{of}", box_aspect=1)
    picture.colorbar(image, ax=left, label="weight", shrink=0.8)
    pairs = range(0, min(asked.dim // 2, 16), 4)
    for row, (pair, colour) in enumerate(zip(pairs, colours(asked.theme), strict=False)):
        frequency = asked.base ** (-2 * pair / asked.dim)
        radius = 1 - 0.2 * row
        arc = np.linspace(0, k * frequency, 64)
        right.plot(radius * np.sin(arc), radius * np.cos(arc), color=colour, linewidth=2.4)
        right.annotate(
            "",
            (radius * np.sin(arc[-1]), radius * np.cos(arc[-1])),
            (radius * np.sin(arc[-2]), radius * np.cos(arc[-2])),
            arrowprops={"arrowstyle": "-|>", "color": colour},
        )
        right.plot(0, radius, "o", color=colour, label=f"dims {2 * pair}, {2 * pair + 1}: {k * frequency:.2f} rad")
    right.set(xlim=(-1.15, 1.15), ylim=(-1.15, 1.15), xticks=[], yticks=[], box_aspect=1)
    right.set(title=f"how far a pair turns in {k} positions")
    right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.02), fontsize=8)


def draw_rotary(picture: Any, asked: Positions) -> None:
    """Draw each pair's wavelength, plain and scaled, and how scores decay with distance."""
    picture.suptitle(f"Rotary positions: heads of {asked.dim}, θ = {asked.base:g}, stretched ×{asked.factor:g}")
    left, right = picture.subplots(1, 2)
    far = np.geomspace(1, asked.trained * asked.factor, 150)
    around = far[:, None] * np.linspace(0.8, 1.25, 41)  # average over nearby distances; a single distance is too noisy
    lines = ("-", "--", "-.", ":", (0, (1, 1)))
    for (name, config), line in zip(rotaries(asked).items(), lines, strict=True):
        frequencies = config.frequencies(asked.dim)
        left.semilogy(2 * np.pi / frequencies, linestyle=line, linewidth=1.6, label=name)
        left_over = np.cos(around[..., None] * frequencies).mean((1, 2))
        right.semilogx(far, left_over, linestyle=line, linewidth=1.6, label=name)
    left.axhline(asked.trained, color="gray", linewidth=0.8)
    left.text(0, asked.trained * 1.15, f"trained length, {asked.trained:,}", fontsize=8, color="gray")
    left.set(xlabel="pair of dimensions", ylabel="wavelength (positions)", title="how long a pair takes to go round")
    right.set(xlabel="distance (positions)", ylabel="mean of cos(distance·ω)", title="what is left of q·k, for q = k")
    for axis in (left, right):
        axis.grid(alpha=0.4)
        axis.legend(frameon=False)


def draw_alibi(picture: Any, asked: Positions) -> None:
    """Draw the penalty of each head by distance, and the penalty matrix of one head."""
    picture.suptitle(f"ALiBi: −slope·distance on the scores of {asked.heads} heads")
    left, right = picture.subplots(1, 2, width_ratios=(1.25, 1))
    slopes, far = alibi_slopes(asked.heads), np.arange(asked.length)
    from matplotlib import colormaps

    shades = np.linspace(0, 0.85, asked.heads) if asked.theme == "light" else np.linspace(0.3, 1, asked.heads)
    for head, slope in enumerate(slopes):
        left.semilogy(far[1:], slope * far[1:], color=colormaps[SEQUENTIAL](shades[head]), linewidth=1.6)
        if head % -(-asked.heads // NAMED) == 0:
            left.annotate(f"head {head}: slope {slope:.3g}", (far[-1], slope * far[-1]), fontsize=7, va="center",
                          xytext=(4, 0), textcoords="offset points", annotation_clip=False)  # fmt: skip
    left.set(xlabel="distance (positions)", ylabel="subtracted from the score", xlim=(0, 1.3 * asked.length))
    left.set(title="every head has its own idea of far")
    left.grid(alpha=0.4)
    length, head = min(asked.length, 48), asked.heads // 2
    bias = alibi_bias(asked.heads, length, length)[head]
    seen = np.where(np.tril(np.ones_like(bias)) > 0, bias, np.nan)
    image = heat(right, seen, float(np.nanmin(seen)) or -1.0, 0, SEQUENTIAL)
    right.set(xlabel="key position", ylabel="query position", title=f"head {head}, causal", box_aspect=1)
    picture.colorbar(image, ax=right, label="added to the score", shrink=0.8)


FIGURES: dict[str, tuple[Callable[[Any, Positions], None], tuple[float, float]]] = {
    "curves": (draw_curves, (8, 6)),
    "table": (draw_table, (7.5, 5)),
    "products": (draw_products, (10, 4.4)),
    "rotation": (draw_rotation, (9.6, 5.2)),
    "rotary": (draw_rotary, (10.5, 4.4)),
    "alibi": (draw_alibi, (10.5, 4.4)),
}
"""Each figure by name: the function that draws it, and its size in inches."""


def draw_positions(name: str, path: str | Path, asked: Positions = Positions()) -> None:
    """Draw one of `FIGURES`. The file's suffix sets the format."""
    if name not in FIGURES:
        raise ValueError(f"there is no figure {name!r}; there are {', '.join(FIGURES)}")
    draw, size = FIGURES[name]
    with figure(*size, theme=asked.theme) as picture:
        draw(picture, asked)
        save(picture, path)
