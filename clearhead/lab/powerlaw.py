"""Why loss could fall as a power law: Zipf-distributed skills, learned one by one, most frequent first.

Skill k of K is needed with probability p_k ∝ k^−(1+α); an unknown skill costs 1. A learner that knows the first N
skills has the loss Σ_{k>N} p_k ~ N^−α. A learner that has seen D examples has the loss D^−α/(1+α).
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
    """Measure the loss of learners with capacity for N skills, and of learners that have seen D examples."""
    require(1, needed=needed, tests=tests)
    require(2**10, skills=skills, largest=largest)
    if not 0 < alpha < inf:
        raise ValueError(f"alpha is {alpha:g}, but must be above 0 and finite, or the frequencies have no finite sum")
    rng = np.random.default_rng(seed)
    use = zipf_frequencies(skills, alpha)
    asked = rng.choice(skills, tests, p=use)
    sizes = [2**power for power in range(4, int(np.log2(largest)) + 1, 2)]
    seen = np.zeros(skills, np.int64)
    rows: Rows = []
    drawn = 0
    for size in sizes:
        room = float((asked >= min(size, skills)).mean())  # knows skills 0 … size − 1
        seen += rng.multinomial(size - drawn, use)
        drawn = size
        data = float((seen[asked] < needed).mean())  # knows skills seen often enough
        rows.append((size, room, tail_loss(use, size), data, expected_loss(use, size, needed)))
    slopes = {"N": fit_slope(rows, 1, skills // 100), "D": fit_slope(rows, 3)}
    theory = {"N": -alpha, "D": -alpha / (1 + alpha)}
    return Result(
        name="powerlaw",
        claim="If skills are used as k^−(1+α), learned by frequency, loss falls as N^−α, and with data as D^−α/(1+α).",
        found=(
            f"With α = {alpha:g} the slopes on log-log axes are {format_slope(slopes['N'])} in N (derived: "
            f"{theory['N']:.3f}) and {format_slope(slopes['D'])} in D (derived: {theory['D']:.3f}). The law holds "
            f"only in the middle of the range: for small N the sum is not yet an integral, and near all {skills:,} "
            "skills the loss drops to 0 faster than any power."
        ),
        columns=("N or D", "loss at N", "sum at N", "loss at D", "mean at D"),
        rows=rows,
        draw=lambda picture, theme: draw(picture, rows, alpha, slopes),
        more={
            "slopes": {name: one and asdict(one) for name, one in slopes.items()},
            "derived": theory,
        },
    )


def zipf_frequencies(skills: int, alpha: float) -> Float[np.ndarray, "K"]:
    """The probability that each skill is needed."""
    use = np.arange(1, skills + 1, dtype=np.float64) ** -(1 + alpha)
    return use / use.sum()


def tail_loss(use: Float[np.ndarray, "K"], known: int) -> float:
    """The loss of a learner that knows the first `known` skills."""
    return float(use[known:].sum())


def expected_loss(use: Float[np.ndarray, "K"], examples: int, needed: int) -> float:
    """Mean loss after `examples` examples: Σ p_k·P(skill k was seen fewer than `needed` times), Poisson."""
    rate, term, below = use * examples, np.exp(-use * examples), np.zeros_like(use)
    for count in range(needed):
        below += term
        term = term * rate / (count + 1)
    return float((use * below).sum())


def fit_slope(rows: Rows, column: int, most: float = inf) -> Growth | None:
    """Fit the slope over the middle of the range (0.005 < loss < 0.4), or over all non-zero losses."""
    failed = [(row[0], row[column]) for row in rows if row[column] > 0]
    middle = [(size, loss) for size, loss in failed if size <= most and 0.005 < loss < 0.4]
    points = middle if len(middle) > 1 else failed
    return fit(*map(list, zip(*points, strict=True))) if len(points) > 1 else None


def format_slope(growth: Growth | None) -> str:
    if growth is None:
        return "undetermined in this range"
    return f"{growth.exponent:.3f}" + ("" if growth.margin is None else f" ± {growth.margin:.3f}")


def draw(picture: Any, rows: Rows, alpha: float, slopes: dict[str, Growth | None]) -> None:
    picture.suptitle(f"Skills used as k^−{1 + alpha:g}: loss falls as a power of size and of data")
    left, right = picture.subplots(1, 2, sharey=True)
    size = np.array([row[0] for row in rows], float)
    panels = (
        (left, 1, 2, "capacity N (skills)", "N", -alpha, "size"),
        (right, 3, 4, "examples seen, D", "D", -alpha / (1 + alpha), "data"),
    )
    for axis, measured, theory, label, name, power, title in panels:
        loss = np.array([row[measured] for row in rows])
        sums = np.array([row[theory] for row in rows])
        middle = len(rows) // 2
        axis.loglog(size[loss > 0], loss[loss > 0], "o", label="measured")
        axis.loglog(size[sums > 0], sums[sums > 0], "-", label="expected_loss, summed over skills")
        line = sums[middle] * (size / size[middle]) ** power
        axis.loglog(size, line, "--", label=f"{name}^{power:.2f}, as derived")
        axis.set(xlabel=label, title=f"{title}: slope {format_slope(slopes[name])}")
    left.set_ylabel("loss: fraction of tasks with an unknown skill")
    tidy(left, right)
