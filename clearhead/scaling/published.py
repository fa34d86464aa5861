"""Published constants and their errors."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from .laws import LAWS, Fit
from .table import FLOPS

BUDGETS = (6e18, 1e19, 3e19, 6e19, 1e20, 3e20, 6e20, 1e21, 3e21)  # FLOPs of the runs (Hoffmann et al. 2022, figure 3)
SIZES = np.geomspace(1 / 6, 6, 9)  # at each budget, as multiples of the best size
DRAWS = 1000


def draw_constants(values: Float[np.ndarray, "5"], errors: Float[np.ndarray, "5"]) -> Float[np.ndarray, "R 5"]:
    """Draws of E, A, B, α and β from their published standard errors.

    A paper gives the error of each constant, but not their correlations. These follow from the runs: the covariance of
    least squares is (JᵀJ)⁻¹, where J holds the derivatives of ln L. One factor scales it to the published errors.
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


def published_fit(source: str, values: tuple[float, ...], errors: tuple[float, ...] | None = None) -> Fit:
    constants = np.array(values)
    draws = np.empty((0, 5)) if errors is None else draw_constants(constants, np.array(errors))
    note = "intervals: published errors of the constants, correlated as in a fit to the paper's budgets"
    return Fit(
        LAWS["parametric"], constants, draws, source, (BUDGETS[0], BUDGETS[-1]), notes=() if errors is None else (note,)
    )


PUBLISHED = {
    "chinchilla": published_fit("Hoffmann et al. 2022, equation 10", (1.69, 406.4, 410.7, 0.34, 0.28)),
    "reanalysis": published_fit(
        "Besiroglu et al. 2024", (1.82, 482.0, 2085.0, 0.348, 0.366), (0.03, 124.58, 1293.23, 0.02, 0.02)
    ),
}
