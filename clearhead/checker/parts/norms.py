"""Checks of layer norm and RMS norm, as functions or classes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import numpy as np

from ..candidate import Candidate, ProbeSizes, find_forward, parameters_of
from ..diagnostic import Example
from ..engine import NumPy, equal
from ..names import role_of
from ..weights import Weight, iter_weights
from . import common
from .common import Inputs, Recorder, Runner

Array = np.ndarray
Norm = Callable[[Array, Array, Array, float], Array]


def mean(x: Array, axis: Any = -1) -> Array:
    return x.mean(axis, keepdims=True)


def variance(x: Array, axis: Any = -1, ddof: int = 0) -> Array:
    return x.var(axis, ddof=ddof, keepdims=True)


def layer(x: Array, g: Array, b: Array, e: float) -> Array:
    return (x - mean(x)) / np.sqrt(variance(x) + e) * g + b


def rms(x: Array, g: Array, b: Array, e: float) -> Array:
    return x / np.sqrt(mean(x**2) + e) * g


def rms_clamped(x: Array, g: Array, b: Array, e: float) -> Array:
    """ε as a lower limit of the root mean square."""
    return x / np.maximum(np.sqrt(mean(x**2)), e) * g


def rms_by_length(x: Array, g: Array, b: Array, e: float) -> Array:
    """ε as a lower limit of the vector's length, as in F.normalize."""
    return x / np.maximum(np.sqrt((x**2).sum(-1, keepdims=True)), e) * x.shape[-1] ** 0.5 * g


def rms_from_zero(x: Array, g: Array, b: Array, e: float) -> Array:
    """A weight that starts at 0: the gain is 1 + γ."""
    return rms(x, 1 + g, b, e)


RIGHT = {"layer_norm": layer, "rms_norm": rms}
# right in another way: recorded as an assumption
VARIANTS: dict[str, dict[str, Norm]] = {
    "layer_norm": {"gain_from_zero": lambda x, g, b, e: layer(x, 1 + g, b, e)},
    "rms_norm": {"eps_clamped": rms_clamped, "eps_clamped.length": rms_by_length, "gain_from_zero": rms_from_zero},
}
LAYER: dict[str, Norm] = {
    "eps-outside": lambda x, g, b, e: (x - mean(x)) / (np.sqrt(variance(x)) + e) * g + b,
    "unbiased": lambda x, g, b, e: (x - mean(x)) / np.sqrt(variance(x, ddof=1) + e) * g + b,
    "unbiased-eps-outside": lambda x, g, b, e: (x - mean(x)) / (np.sqrt(variance(x, ddof=1)) + e) * g + b,
    "no-root": lambda x, g, b, e: (x - mean(x)) / (variance(x) + e) * g + b,
    "no-eps": lambda x, g, b, e: layer(x, g, b, 0.0),
    "gamma-unused": lambda x, g, b, e: layer(x, np.ones_like(g), b, e),
    "beta-unused": lambda x, g, b, e: layer(x, g, np.zeros_like(b), e),
    "gamma-beta-unused": lambda x, g, b, e: layer(x, np.ones_like(g), np.zeros_like(b), e),
    "gamma-added": lambda x, g, b, e: layer(x, np.ones_like(g), g + b, e),
    "gamma-after-beta": lambda x, g, b, e: (layer(x, np.ones_like(g), b, e)) * g,
    "not-centred": lambda x, g, b, e: x / np.sqrt(variance(x) + e) * g + b,
    "is-rms": lambda x, g, b, e: rms(x, g, b, e) + b,
    "not-divided": lambda x, g, b, e: (x - mean(x)) * g + b,
    "norm-over-positions": lambda x, g, b, e: (x - mean(x, -2)) / np.sqrt(variance(x, -2) + e) * g + b,
    "norm-over-batch": lambda x, g, b, e: (x - mean(x, 0)) / np.sqrt(variance(x, 0) + e) * g + b,
    "norm-over-everything": lambda x, g, b, e: (x - x.mean()) / np.sqrt(x.var() + e) * g + b,
    "norm-over-both": lambda x, g, b, e: (x - mean(x, (-1, -2))) / np.sqrt(variance(x, (-1, -2)) + e) * g + b,
    "norm-as-batch-norm": lambda x, g, b, e: (x - mean(x, (0, 1))) / np.sqrt(variance(x, (0, 1)) + e) * g + b,
    "unbiased-no-eps": lambda x, g, b, e: layer(x, g, b, 0) * np.sqrt((x.shape[-1] - 1) / x.shape[-1]),
}
RMS: dict[str, Norm] = {
    "eps-outside": lambda x, g, b, e: x / (np.sqrt(mean(x**2)) + e) * g,
    "rms-sum": lambda x, g, b, e: x / np.sqrt((x**2).sum(-1, keepdims=True) + e) * g,
    "no-root": lambda x, g, b, e: x / (mean(x**2) + e) * g,
    "no-eps": lambda x, g, b, e: rms(x, g, b, 0.0),
    "gamma-unused": lambda x, g, b, e: rms(x, np.ones_like(g), b, e),
    "rms-centred": lambda x, g, b, e: (x - mean(x)) / np.sqrt(variance(x) + e) * g,
    "rms-centred.numerator": lambda x, g, b, e: (x - mean(x)) / np.sqrt(mean(x**2) + e) * g,
    "rms-by-deviation": lambda x, g, b, e: x / np.sqrt(variance(x) + e) * g,
    "rms-of-mean": lambda x, g, b, e: x / np.sqrt(mean(x) ** 2 + e) * g,
    "rms-multiplied": lambda x, g, b, e: x * np.sqrt(mean(x**2) + e) * g,
    "norm-over-positions": lambda x, g, b, e: x / np.sqrt(mean(x**2, -2) + e) * g,
    "norm-over-everything": lambda x, g, b, e: x / np.sqrt((x**2).mean() + e) * g,
    "norm-over-both": lambda x, g, b, e: x / np.sqrt(mean(x**2, (-1, -2)) + e) * g,
}
BANK = {"layer_norm": LAYER, "rms_norm": RMS}
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-9, 1e-7, 1e-4, 1e-3, 1e-10, float(np.finfo(float).eps))


