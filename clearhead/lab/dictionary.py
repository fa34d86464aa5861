"""Attention as a soft dictionary lookup: as the temperature falls, the output approaches one value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from clearhead.functional.attention import attention, attention_scores

from .result import Result, Rows, require, tidy

COLUMNS = ("temperature", "top weight", "mean error", "largest error", "bound", "exact")


def dictionary(
    *,
    temperatures: Sequence[float] = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001),
    keys: int = 16,
    width: int = 32,
    draws: int = 512,
    seed: int = 0,
) -> Result:
    """Compare softmax(q·k/(τ√K))·v with the value of the best-matching key."""
    require(2, keys=keys)
    require(1, width=width, draws=draws)
    if min(temperatures) <= 0:
        raise ValueError(f"a temperature is {min(temperatures):g}, but must be above 0")
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(draws, n, width, generator=generator, dtype=torch.float64) for n in (1, keys, keys))
    scores = attention_scores(q, k)[:, 0]
    best = scores.argmax(-1)
    wanted = v[torch.arange(draws), best]
    first, second = scores.topk(2).values.T
    spread = (v - wanted[:, None]).abs().amax((1, 2))
    rows: Rows = []
    for temperature in sorted(temperatures, reverse=True):
        scale = width**-0.5 / temperature
        mixed, weights = attention(q, k, v, scale=scale, return_weights=True)
        error = (mixed[:, 0] - wanted).abs().amax(1)
        bound = (keys - 1) * (-(first - second) / temperature).exp() * spread
        exact = float((error == 0).double().mean())
        top = weights[:, 0].amax(-1).mean()
        rows.append((temperature, float(top), float(error.mean()), float(error.max()), float(bound.max()), exact))
    # with two equal keys the output is the mean of their values at any temperature
    twin = attention(q[:1], k[:1, [0, 0]], v[:1, :2], scale=width**-0.5 / min(temperatures))
    tie = float((twin[0, 0] - v[0, :2].mean(0)).abs().max())
    return Result(
        name="dictionary",
        claim="As the temperature falls to 0, softmax(q·k/τ)·v becomes v of the largest q·k: a dictionary lookup.",
        found=(
            f"At τ = {rows[-1][0]:g} the output is v_argmax to the bit in {rows[-1][5]:.1%} of {draws} lookups, off "
            f"by {rows[-1][2]:.1e} on average; the error stays below (keys − 1)·e^(−gap/τ)·|v − v_best|. The claim "
            f"fails for a tie: with two equal keys the output is the mean of their values at any τ (to {tie:.0e}), "
            f"and a near tie needs a τ below its gap, which was {float((first - second).min()):.1e} at the smallest."
        ),
        columns=COLUMNS,
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows, keys),
        more={"tie_error": tie, "smallest_gap": float((first - second).min())},
    )


def draw(picture: Any, rows: list[Any], keys: int) -> None:
    picture.suptitle(f"Attention over {keys} keys becomes a lookup as the temperature falls")
    left, right = picture.subplots(1, 2)
    temperature, top, mean, largest, bound, exact = zip(*rows, strict=True)
    left.semilogx(temperature, top, "o-", label="largest weight, mean")
    left.semilogx(temperature, exact, "s--", label="share of lookups exact to the bit")
    left.set(xlabel="temperature τ", ylabel="share", title="how sharp", ylim=(-0.03, 1.25))
    for values, line, label in (
        (mean, "o-", "mean"),
        (largest, "s--", "largest"),
        (bound, ":", "bound on the largest"),
    ):
        right.loglog(temperature, [max(value, 1e-17) for value in values], line, label=label)
    right.set(xlabel="temperature τ", ylabel="largest |output − v_argmax| of a lookup", title="how far from the lookup")
    left.legend(frameon=False, loc="upper left")
    for axis in (left, right):
        axis.invert_xaxis()
    tidy(left, right)
