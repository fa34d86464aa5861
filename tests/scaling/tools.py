"""Tables that a known law made."""

from __future__ import annotations

import numpy as np

from clearhead.scaling import Table, make_table

KEYS = ("E", "A", "B", "alpha", "beta")
CHINCHILLA = (1.69, 406.4, 410.7, 0.34, 0.28)  # Hoffmann et al. 2022
REANALYSIS = (1.82, 482.0, 2085.0, 0.348, 0.366)  # Besiroglu et al. 2024
BOTH = {"chinchilla": CHINCHILLA, "reanalysis": REANALYSIS}


def loss(constants: tuple[float, ...], n: float, d: float) -> float:
    e, a, b, alpha, beta = constants
    return e + a / n**alpha + b / d**beta


def best_size(constants: tuple[float, ...], flops: float) -> float:
    """By looking at a hundred thousand sizes."""
    n = np.geomspace(1e4, 1e14, 100_001)
    return float(n[np.argmin(loss(constants, n, flops / (6 * n)))])  # type: ignore[arg-type]


def isoflop_table(constants: tuple[float, ...], noise: float = 0.0, seed: int = 0, budgets: int = 6) -> Table:
    """Eight sizes around the best at each budget; the logarithm of the loss has normal noise."""
    rng = np.random.default_rng(seed)
    rows = []
    for flops in np.geomspace(1e18, 3e21, budgets):
        best = best_size(constants, flops)
        for n in best * np.geomspace(1 / 6, 6, 8):
            d = flops / (6 * n)
            rows.append({"N": n, "D": d, "loss": loss(constants, n, d) * np.exp(noise * rng.standard_normal())})
    return make_table(rows)


def curves_table(constants: tuple[float, ...], sizes: int = 9, lengths: int = 40) -> Table:
    """A training curve for each size."""
    rows = [
        {"N": n, "D": d, "loss": loss(constants, n, d)}
        for n in np.geomspace(1e7, 1e10, sizes)
        for d in np.geomspace(2e8, 1e12, lengths)
    ]
    return make_table(rows)
