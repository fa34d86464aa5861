"""Constants that papers have published, and how far they may be off."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from .laws import LAWS, Fit
from .table import FLOPS

BUDGETS = (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21)  # of the runs (Hoffmann et al. 2022, figure 3)
SIZES = np.geomspace(1 / 6, 6, 9)  # at each of them, times the best
DRAWS = 1000


def drawn(values: Float[np.ndarray, "5"], errors: Float[np.ndarray, "5"]) -> Float[np.ndarray, "R 5"]:
    """Draws of E, A, B, α and β whose standard errors are published.

    A paper tells how far each constant may be off, and not how they lean on each other. That follows from where the
    runs are: the covariance of least squares is (JᵀJ)⁻¹, J the slopes of ln L. One factor brings it to the errors told.
    """
    e, a, b, alpha, beta = values
    n = np.concatenate([LAWS["parametric"].size(values, flops) * SIZES for flops in BUDGETS])
    d = np.repeat(BUDGETS, len(SIZES)) / (FLOPS * n)
    terms = np.stack([np.full_like(n, e), a / n**alpha, b / d**beta], axis=1)
    share = terms / terms.sum(1, keepdims=True)
    logs = np.log(np.stack([n, d], axis=1))
    slopes = np.concatenate([share, -share[:, 1:] * logs], axis=1)  # to ln E, ln A, ln B, α and β
    spread = np.linalg.inv(slopes.T @ slopes)
    known = errors / np.array([e, a, b, 1, 1])
    spread *= np.exp(np.log(known**2 / np.diag(spread)).mean())
    off = np.random.default_rng(0).standard_normal((DRAWS, 5)) @ np.linalg.cholesky(spread).T
    return np.concatenate([values[:3] * np.exp(off[:, :3]), values[3:] + off[:, 3:]], axis=1)


def published(source: str, values: tuple[float, ...], errors: tuple[float, ...] | None = None) -> Fit:
    told = np.array(values)
    draws = np.empty((0, 5)) if errors is None else drawn(told, np.array(errors))
    note = "intervals: the published error of each constant, going together as in a fit to the paper's budgets"
    return Fit(
        LAWS["parametric"], told, draws, source, (BUDGETS[0], BUDGETS[-1]), notes=() if errors is None else (note,)
    )


PUBLISHED = {
    "chinchilla": published("Hoffmann et al. 2022, equation 10", (1.69, 406.4, 410.7, 0.34, 0.28)),
    "reanalysis": published(
        "Besiroglu et al. 2024", (1.82, 482.0, 2085.0, 0.348, 0.366), (0.03, 124.58, 1293.23, 0.02, 0.02)
    ),
}
