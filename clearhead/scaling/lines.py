"""Laws that are straight lines on logarithmic axes: Kaplan's L(N) and L(D), and Chinchilla's first two approaches."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from .laws import LAWS, Fit, FitError, straight_line
from .table import Table

LEAST = 3  # points that a line needs: any two points lie on one
SPACED = 1500  # budgets at which the envelope is evaluated (Hoffmann et al. 2022, 3.1)


def fit_size(table: Table, draws: int, seed: int) -> Fit:
    """L(N) = (N_c/N)^α through the lowest loss of any run with at most N parameters, where data is not the limit."""
    return power_law("size", table, table.n, draws, seed)


def fit_data(table: Table, draws: int, seed: int) -> Fit:
    """L(D) = (D_c/D)^α through the lowest loss of any run with at most D tokens, where size is not the limit."""
    return power_law("data", table, table.d, draws, seed)


def power_law(law: str, table: Table, x: Float[np.ndarray, "n"], draws: int, seed: int) -> Fit:
    at = lowest(x, table.loss)
    letter = "N" if law == "size" else "D"
    if len(at) < LEAST:
        raise FitError(
            f"these runs do not determine L({letter}): the loss falls at only {len(at)} values of {letter}, "
            f"and a line needs {LEAST}; add runs with other {letter}"
        )
    line, drawn = straight_line(np.log(x[at]), np.log(table.loss[at]), draws, seed)

    def constants(line: Float[np.ndarray, "*R 2"]) -> Float[np.ndarray, "*R 2"]:
        """ln L = α ln x_c − α ln x."""
        x_c = np.exp(np.clip(-line[..., 0] / line[..., 1], -700, 700))  # a nearly flat line has a meaningless x_c
        return np.stack([x_c, -line[..., 1]], axis=-1)

    note = f"fitted to {len(at)} of {len(table)} runs: those that no run with less {letter} beats"
    return Fit(LAWS[law], constants(line), constants(drawn), table.summary, table.span, (note,))


def lowest(x: Float[np.ndarray, "n"], loss: Float[np.ndarray, "n"]) -> Int[np.ndarray, "k"]:
    """The places of runs that no run with a smaller or equal x beats."""
    found: list[int] = []
    for place in np.lexsort((loss, x)):
        if not found or (loss[place] < loss[found[-1]] and x[place] > x[found[-1]]):
            found.append(int(place))
    return np.array(found)


def fit_isoflop(table: Table, draws: int, seed: int) -> Fit:
    """Fit a parabola (loss against ln N) to the runs of each budget, then N = k·C^a through their minima."""
    optima, notes = [], []
    for budget in table.budgets():
        if len(budget) < LEAST:
            continue
        vertex = lowest_point(table, budget)
        flops = float(np.exp(np.log(table.flops[budget]).mean()))
        if vertex is None:
            notes.append(f"the runs at {flops:.3g} FLOPs are skipped: their losses show no minimum between the sizes")
        else:
            optima.append((flops, vertex))
    return frontier("isoflop", table, optima, notes, draws, seed)


def lowest_point(table: Table, budget: Int[np.ndarray, "k"]) -> float | None:
    """The N with the lowest loss; None if the runs do not enclose a minimum."""
    curve, middle, _ = parabola(table, budget)
    if len(np.unique(table.n[budget])) < LEAST or curve[0] <= 0:
        return None
    vertex = float(np.exp(middle - curve[1] / (2 * curve[0])))
    return vertex if table.n[budget].min() < vertex < table.n[budget].max() else None


def parabola(table: Table, budget: Int[np.ndarray, "k"]) -> tuple[Float[np.ndarray, "3"], float, float]:
    """Loss as a quadratic in ln N − its mean: coefficients, the mean, and the mean error of the runs."""
    x = np.log(table.n[budget])
    columns = np.vander(x - x.mean(), 3)
    found = np.linalg.lstsq(columns, table.loss[budget], rcond=None)[0]
    return found, float(x.mean()), float(np.abs(columns @ found - table.loss[budget]).mean())


def fit_envelope(table: Table, draws: int, seed: int) -> Fit:
    """Find the budgets at which each N has the lowest training curve, then fit N = k·C^a.

    Each N between the smallest and the largest counts at the middle of the budgets it wins.
    """
    curves = {n: at for n, at in table.curves().items() if len(at) > 1}
    if len(curves) < LEAST + 2:
        raise FitError(
            f"a training curve needs two runs of the same N; these runs have curves for {len(curves)} values of N, and "
            f"the envelope needs {LEAST + 2}; use --law isoflop or parametric, or add runs"
        )
    low, high = (f(table.flops[np.concatenate(list(curves.values()))]) for f in (np.min, np.max))
    budgets = np.linspace(np.log(low), np.log(high), SPACED)
    losses = np.array([along(table, at, budgets) for at in curves.values()])
    winners = np.where(np.isfinite(losses).any(0), np.nanargmin(np.where(np.isnan(losses), np.inf, losses), axis=0), -1)
    sizes, optima = np.array(list(curves)), []
    for i in range(1, len(sizes) - 1):
        rivals = np.isfinite(losses[:i]).any(0) & np.isfinite(losses[i + 1 :]).any(0)
        won = budgets[(winners == i) & rivals]
        if len(won):
            optima.append((float(np.exp((won[0] + won[-1]) / 2)), float(sizes[i])))
    return frontier("envelope", table, optima, [], draws, seed)


def along(table: Table, at: Int[np.ndarray, "k"], budgets: Float[np.ndarray, "c"]) -> Float[np.ndarray, "c"]:
    """ln loss of one N at each ln C, interpolated linearly between its runs; NaN outside."""
    return np.interp(budgets, np.log(table.flops[at]), np.log(table.loss[at]), left=np.nan, right=np.nan)


def frontier(law: str, table: Table, optima: list[tuple[float, float]], notes: list[str], draws: int, seed: int) -> Fit:
    if len(optima) < LEAST:
        what = "budgets with a minimum" if law == "isoflop" else "sizes that win at some budget"
        raise FitError(
            f"these runs have {len(optima)} {what}, and a line needs {LEAST}; "
            "add runs with smaller and larger N at more budgets"
        )
    flops, n = np.array(optima).T
    line, drawn = straight_line(np.log(flops), np.log(n), draws, seed)

    def constants(line: Float[np.ndarray, "*R 2"]) -> Float[np.ndarray, "*R 2"]:
        return np.stack([np.exp(np.clip(line[..., 0], -600, 600)), line[..., 1]], axis=-1)

    return Fit(LAWS[law], constants(line), constants(drawn), table.summary, table.span, tuple(notes), (), tuple(optima))
