"""Scaling laws: how the loss falls with parameters, tokens and compute. Fit laws to runs, plan budgets, train sweeps.

found = fit(read_table("runs.csv"))
print(found.equation(), found.plan(flops=1e21))
"""

from __future__ import annotations

from .laws import LAWS, Fit, FitError, Plan, read_fit
from .lines import fit_data, fit_envelope, fit_isoflop, fit_size
from .parametric import fit_parametric
from .published import PUBLISHED
from .table import Table, TableError, make_table, read_table

FITS = {
    "parametric": fit_parametric,
    "isoflop": fit_isoflop,
    "envelope": fit_envelope,
    "size": fit_size,
    "data": fit_data,
}
DRAWS = 1000


def fit(table: Table, law: str = "parametric", *, draws: int = DRAWS, seed: int = 0) -> Fit:
    """Fit a law of `LAWS` to runs, with intervals from `draws` resamples; FitError if the runs do not determine it.

    >>> law = PUBLISHED["reanalysis"]
    >>> sizes = [(n, d) for n in (1e6, 1e7, 1e8) for d in (1e8, 1e9, 1e10)]
    >>> rows = [{"N": n, "D": d, "loss": law.law.loss(law.values, n, d)} for n, d in sizes]
    >>> fit(make_table(rows), draws=1).law.name
    'parametric'
    """
    if law not in FITS:
        raise FitError(f"there is no law {law!r}; known laws: {', '.join(FITS)}")
    if draws < 1:
        raise FitError(f"draws is {draws}, but must be at least 1")
    return FITS[law](table, draws, seed)


__all__ = [
    "fit", "read_table", "make_table", "read_fit", "Fit", "Plan", "Table", "FitError", "TableError",
    "LAWS", "FITS", "PUBLISHED",
]  # fmt: skip