class NormAdapter:
    """The learner's norm, with its γ, β and ε set by us."""

    def __init__(self, candidate: Candidate, D: int) -> None:
        self.engine = candidate.engine()
        self.thing = self.engine.eval_mode(candidate.instantiate(ProbeSizes(D=D, H=1)))
        self.caller = candidate.caller(self.thing, ("x", "gamma", "beta", "eps"), ProbeSizes(D=D, H=1))
        vectors = [w.array.size for w in iter_weights(self.thing)] if not candidate.is_function else []
        self.D = D = D if D in vectors or not vectors else vectors[0]
        self.held = [w for w in iter_weights(self.thing) if w.array.size == D] if not candidate.is_function else []
        self.g = np.array([2.0, -1.0, 3.0, 1.0, -2.0, 0.5] * D)[:D]
        self.b = np.array([1.0, 0.0, -1.0, 2.0, 3.0, -2.0] * D)[:D]
        self.is_first = [float(w.array.ravel()[0]) for w in self.held]
        self.gamma, self.beta = self.place(candidate)
        self.eps, self.eps_given = self.epsilon()

    def place(self, candidate: Candidate) -> tuple[Weight | None, Weight | None]:
        """Find γ and β: by name, or else by their initial values."""
        gamma: Weight | None = None
        beta: Weight | None = None
        for weight in self.held:
            role = role_of(weight.path.split(".")[-1], ("gamma", "beta"))
            if role == "beta" or (role is None and not weight.array.any() and gamma is not None):
                beta = beta or weight
            else:
                gamma = gamma or weight
        for place, value in ((gamma, self.g), (beta, self.b)):
            if place is not None:
                place.set(value.reshape(place.array.shape))
        return gamma, beta

    def epsilon(self) -> tuple[float | None, bool]:
        if "eps" in self.caller.argument_roles:
            return 0.25, True
        for name, value in getattr(self.thing, "__dict__", {}).items():
            if role_of(name, ("eps",)) and isinstance(value, float):
                try:
                    setattr(self.thing, name, 0.25)
                    return 0.25, False
                except AttributeError:
                    return value, False
        return None, False

    def has(self, role: str) -> bool:
        return role in self.caller.argument_roles or (self.gamma if role == "gamma" else self.beta) is not None

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.cast_module(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=find_forward(thing))
        given: dict[str, Any] = {}
        for role, value in (("gamma", self.g), ("beta", self.b), ("eps", self.eps)):
            if role in caller.argument_roles and (role != "eps" or self.eps_given):
                given[role] = value
        return caller(x=inputs["x"], **given) if "x" in caller.argument_roles else caller(inputs["x"], **given)

    def value(self, norm: Norm, x: Array, eps: float) -> Array:
        g = self.g if self.has("gamma") else np.ones(self.D)
        b = self.b if self.has("beta") else np.zeros(self.D)
        with np.errstate(all="ignore"):
            return norm(x, g, b, eps)


