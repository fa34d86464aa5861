"""Figures of runs and fitted laws: iso-FLOP curves, and the best size for each budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from clearhead.inspect.plotting import SEQUENTIAL, colours, figure, save

from .laws import LEVEL, Fit
from .lines import lowest, lowest_point, parabola
from .table import FLOPS, Table

SHADES = {"light": (0.0, 0.85), "dark": (0.3, 1.0)}  # parts of the colour map that stand out from the background
BUDGETS, SHOWN = 12, 9  # with more budgets than the first, the law is drawn at the second number of budgets
LEGEND = 10  # most entries of the legend
INSET = 0.35  # how far a curve extends beyond its runs, in ln N


def draw_fit(fit: Fit, table: Table, path: str | Path, theme: str = "light") -> None:
    """Draw a fit: for L(N) and L(D) the line; else the runs on the left and the best size per budget on the right."""
    if fit.law.name in ("size", "data"):
        with figure(5.6, 4.4, theme) as picture:
            draw_power(picture.subplots(), fit, table, theme)
            save(picture, path)
        return
    with figure(10.5, 4.6, theme) as picture:
        left, right = picture.subplots(1, 2)
        draw_runs = draw_envelope if fit.law.name == "envelope" else draw_isoflop
        draw_runs(left, fit, table, theme)
        draw_best(right, fit, table, theme)
        picture.suptitle(fit.equation(), fontsize=10)
        save(picture, path)


def shades(theme: str, count: int) -> list[Any]:
    """Colours from the smallest to the largest budget, in the order of lightness."""
    from matplotlib import colormaps

    return [colormaps[SEQUENTIAL](share) for share in np.linspace(*SHADES[theme], count)]


def draw_isoflop(axis: Any, fit: Fit, table: Table, theme: str) -> None:
    """Loss against N, a curve for each budget; a ring marks its minimum."""
    ink, budgets = colours(theme)[-1], [at for at in table.budgets() if len(at) > 2]
    if fit.law.name == "parametric" and not 2 <= len(budgets) <= BUDGETS:
        budgets = [np.array([], dtype=int)] * SHOWN  # no common budgets: draw the law at some budgets
        amounts = [float(flops) for flops in np.geomspace(*table.span, SHOWN)]
    else:
        amounts = [float(np.exp(np.log(table.flops[at]).mean())) for at in budgets]
    step = -(-len(budgets) // LEGEND)
    for number, (at, flops, shade) in enumerate(zip(budgets, amounts, shades(theme, len(budgets)), strict=True)):
        axis.plot(table.n[at], table.loss[at], "o", color=shade, markersize=4)
        n, loss, best = curve(fit, table, at, flops)
        axis.plot(n, loss, color=shade, linewidth=1.3, label=f"{flops:.2g}" if number % step == 0 else None)
        if best is not None:
            axis.plot(*best, "o", color=ink, markersize=9, fillstyle="none")
    rest = np.setdiff1d(np.arange(len(table)), np.concatenate(budgets))
    axis.plot(table.n[rest], table.loss[rest], "x", color=ink, markersize=3, alpha=0.5)
    axis.set(title="loss at equal compute", xlabel="parameters N", ylabel="loss, nats per token", xscale="log")
    axis.set_yscale("log")
    plain_ticks(axis)
    axis.grid(visible=True, linewidth=0.5)
    axis.legend(title="C, FLOPs", fontsize=7, title_fontsize=7, frameon=False, ncols=2)


def curve(fit: Fit, table: Table, at: Any, flops: float) -> tuple[Any, Any, tuple[float, float] | None]:
    """The fitted curve of a budget: N, the loss, and the minimum, if there is one."""
    if fit.law.name == "parametric":
        plan = fit.plan(flops)
        ends = (table.n[at].min(), table.n[at].max()) if len(at) else (plan.n / 8, plan.n * 8)
        n = np.geomspace(ends[0] / (1 + INSET), ends[1] * (1 + INSET), 80)
        return n, fit.law.loss(fit.values, n, flops / (FLOPS * n)), (plan.n, float(plan.loss or 0.0))
    coefficients, middle, _ = parabola(table, at)
    n = np.geomspace(table.n[at].min() / (1 + INSET), table.n[at].max() * (1 + INSET), 80)
    vertex = lowest_point(table, at)
    best = None if vertex is None else (vertex, float(np.polyval(coefficients, np.log(vertex) - middle)))
    return n, np.polyval(coefficients, np.log(n) - middle), best


def draw_envelope(axis: Any, fit: Fit, table: Table, theme: str) -> None:
    """Loss against compute, a curve for each N; a ring marks the middle of the budgets that an N wins."""
    ink, curves = colours(theme)[-1], table.curves()
    step, best = -(-len(curves) // LEGEND), {n: flops for flops, n in fit.optima}
    for number, ((n, at), shade) in enumerate(zip(curves.items(), shades(theme, len(curves)), strict=True)):
        name = f"{n:.2g}" if number % step == 0 else None
        axis.plot(table.flops[at], table.loss[at], "o-", color=shade, markersize=3, linewidth=1.2, label=name)
        if n in best:
            middle = np.log(best[n])
            loss = np.exp(np.interp(middle, np.log(table.flops[at]), np.log(table.loss[at])))
            axis.plot(best[n], loss, "o", color=ink, markersize=9, fillstyle="none")
    axis.set(title="training curves and the best size", xlabel="compute C, FLOPs", ylabel="loss, nats per token")
    axis.set(xscale="log", yscale="log")
    plain_ticks(axis)
    axis.grid(visible=True, linewidth=0.5)
    axis.legend(title="parameters N", fontsize=7, title_fontsize=7, frameon=False, ncols=2)


def draw_best(axis: Any, fit: Fit, table: Table, theme: str) -> None:
    """The best N and D for each budget, with their intervals."""
    low, high = table.span
    flops = np.geomspace(low / 2, high * 10, 40)
    plans = [fit.plan(float(c)) for c in flops]
    for name, values, colour, style in (
        ("N", [plan.n for plan in plans], colours(theme)[0], "-"),
        ("D", [plan.d for plan in plans], colours(theme)[1], "--"),
    ):
        exponent = fit.constants()["a" if name == "N" else "b"][0]
        what = "parameters" if name == "N" else "tokens"
        axis.plot(flops, values, style, color=colour, label=f"{what} {name} ∝ C^{exponent:.3f}")
        bands = [plan.intervals[name] for plan in plans]
        if all(band is not None for band in bands):
            axis.fill_between(flops, *zip(*bands, strict=True), color=colour, alpha=0.2, linewidth=0)
    if fit.optima:
        axis.plot(*zip(*fit.optima, strict=True), "o", color=colours(theme)[-1], markersize=7, fillstyle="none")
    axis.axvspan(low, high, color=colours(theme)[-1], alpha=0.06, linewidth=0, label="compute of the runs")
    both = [value for plan in plans for value in (plan.n, plan.d)]
    axis.set_ylim(min(both) / 5, max(both) * 5)
    axis.set(title=f"best use of a budget, with {LEVEL:.0%} intervals", xlabel="compute C, FLOPs", ylabel="N, D")
    axis.set(xscale="log", yscale="log")
    axis.grid(visible=True, linewidth=0.5)
    axis.legend(fontsize=8, frameon=False, loc="upper left")


def draw_power(axis: Any, fit: Fit, table: Table, theme: str) -> None:
    letter, x = ("N", table.n) if fit.law.name == "size" else ("D", table.d)
    used = lowest(x, table.loss)
    rest = np.setdiff1d(np.arange(len(table)), used)
    axis.plot(x[rest], table.loss[rest], "x", color=colours(theme)[-1], markersize=4, alpha=0.5, label="other runs")
    axis.plot(
        x[used], table.loss[used], "o", color=colours(theme)[0], markersize=5, label=f"best with at most {letter}"
    )
    line = np.geomspace(x.min() / 1.5, x.max() * 1.5, 60)
    law = (fit.law.loss(values, line[:, None], line[:, None]) for values in (fit.values[None], fit.draws))
    drawn, many = (np.asarray(found) for found in law)
    axis.plot(line, drawn[:, 0], color=colours(theme)[0], linewidth=1.3)
    if many.size:
        band = np.quantile(many, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], axis=1)
        axis.fill_between(line, *band, color=colours(theme)[0], alpha=0.2, linewidth=0)
    what = "parameters N" if letter == "N" else "tokens D"
    axis.set(title=fit.equation(), xlabel=what, ylabel="loss, nats per token", xscale="log", yscale="log")
    axis.set_ylim(table.loss.min() / 1.1, table.loss.max() * 1.1)
    plain_ticks(axis)
    axis.grid(visible=True, linewidth=0.5)
    axis.legend(fontsize=8, frameon=False)


def plain_ticks(axis: Any) -> None:
    """Write losses as 2.5, not 2.5·10⁰."""
    from matplotlib.ticker import FuncFormatter, LogLocator

    axis.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 2.5, 3, 4, 5, 6, 8)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(LogLocator(subs=()))
