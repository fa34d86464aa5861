"""Why scores are divided by √K: the variance of q·k, and the gradient that softmax lets through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.functional.attention import attention_scores, attention_weights

from .result import Result, Rows, require, tidy


def scores(
    *, widths: Sequence[int] = (4, 16, 64, 256, 1024), keys: int = 64, draws: int = 4096, seed: int = 0
) -> Result:
    """Compare scores of random normal queries and keys with and without the scale 1/√d_k."""
    require(1, widths=widths)
    require(2, keys=keys, draws=draws)
    generator = torch.Generator().manual_seed(seed)
    rows: Rows = []
    for width in widths:
        q = torch.randn(draws, 1, width, generator=generator)
        k = torch.randn(draws, keys, width, generator=generator)
        plain, scaled = attention_scores(q, k, scale=1.0), attention_scores(q, k)
        aligned = attention_scores(q, q).mean()
        left = [jacobian_norm(attention_weights(s)).mean() for s in (plain, scaled)]
        largest = [attention_weights(s).amax(-1).mean() for s in (plain, scaled)]
        numbers = (plain.var(), scaled.var(), *largest, *left, aligned)
        rows.append((width, *map(float, numbers)))
    return Result(
        name="scores",
        claim="q·k of independent unit numbers has variance d_k, q·k/√d_k has variance 1, so softmax keeps a gradient.",
        found=summarize(rows),
        columns=(
            "d_k",
            "var q·k",
            "var scaled",
            "top weight",
            "top scaled",
            "‖∂softmax‖",
            "‖∂softmax‖ scaled",
            "scaled q·q",
        ),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows, keys),
    )


def jacobian_norm(p: Float[Tensor, "... S"]) -> Float[Tensor, "..."]:
    """‖diag(p) − ppᵀ‖ of the softmax that gave p: √(Σp² − 2Σp³ + (Σp²)²), without the matrix."""
    squares = p.square().sum(-1)
    return (squares - 2 * p.pow(3).sum(-1) + squares.square()).clamp_min(0).sqrt()


def summarize(rows: list[Any]) -> str:
    off = max(abs(row[1] / row[0] - 1) for row in rows)
    first, last = rows[0], rows[-1]
    better = [row[0] for row in rows if row[5] > row[6]]
    narrow = f" Up to d_k = {max(better)} the unscaled softmax lets through more, not less." if better else ""
    return (
        f"The variance is d_k within {off:.1%}, and 1 after scaling. From d_k = {first[0]} to {last[0]} the gradient "
        f"that softmax lets through goes from {first[5]:.3f} to {last[5]:.3f} without the scale, and from "
        f"{first[6]:.3f} to {last[6]:.3f} with it.{narrow} The variance is 1 only if q and k are independent: a query "
        f"that equals its key still scores √d_k, {last[7]:.1f} at d_k = {last[0]}."
    )


def draw(picture: Any, rows: list[Any], keys: int) -> None:
    picture.suptitle("What 1/√d_k does")
    left, right = picture.subplots(1, 2)
    widths, variance, scaled, _, _, plain_left, scaled_left, _ = zip(*rows, strict=True)
    left.loglog(widths, variance, "o-", label="q·k")
    left.loglog(widths, scaled, "s--", label="q·k/√d_k")
    left.loglog(widths, widths, ":", color="gray", label="d_k")
    left.set(xlabel="d_k", ylabel="variance of a score", title="variance")
    right.semilogx(widths, plain_left, "o-", label="softmax(q·k)")
    right.semilogx(widths, scaled_left, "s--", label="softmax(q·k/√d_k)")
    right.set(
        xlabel="d_k", ylabel="Frobenius norm of ∂softmax, mean", title=f"gradient left, {keys} keys", ylim=(0, None)
    )
    for axis in (left, right):
        axis.set_xticks(widths, [str(width) for width in widths])
        axis.set_xticks([], minor=True)
    tidy(left, right)