def cases(D: int) -> list[Array]:
    """Return inputs of ordinary magnitude, and so small that ε matters."""
    x = common.rng(0).normal(size=(2, 3, D)) + 0.5
    return [x, x * 1e-3]


def agrees(adapter: NormAdapter, run: Runner, norm: Norm, eps: float, got: list[Any]) -> bool:
    return all(
        equal(out, adapter.value(norm, x, eps), max(run.engine.tolerance, 1e-7) if x is not None else 0)
        for x, out in zip(cases(adapter.D), got, strict=True)
    )


def check(candidate: Candidate, recorder: Recorder) -> None:
    adapter = NormAdapter(candidate, 6)
    part = candidate.part
    run = Runner(adapter.native, adapter.engine, lambda inputs: inputs["x"].shape)
    recorder.start("shapes")
    got = []
    for x in cases(adapter.D):
        out, error = run.attempt({"x": x})
        if out is None and lacks_keepdims(adapter, run, candidate.part):
            recorder.add("keepdims-missing", Example({"x": [2, 3, adapter.D]}, [2, 3, adapter.D], error), error=error)
            return
        if out is None:
            recorder.cannot_run(error, {"x": [2, 3, adapter.D]})
            return
        got.append(out)
    if not common.check_deterministic(recorder, run, {"x": cases(adapter.D)[0]}):
        return
    recorder.start("value")
    epsilons = (adapter.eps,) if adapter.eps is not None else EPSILONS
    says_layer = part == "rms_norm" or "layer" in candidate.name.lower() or "ln" in candidate.name.lower()
    if not says_layer and any(agrees(adapter, run, rms, e, got) for e in epsilons):  # `norm` may mean either
        part = "rms_norm"
        recorder.assume("is_rms")
    right: Norm = RIGHT[part]
    eps = next((e for e in epsilons if agrees(adapter, run, right, e, got)), None)
    for name, variant in VARIANTS[part].items() if eps is None else ():
        eps = next((e for e in epsilons if eps is None and agrees(adapter, run, variant, e, got)), eps)
        if eps is not None:
            recorder.assume(name.split(".")[0])
            right = variant
            break
    is_bare = part == "layer_norm" and not adapter.has("gamma")
    if eps is None:
        add_mistake(candidate, adapter, recorder, run, got, epsilons, is_bare)
        return
    if is_bare and candidate.is_class:
        recorder.add("gamma-beta-missing")
    elif candidate.is_function and not adapter.has("gamma"):
        recorder.assume("without_gamma")
    check_start(candidate, adapter, recorder)
    common.check_inputs_unchanged(recorder, run, [{"x": cases(adapter.D)[0]}])
    constant_row(adapter, recorder, run, right, eps)
    common.check_gradient(recorder, run, {"x": cases(adapter.D)[0]})
    common.check_device(recorder, run, {"x": cases(adapter.D)[0]}, adapter.thing)
    if recorder.is_clean:
        whole = np.resize([1.0, 2.0, 3.0, 6.0, 0.0, 0.0], (1, 1, adapter.D))
        common.check_float16(recorder, run, {"x": whole}, adapter.value(right, whole, eps))


