"""Why loss could fall as a power law: skills whose use is Zipf-distributed, learned one by one, the commonest first.

A skill k of K is needed with probability p_k ∝ k^−(1+α), and costs 1 where it is not known. Who knows the first N has
the loss Σ_{k>N} p_k ~ N^−α; who has seen D examples knows those that came often enough, and has D^−α/(1+α).
"""

from __future__ import annotations

from dataclasses import asdict
from math import inf
from typing import Any

import numpy as np
from jaxtyping import Float

from clearhead.measure.growth import Growth, fit

from .result import Result, Rows, require, tidy


def powerlaw(
    *,
    alpha: float = 0.5,
    skills: int = 1_000_000,
    needed: int = 3,
    largest: int = 2**20,
    tests: int = 200_000,
    seed: int = 0,
) -> Result:
    """Learners with room for N skills, and learners that have seen D examples, tested on what is asked of them."""
    require(1, needed=needed, tests=tests)
    require(2**10, skills=skills, largest=largest)
    if not 0 < alpha < inf:
        raise ValueError(f"alpha is {alpha:g}, but must be above 0 and finite, or the use of skills has no sum")
    rng = np.random.default_rng(seed)
    use = zipf(skills, alpha)
    asked = rng.choice(skills, tests, p=use)
    sizes = [2**power for power in range(4, int(np.log2(largest)) + 1, 2)]
    seen = np.zeros(skills, np.int64)
    rows: Rows = []
    drawn = 0
    for size in sizes:
        room = float((asked >= min(size, skills)).mean())  # knows skills 0 … size − 1
        seen += rng.multinomial(size - drawn, use)
        drawn = size
        data = float((seen[asked] < needed).mean())  # knows what it has met often enough
        rows.append((size, room, tail(use, size), data, expected(use, size, needed)))
    slopes = {"N": slope(rows, 1, skills // 100), "D": slope(rows, 3)}
    theory = {"N": -alpha, "D": -alpha / (1 + alpha)}
    return Result(
        name="powerlaw",
        claim="If skills are used as k^−(1+α), learned by frequency, loss falls as N^−α, and with data as D^−α/(1+α).",
        found=(
            f"With α = {alpha:g} the slopes on doubly logarithmic paper are {told(slopes['N'])} in N, where the "
            f"derivation says {theory['N']:.3f}, and {told(slopes['D'])} in D, where it says {theory['D']:.3f}. It "
            f"holds in between only: with few skills known the sum is no integral yet, and near all {skills:,} the "
            "loss drops to 0 faster than any power."
        ),
        columns=("N or D", "loss at N", "sum at N", "loss at D", "mean at D"),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows, alpha, slopes),
        more={
            "slopes": {name: one and asdict(one) for name, one in slopes.items()},
            "derived": theory,
        },
    )


def zipf(skills: int, alpha: float) -> Float[np.ndarray, "K"]:
    """How often each skill is needed."""
    use = np.arange(1, skills + 1, dtype=np.float64) ** -(1 + alpha)
    return use / use.sum()


def tail(use: Float[np.ndarray, "K"], known: int) -> float:
    """The loss of who knows the first so many."""
    return float(use[known:].sum())


def expected(use: Float[np.ndarray, "K"], examples: int, needed: int) -> float:
    """The mean loss after so many examples: Σ p_k·P(skill k came fewer than `needed` times), Poisson."""
    rate, term, below = use * examples, np.exp(-use * examples), np.zeros_like(use)
    for count in range(needed):
        below += term
        term = term * rate / (count + 1)
    return float((use * below).sum())


def slope(rows: Rows, column: int, most: float = inf) -> Growth | None:
    """Over the middle of the range: far from the last skill, losses neither near 1 nor made of a handful of tests;
    where that is too little, over all that failed any test."""
    failed = [(row[0], row[column]) for row in rows if row[column] > 0]
    middle = [(size, loss) for size, loss in failed if size <= most and 0.005 < loss < 0.4]
    points = middle if len(middle) > 1 else failed
    return fit(*map(list, zip(*points, strict=True))) if len(points) > 1 else None


def told(growth: Growth | None) -> str:
    if growth is None:
        return "not to be told from this range"
    return f"{growth.exponent:.3f}" + ("" if growth.margin is None else f" ± {growth.margin:.3f}")


def draw(picture: Any, rows: Rows, alpha: float, slopes: dict[str, Growth | None]) -> None:
    picture.suptitle(f"Skills used as k^−{1 + alpha:g}: loss falls as a power of size and of data")
    left, right = picture.subplots(1, 2, sharey=True)
    size = np.array([row[0] for row in rows], float)
    panels = (
        (left, 1, 2, "skills there is room for, N", "N", -alpha, "size"),
        (right, 3, 4, "examples seen, D", "D", -alpha / (1 + alpha), "data"),
    )
    for axis, measured, theory, label, name, power, title in panels:
        loss = np.array([row[measured] for row in rows])
        sums = np.array([row[theory] for row in rows])
        middle = len(rows) // 2
        axis.loglog(size[loss > 0], loss[loss > 0], "o", label="measured")
        axis.loglog(size[sums > 0], sums[sums > 0], "-", label="expected, summed over skills")
        line = sums[middle] * (size / size[middle]) ** power
        axis.loglog(size, line, "--", label=f"{name}^{power:.2f}, as derived")
        axis.set(xlabel=label, title=f"{title}: slope {told(slopes[name])}")
    left.set_ylabel("share of tasks whose skill is not known")
    tidy(left, right)
