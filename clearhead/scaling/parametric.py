"""Chinchilla's third approach (Hoffmann et al. 2022, 3.3): L(N, D) = E + A/N^α + B/D^β.

With e = ln E, a = ln A, b = ln B the logarithm of the law is a log-sum-exp of three straight lines,

    ln L = LSE(e, a − α ln N, b − β ln D),

and the fit minimises the sum of Huber's loss of its errors over the runs. ln N and ln D are centred while fitting,
which makes a and α, b and β almost independent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Float

from .laws import LAWS, Fit, FitError, SensitiveRun, optimizer
from .table import Table

DELTA = 1e-3  # of Huber's loss (Hoffmann et al. 2022, D.2)
EXPONENTS = (0.01, 3.0)  # beyond these a term looks like a constant or a cliff
GRID = (0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5)  # of α and β; E, A and B are solved for
POLISHED = 12  # best points of the grid that start L-BFGS
RUNS = 8  # fewest runs for a fit
VANISHED = 3e-3  # a term below this share of the loss in every run counts as absent
AT_EDGE = 0.025  # share of resamples that may have an exponent at a bound
LINE = 0.999  # a larger correlation of ln N and ln D is a line
EXACT = 1e-4  # numerical error of an exponent
CHUNK = 200_000  # numbers in the largest array while fitting resamples
DAMPING, ROUNDS = 1e-3, 400  # first damping and largest number of rounds when fitting resamples
SETTLED, PATIENCE = 1e-6, 5  # a fit is done after so many rounds without a relative gain this large


@dataclass(frozen=True)
class FitProblem:
    """The runs in logarithms. θ = (e, a, b, α, β) refers to centred logarithms."""

    log_n: Float[np.ndarray, "n"]
    log_d: Float[np.ndarray, "n"]
    log_loss: Float[np.ndarray, "n"]

    @classmethod
    def of(cls, table: Table) -> FitProblem:
        return cls(np.log(table.n), np.log(table.d), np.log(table.loss))

    @property
    def x(self) -> Float[np.ndarray, "n"]:
        return self.log_n - self.log_n.mean()

    @property
    def y(self) -> Float[np.ndarray, "n"]:
        return self.log_d - self.log_d.mean()

    def terms(self, theta: Float[np.ndarray, "*R 5"]) -> Float[np.ndarray, "*R n 3"]:
        """The logarithms of E, A/N^α and B/D^β."""
        e, a, b, alpha, beta = (theta[..., i, None] for i in range(5))
        return np.stack(np.broadcast_arrays(e + 0 * self.x, a - alpha * self.x, b - beta * self.y), axis=-1)

    def law(self, theta: Float[np.ndarray, "*R 5"]) -> tuple[Float[np.ndarray, "*R n"], Float[np.ndarray, "*R n 5"]]:
        """ln L of every run, and its gradient: the share of each term."""
        terms = self.terms(theta)
        most = terms.max(-1, keepdims=True)
        parts = np.exp(terms - most)
        total = parts.sum(-1, keepdims=True)
        share = parts / total
        slopes = np.stack([-share[..., 1] * self.x, -share[..., 2] * self.y], axis=-1)
        return (most + np.log(total))[..., 0], np.concatenate([share, slopes], axis=-1)

    def objective(self, theta: Float[np.ndarray, "5"]) -> tuple[float, Float[np.ndarray, "5"]]:
        """Huber's loss divided by δ, summed over the runs, and its gradient."""
        value, gradient = self.law(theta)
        error = value - self.log_loss
        return float(huber(error).sum()), np.clip(error / DELTA, -1, 1) @ gradient

    def bounds(self) -> Float[np.ndarray, "5 2"]:
        """Bounds of θ: terms from almost nothing to many times the loss."""
        least, most = self.log_loss.min() - 16, self.log_loss.max() + 8
        return np.array([(least, self.log_loss.min())] + [(least, most)] * 2 + [EXPONENTS] * 2)

    def starts(self) -> Float[np.ndarray, "S 5"]:
        """For each α and β of the grid, the E, A, B ≥ 0 with the least relative squares; the best starts first."""
        solve = optimizer().nnls
        loss, (least, _) = np.exp(self.log_loss), self.bounds().T
        found = []
        for alpha in GRID:
            for beta in GRID:
                columns = np.stack([np.ones_like(self.x), np.exp(-alpha * self.x), np.exp(-beta * self.y)], axis=1)
                sizes, _ = solve(columns / loss[:, None], np.ones_like(loss))
                found.append([*np.log(np.maximum(sizes, 1e-3 * loss.min())), alpha, beta])
        theta = np.maximum(np.array(found), least)
        return theta[np.argsort(huber(self.law(theta)[0] - self.log_loss).sum(-1), kind="stable")]

    def best(self) -> Float[np.ndarray, "5"]:
        """The best result of L-BFGS from the best starts of the grid."""
        minimize, edges = optimizer().minimize, self.bounds()
        options = {"maxiter": 2000, "maxfun": 4000, "ftol": 1e-13, "gtol": 1e-9}
        found = [
            minimize(self.objective, start, jac=True, method="L-BFGS-B", bounds=edges, options=options)
            for start in self.starts()[:POLISHED]
        ]
        return min(found, key=lambda one: one.fun).x

    def refit(
        self,
        theta: Float[np.ndarray, "5"],
        losses: Float[np.ndarray, "R n"],
        counts: Float[np.ndarray, "R n"],
    ) -> Float[np.ndarray, "R 5"]:
        """The best θ for other losses, each run counted `counts` times: many fits at once, all starting from `theta`.

        Iteratively reweighted least squares, which minimises Huber's loss, with Levenberg's damping.
        """
        rows = max(CHUNK // (5 * len(self.x)), 1)
        parts = [slice(i, i + rows) for i in range(0, len(counts), rows)]
        return np.concatenate([self.refit_chunk(theta, losses[part], counts[part]) for part in parts])

    def refit_chunk(
        self, theta: Float[np.ndarray, "5"], losses: Float[np.ndarray, "R n"], counts: Float[np.ndarray, "R n"]
    ) -> Float[np.ndarray, "R 5"]:
        found = np.tile(theta, (len(counts), 1))
        left, now = np.arange(len(counts)), found  # fits that still improve
        damping, still = np.full(len(counts), DAMPING), np.zeros(len(counts), dtype=int)
        value, gradient = self.law(now)
        for _ in range(ROUNDS):
            tried = self.step(now, value - losses, gradient, counts, damping)
            new_value, new_gradient = self.law(tried)
            before, after = ((counts * huber(each - losses)).sum(-1) for each in (value, new_value))
            better = after < before
            still = np.where(before - after > SETTLED * before, 0, still + 1)
            damping = np.where(better, damping / 5, damping * 5)
            found[left[better]] = tried[better]
            keep = still < PATIENCE
            if not keep.any():
                break
            now, value, gradient = (
                np.where(better.reshape(-1, *[1] * (new.ndim - 1)), new, old)[keep]
                for new, old in ((tried, now), (new_value, value), (new_gradient, gradient))
            )
            left, losses, counts, damping, still = (x[keep] for x in (left, losses, counts, damping, still))
        return found

    def step(
        self,
        now: Float[np.ndarray, "R 5"],
        error: Float[np.ndarray, "R n"],
        gradient: Float[np.ndarray, "R n 5"],
        counts: Float[np.ndarray, "R n"],
        damping: Float[np.ndarray, "R"],
    ) -> Float[np.ndarray, "R 5"]:
        """One weighted and damped Gauss–Newton step within the bounds."""
        low, high = self.bounds().T
        weighted = gradient * (counts / np.maximum(np.abs(error), DELTA))[..., None]
        square = gradient.swapaxes(-1, -2) @ weighted
        slope = np.einsum("rn,rni->ri", error, weighted)
        held = ((now <= low) & (slope > 0)) | ((now >= high) & (slope < 0))
        square = np.where(held[:, :, None] | held[:, None, :], 0, square)
        ridge = damping[:, None] * np.einsum("rii->ri", square) + 1e-9
        step = np.linalg.solve(square + ridge[:, :, None] * np.eye(5), np.where(held, 0, slope)[..., None])
        return np.clip(now - step[..., 0], low, high)


def huber(error: Float[np.ndarray, "*n"]) -> Float[np.ndarray, "*n"]:
    """Huber's loss divided by δ: |error| − δ/2 beyond δ, a parabola within."""
    size = np.abs(error)
    return np.where(size <= DELTA, size**2 / (2 * DELTA), size - DELTA / 2)


def fit_parametric(table: Table, draws: int, seed: int) -> Fit:
    """The five constants with intervals from resampled runs; FitError if the runs do not determine them."""
    require_spread(table)
    problem = FitProblem.of(table)
    theta = problem.best()
    require_inside(problem, theta)
    error = problem.log_loss - problem.law(theta)[0]
    drawn = resample(problem, theta, error, draws, seed)
    require_steady(drawn)
    found = Fit(
        LAWS["parametric"], to_constants(problem, theta), to_constants(problem, drawn), table.summary, table.span
    )
    note = f"half of the runs are within {np.median(np.abs(error)):.2%} of the law"
    return replace(found, notes=(note,), sensitive=find_sensitive(table, problem, theta, found))


def resample(
    problem: FitProblem, theta: Float[np.ndarray, "5"], error: Float[np.ndarray, "n"], draws: int, seed: int
) -> Float[np.ndarray, "R 5"]:
    """Fits to the same N and D with errors drawn from those of the fit.

    The five smallest errors are not drawn: with five constants, the law passes through about five runs whatever their
    true errors.
    """
    errors = error[np.argsort(np.abs(error), kind="stable")[5:]]
    drawn = np.random.default_rng(seed).choice(errors - errors.mean(), (draws, len(error)))
    return problem.refit(theta, problem.law(theta)[0] + drawn, np.ones_like(drawn))


def to_constants(problem: FitProblem, theta: Float[np.ndarray, "*R 5"]) -> Float[np.ndarray, "*R 5"]:
    """E, A, B, α, β for N and D themselves, from θ for centred logarithms."""
    e, a, b, alpha, beta = np.moveaxis(theta, -1, 0)
    logs = e, a + alpha * problem.log_n.mean(), b + beta * problem.log_d.mean()
    return np.stack([*np.exp(logs), alpha, beta], axis=-1)


def refusal(why: str) -> FitError:
    return FitError(f"these runs do not determine L = E + A/N^α + B/D^β: {why}")


def require_spread(table: Table) -> None:
    """Require enough runs with enough sizes and lengths that do not grow together."""
    if len(table) < RUNS:
        raise refusal(f"there are {len(table)} runs, and five constants with intervals need at least {RUNS}")
    for letter, x in {"N": table.n, "D": table.d}.items():
        if (count := len(np.unique(x))) < 3:
            raise refusal(f"{letter} takes {count} value{'s' * (count > 1)}, and its term needs at least 3")
    line = np.corrcoef(np.log(table.n), np.log(table.d))[0, 1]
    if line > LINE:
        raise refusal("N and D grow together, so their terms cannot be separated; add runs with other D/N")
    if line < -LINE:
        raise refusal("D falls as N grows, as if all runs had one budget; add runs with other budgets")


def require_inside(problem: FitProblem, theta: Float[np.ndarray, "5"]) -> None:
    """Require that the best law lies within the bounds and has all its terms."""
    for name, value in {"α": theta[3], "β": theta[4]}.items():
        if at_edge(value):
            raise refusal(f"the best {name} is {value:.3g}, at the bound of the search; add runs farther apart")
    shares = problem.law(theta)[1][:, :3].max(0)
    for name, share in zip(("E", "A/N^α", "B/D^β"), shares, strict=True):
        if share < VANISHED:
            raise refusal(f"the best fit has no {name}; add runs farther apart, or fit another law")


def require_steady(drawn: Float[np.ndarray, "R 5"]) -> None:
    """Require that resampled runs determine the exponents too."""
    for name, values in {"α": drawn[:, 3], "β": drawn[:, 4]}.items():
        share = float(np.mean(at_edge(values))) if len(values) else 0.0
        if share > AT_EDGE:
            raise refusal(f"{name} reaches a bound in {share:.0%} of the resamples; add runs, or runs farther apart")


def at_edge(exponent: Float[np.ndarray, "*R"] | float) -> Any:
    low, high = EXPONENTS
    return (np.asarray(exponent) <= low * 1.01) | (np.asarray(exponent) >= high / 1.01)


def find_sensitive(
    table: Table, problem: FitProblem, theta: Float[np.ndarray, "5"], found: Fit
) -> tuple[SensitiveRun, ...]:
    """The runs without which α or β would leave its interval."""
    losses = np.tile(problem.log_loss, (len(table), 1))
    without = problem.refit(theta, losses, 1 - np.eye(len(table)))
    constants, named = found.constants(), []
    for i, exponents in enumerate(without[:, 3:]):
        moved = dict(zip(("alpha", "beta"), map(float, exponents), strict=True))
        if any(outside(value, *constants[name]) for name, value in moved.items()):
            named.append(
                SensitiveRun(int(table.lines[i]), float(table.n[i]), float(table.d[i]), float(table.loss[i]), moved)
            )
    return tuple(named)


def outside(value: float, before: float, interval: tuple[float, float] | None) -> bool:
    """Outside of its interval, and by more than the numerical error."""
    return interval is not None and not interval[0] <= value <= interval[1] and abs(value - before) > EXACT