def lacks_keepdims(adapter: NormAdapter, run: Runner, part: str) -> bool:
    """Return True if a square input runs, with wrong numbers, though [2, 3, D] fails."""
    x = common.rng(0).normal(size=(adapter.D, adapter.D))
    got, _ = run.attempt({"x": x})
    g = adapter.g if adapter.has("gamma") else np.ones(adapter.D)
    b = adapter.b if adapter.has("beta") else np.zeros(adapter.D)
    for e, (mean_axis, var_axis) in product(
        (adapter.eps,) if adapter.eps is not None else EPSILONS, ((True, False), (False, True), (False, False))
    ):
        middle = x.mean(-1, keepdims=mean_axis) if part == "layer_norm" else 0.0
        spread = x.var(-1, keepdims=var_axis) if part == "layer_norm" else (x**2).mean(-1)
        if equal(got, (x - middle) / np.sqrt(spread + e) * g + b * (part == "layer_norm"), 1e-5):
            return True
    return False


def add_mistake(
    candidate: Candidate,
    adapter: NormAdapter,
    recorder: Recorder,
    run: Runner,
    got: list[Any],
    epsilons: Any,
    is_bare: bool,
) -> None:
    right, eps = RIGHT[candidate.part], epsilons[0]
    key = "value"
    for e in epsilons:
        for name, norm in BANK[candidate.part].items():
            if key == "value" and agrees(adapter, run, norm, e, got):
                key, eps = name.split(".")[0], e
    if got[0].shape != (2, 3, adapter.D):
        key = "wrong-shape"
    example = None
    for D in (2, 3, 6):
        try:
            small = NormAdapter(candidate, D)
        except Exception:
            continue
        if small.eps is None:
            small.eps = eps
        runner = Runner(small.native, small.engine, lambda inputs: inputs["x"].shape)
        example = example or common.smallest_failure(
            ladder(D), runner, partial(expected_value, small, right), shown_weights(small)
        )
    recorder.add(key, example)
    if is_bare and candidate.is_class:
        recorder.add("gamma-beta-missing")


def expected_value(adapter: NormAdapter, right: Norm, case: Inputs) -> Array:
    return adapter.value(right, case["x"], adapter.eps or 0)


def shown_weights(adapter: NormAdapter) -> dict[str, Any]:
    found: dict[str, Any] = {"γ": adapter.g} if adapter.has("gamma") else {}
    return found | ({"β": adapter.b} if adapter.has("beta") else {}) | {"ε": adapter.eps}


def ladder(D: int) -> Iterator[dict[str, Any]]:
    for rows in (1, 2):
        for seed in range(3):
            yield {"x": common.small_integers(common.rng(seed + 1), 1, rows, D, top=3)}
    yield {"x": cases(D)[0]}
    yield {"x": cases(D)[1]}


def check_start(candidate: Candidate, adapter: NormAdapter, recorder: Recorder) -> None:
    """Check that γ starts at 1 and β at 0."""
    recorder.start("start")
    if not candidate.is_class:
        return
    values = dict(zip([w.path for w in adapter.held], adapter.is_first, strict=True))
    gain = 0.0 if "gain_from_zero" in recorder.assumed else 1.0
    for weight, wanted in ((adapter.gamma, gain), (adapter.beta, 0.0)):
        if weight is not None and values.get(weight.path) != wanted:
            recorder.add("norm-start", Example({}, wanted, values.get(weight.path)), weight=weight.path)
    unregistered = [w.path for w in adapter.held if not w.registered]
    if unregistered:
        recorder.add("unregistered", weights=", ".join(unregistered))


def constant_row(adapter: NormAdapter, recorder: Recorder, run: Runner, right: Norm, eps: float) -> None:
    recorder.start("constant_row")
    x = np.zeros((1, 1, adapter.D))
    got, error = run.attempt({"x": x})
    if not equal(got, adapter.value(right, x, eps)):
        recorder.add("no-eps", Example({"x": x}, adapter.value(right, x, eps), error or got))


__all__ = ["check", "parameters_of"]
