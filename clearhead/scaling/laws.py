"""Scaling laws, their constants with intervals, and what they predict for a budget."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float

from clearhead.extras import install_command
from clearhead.files import check_target, write_atomically
from clearhead.typed_json import read_json

from .table import FLOPS

LEVEL = 0.95  # the share of intervals that contain the true value
Interval = tuple[float, float]
Values = Float[np.ndarray, "..."] | float
"""One number for one set of constants, or as many as there are draws."""


class FitError(ValueError):
    """Runs that do not determine a law, or a file without a fit: the message says why and what would help.

    >>> try:
    ...     fit(make_table([{"N": 1e6, "D": 2e7, "loss": 4.0}]))
    ... except FitError as error:
    ...     print(str(error).partition(":")[0])
    these runs do not determine L = E + A/N^α + B/D^β
    """


class Law:
    """A formula with named constants. Constants have shape `... P`, so that many draws are computed at once."""

    name: ClassVar[str]
    keys: ClassVar[tuple[str, ...]]
    derived: ClassVar[tuple[str, ...]] = ()

    def equation(self, values: Float[np.ndarray, "P"]) -> str:
        raise NotImplementedError

    def size(self, values: Float[np.ndarray, "*R P"], flops: float) -> Values:
        """The best number of parameters N for a budget; D follows from it."""
        raise FitError(
            f"the law {self.name!r} does not say how to split a budget; use --law parametric, isoflop or envelope"
        )

    def loss(self, values: Float[np.ndarray, "*R P"], n: Any, d: Any) -> Values | None:
        """The loss; None if the law does not predict it."""
        return None

    def derive(self, values: Float[np.ndarray, "*R P"]) -> dict[str, Values]:
        """Other numbers that follow from the constants."""
        return {}


class Parametric(Law):
    """L(N, D) = E + A/N^α + B/D^β (Hoffmann et al. 2022, equation 2)."""

    name, keys = "parametric", ("E", "A", "B", "alpha", "beta")

    def equation(self, values: Float[np.ndarray, "P"]) -> str:
        e, a, b, alpha, beta = values
        return f"L(N, D) = {e:.4g} + {a:.4g}/N^{alpha:.3f} + {b:.4g}/D^{beta:.3f}"

    def size(self, values: Float[np.ndarray, "*R P"], flops: float) -> Values:
        """The N where both terms fall equally fast: αA/N^α = βB/D^β with 6·N·D = C."""
        _, a, b, alpha, beta = np.moveaxis(values, -1, 0)
        return ((alpha * a) / (beta * b) * (flops / FLOPS) ** beta) ** (1 / (alpha + beta))

    def loss(self, values: Float[np.ndarray, "*R P"], n: Any, d: Any) -> Values | None:
        e, a, b, alpha, beta = np.moveaxis(values, -1, 0)
        return e + a / n**alpha + b / d**beta

    def derive(self, values: Float[np.ndarray, "*R P"]) -> dict[str, Values]:
        alpha, beta = values[..., 3], values[..., 4]
        return {"a": beta / (alpha + beta), "b": alpha / (alpha + beta)}


class Frontier(Law):
    """N = k·C^a: the best size for each budget, without a law of the loss (Hoffmann et al. 2022, 3.1 and 3.2)."""

    keys = ("k", "a")

    def equation(self, values: Float[np.ndarray, "P"]) -> str:
        k, a = values
        return f"N = {k:.4g}·C^{a:.3f}, D = {1 / (FLOPS * k):.4g}·C^{1 - a:.3f}"

    def size(self, values: Float[np.ndarray, "*R P"], flops: float) -> Values:
        return np.exp(np.clip(np.log(values[..., 0]) + values[..., 1] * np.log(flops), -300, 300))

    def derive(self, values: Float[np.ndarray, "*R P"]) -> dict[str, Values]:
        return {"b": 1 - values[..., 1]}


class Envelope(Frontier):
    name = "envelope"


class IsoFlop(Frontier):
    name = "isoflop"


class PowerLaw(Law):
    """L(x) = (x_c/x)^α (Kaplan et al. 2020, 1.2)."""

    letter: ClassVar[str]

    def equation(self, values: Float[np.ndarray, "P"]) -> str:
        return f"L({self.letter}) = ({values[0]:.4g}/{self.letter})^{values[1]:.4f}"


class BySize(PowerLaw):
    name, keys, letter = "size", ("N_c", "alpha"), "N"

    def loss(self, values: Float[np.ndarray, "*R P"], n: Any, d: Any) -> Values | None:
        return (values[..., 0] / n) ** values[..., 1]


class ByData(PowerLaw):
    name, keys, letter = "data", ("D_c", "alpha"), "D"

    def loss(self, values: Float[np.ndarray, "*R P"], n: Any, d: Any) -> Values | None:
        return (values[..., 0] / d) ** values[..., 1]


LAWS: dict[str, Law] = {law.name: law for law in (Parametric(), IsoFlop(), Envelope(), BySize(), ByData())}


@dataclass(frozen=True)
class SensitiveRun:
    """A run without which an exponent would leave its interval."""

    line: int
    n: float
    d: float
    loss: float
    exponents: dict[str, float]  # their values without this run


@dataclass(frozen=True)
class Plan:
    """The best use of a budget. An interval is None if the fit has none.

    >>> plan = PUBLISHED["reanalysis"].plan(1e21)
    >>> f"{plan.n:.2g} parameters, {plan.d:.2g} tokens"
    '2.8e+09 parameters, 6e+10 tokens'
    """

    flops: float
    n: float
    d: float
    loss: float | None
    intervals: dict[str, Interval | None]

    def to_dict(self) -> dict[str, Any]:
        values = {"N": self.n, "D": self.d, "tokens_per_parameter": self.d / self.n, "loss": self.loss}
        return {"flops": self.flops} | {
            name: {"value": value, "interval": self.intervals[name]} for name, value in values.items()
        }


@dataclass(frozen=True)
class Fit:
    """A law's constants, and draws of them: what they could have been with equally good other runs.

    >>> PUBLISHED["chinchilla"].equation()
    'L(N, D) = 1.69 + 406.4/N^0.340 + 410.7/D^0.280'
    >>> f"{PUBLISHED['chinchilla'].plan(1e21).n:.2g}"
    '1.8e+09'
    """

    law: Law
    values: Float[np.ndarray, "P"]
    draws: Float[np.ndarray, "R P"]  # empty: no intervals
    source: str
    compute: Interval | None = None  # FLOPs of the smallest and the largest run
    notes: tuple[str, ...] = ()
    sensitive: tuple[SensitiveRun, ...] = ()
    optima: tuple[tuple[float, float], ...] = ()  # C and the best N, the points of the fitted line

    def interval(self, draws: Values) -> Interval | None:
        """The central LEVEL share of the draws."""
        if not np.size(draws):
            return None
        low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)

    def constants(self) -> dict[str, tuple[float, Interval | None]]:
        """Each constant with its interval, then the derived numbers."""
        value, draws = self.law.derive(self.values), self.law.derive(self.draws)
        own = {key: (float(self.values[i]), self.interval(self.draws[:, i])) for i, key in enumerate(self.law.keys)}
        return own | {key: (float(value[key]), self.interval(draws[key])) for key in value}

    def plan(self, flops: float) -> Plan:
        if not (np.isfinite(flops) and flops > 0):
            raise FitError(f"the budget is {flops:g} FLOPs, but must be a number above 0")

        def predict(values: Float[np.ndarray, "*R P"]) -> dict[str, Any]:
            n = self.law.size(values, flops)
            d = flops / (FLOPS * n)
            return {"N": n, "D": d, "tokens_per_parameter": d / n, "loss": self.law.loss(values, n, d)}

        best, drawn = predict(self.values), predict(self.draws)
        if min(best["N"], best["D"]) < 1:
            spent = f"{best['N']:.3g} parameters and {best['D']:.3g} tokens"
            raise FitError(f"{flops:g} FLOPs are too few: the best use would be {spent}")
        intervals = {name: None if found is None else self.interval(found) for name, found in drawn.items()}
        loss = None if best["loss"] is None else float(best["loss"])
        return Plan(flops, float(best["N"]), float(best["D"]), loss, intervals)

    def beyond(self, flops: float) -> str | None:
        """A warning if the budget is far from the fitted runs."""
        if self.compute is None or self.compute[0] / 10 <= flops <= self.compute[1] * 10:
            return None
        low, high = self.compute
        return (
            f"{flops:g} FLOPs are far from the runs ({low:.3g} to {high:.3g}): "
            "the interval covers errors of the constants, not whether the law holds there"
        )

    def equation(self) -> str:
        return self.law.equation(self.values)

    def to_dict(self) -> dict[str, Any]:
        constants = {name: {"value": v, "interval": between} for name, (v, between) in self.constants().items()}
        return {
            "law": self.law.name,
            "equation": self.equation(),
            "source": self.source,
            "level": LEVEL,
            "compute": self.compute,
            **constants,
            "notes": list(self.notes),
            "sensitive": [
                {"line": run.line, "N": run.n, "D": run.d, "loss": run.loss, **run.exponents} for run in self.sensitive
            ],
        }

    def save(self, path: str | Path, *, force: bool = False) -> None:
        """Write the fit as JSON with its draws, so that plans have intervals; `force` replaces a file that exists."""
        check_target(path, force)
        draws = [[float(f"{value:.8g}") for value in draw] for draw in self.draws]
        write_atomically(Path(path), json.dumps(self.to_dict() | {"draws": draws}) + "\n")


def read_fit(path: str | Path) -> Fit:
    """Read a fit that `save` wrote.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "fit.json")
    >>> PUBLISHED["chinchilla"].save(path)
    >>> read_fit(path).equation()
    'L(N, D) = 1.69 + 406.4/N^0.340 + 410.7/D^0.280'
    """
    try:
        data = read_json(Path(path))
        law = LAWS[data["law"]]
        values = np.array([data[key]["value"] for key in law.keys], dtype=float)
        draws = np.array(data["draws"], dtype=float).reshape(-1, len(values))
        compute = None if data["compute"] is None else (float(data["compute"][0]), float(data["compute"][1]))
    except (ValueError, KeyError, TypeError, IndexError):
        raise FitError(
            f"{path} is not a saved fit; write one with: clearhead scaling fit TABLE.csv --out {path}"
        ) from None
    return Fit(law, values, draws, str(path), compute, tuple(data.get("notes", ())))


def optimizer() -> Any:
    """scipy.optimize, imported when something is fitted."""
    try:
        from scipy import optimize
    except ImportError:
        raise FitError(f"fitting this law needs scipy: {install_command('scaling')}") from None
    return optimize


def straight_line(
    x: Float[np.ndarray, "n"], y: Float[np.ndarray, "n"], draws: int, seed: int
) -> tuple[Float[np.ndarray, "2"], Float[np.ndarray, "R 2"]]:
    """Intercept and slope by least squares, and draws of both from Student's t, exact for normal errors."""
    columns = np.stack([np.ones_like(x), x - x.mean()], axis=1)
    inverse = 1 / (columns**2).sum(0)  # the columns are orthogonal
    found = columns.T @ y * inverse
    free = len(x) - 2
    spread = np.sqrt(((y - columns @ found) ** 2).sum() / free * inverse)
    rng = np.random.default_rng(seed)
    drawn = rng.standard_normal((draws, 2)) / np.sqrt(rng.chisquare(free, (draws, 1)) / free)
    both = np.concatenate([found[None], found + spread * drawn])
    both[:, 0] -= both[:, 1] * x.mean()
    return both[0], both[1:]
