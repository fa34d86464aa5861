"""Layer norm and RMS norm, as functions with γ and β or as classes that hold them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from ..engine import NumPy, equal
from ..finding import Example
from ..names import role_of
from ..suspect import Caller, Sizes, Suspect, forward_of, parameters_of
from ..weights import Weight, walk
from . import common
from .common import Inputs, Runner, Voice

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


RIGHT = {"layer_norm": layer, "rms_norm": rms}
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
EPSILONS = (1e-5, 1e-6, 1e-8, 1e-12, 1e-9, 1e-7, 1e-4, 1e-3, 1e-10)


class Subject:
    """The norm with its own γ, β and ε, all of them known to us."""

    def __init__(self, suspect: Suspect, D: int) -> None:
        self.engine = suspect.engine()
        self.thing = self.engine.quiet(suspect.made(Sizes(D=D, H=1)))
        self.caller = Caller(forward_of(self.thing), self.engine, ("x", "gamma", "beta", "eps"), Sizes(D=D, H=1))
        self.D = D
        self.held = [w for w in walk(self.thing) if w.array.size == D] if not suspect.is_function else []
        self.g = np.array([2.0, -1.0, 3.0, 1.0, -2.0, 0.5] * D)[:D]
        self.b = np.array([1.0, 0.0, -1.0, 2.0, 3.0, -2.0] * D)[:D]
        self.is_first = [float(w.array.ravel()[0]) for w in self.held]
        self.gamma, self.beta = self.place(suspect)
        self.eps, self.eps_given = self.epsilon()

    def place(self, suspect: Suspect) -> tuple[Weight | None, Weight | None]:
        """Which held array is γ, which β: by name, else by what they start as."""
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
        if "eps" in self.caller.known:
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
        return role in self.caller.known or (self.gamma if role == "gamma" else self.beta) is not None

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.halved(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=forward_of(thing))
        given: dict[str, Any] = {}
        for role, value in (("gamma", self.g), ("beta", self.b), ("eps", self.eps)):
            if role in caller.known and (role != "eps" or self.eps_given):
                given[role] = value
        return caller(x=inputs["x"], **given) if "x" in caller.known else caller(inputs["x"], **given)

    def value(self, norm: Norm, x: Array, eps: float) -> Array:
        g = self.g if self.has("gamma") else np.ones(self.D)
        b = self.b if self.has("beta") else np.zeros(self.D)
        with np.errstate(all="ignore"):
            return norm(x, g, b, eps)


def cases(D: int) -> list[Array]:
    """Of ordinary size, and so small that ε is seen."""
    x = common.rng(0).normal(size=(2, 3, D)) + 0.5
    return [x, x * 1e-3]


def agrees(subject: Subject, run: Runner, norm: Norm, eps: float, got: list[Any]) -> bool:
    return all(
        equal(out, subject.value(norm, x, eps), max(run.engine.tolerance, 1e-7) if x is not None else 0)
        for x, out in zip(cases(subject.D), got, strict=True)
    )


def check(suspect: Suspect, voice: Voice) -> None:
    subject = Subject(suspect, 6)
    run = Runner(subject.native, subject.engine, lambda inputs: inputs["x"].shape)
    voice.at("shapes")
    got = []
    for x in cases(subject.D):
        out, error = run.attempt({"x": x})
        if out is None:
            voice.say("raises", Example({"x": "[2, 3, 6]"}, None, error), error=error)
            return
        got.append(out)
    if not common.repeats(voice, run, {"x": cases(6)[0]}):
        return
    voice.at("value")
    right = RIGHT[suspect.part]
    epsilons = (subject.eps,) if subject.eps is not None else EPSILONS
    eps = next((e for e in epsilons if agrees(subject, run, right, e, got)), None)
    is_bare = suspect.part == "layer_norm" and not subject.has("gamma")
    if eps is None:
        report(suspect, subject, voice, run, got, epsilons, is_bare)
        return
    if is_bare and suspect.is_class:
        voice.say("gamma-beta-missing")
    elif suspect.is_function and not subject.has("gamma"):
        voice.assume("without_gamma")
    starts(suspect, subject, voice)
    common.keeps_inputs(voice, run, [{"x": cases(6)[0]}])
    constant_row(subject, voice, run, right, eps)
    common.has_gradient(voice, run, {"x": cases(6)[0]})
    common.keeps_device(voice, run, {"x": cases(6)[0]}, subject.thing)
    if voice.is_clean:
        whole = np.array([[[1.0, 2.0, 3.0, 6.0, 0.0, 0.0]]])
        common.works_in_half(voice, run, {"x": whole}, subject.value(right, whole, eps))


def report(
    suspect: Suspect, subject: Subject, voice: Voice, run: Runner, got: list[Any], epsilons: Any, is_bare: bool
) -> None:
    right, eps = RIGHT[suspect.part], epsilons[0]
    key = "value"
    for e in epsilons:
        for name, norm in BANK[suspect.part].items():
            if key == "value" and agrees(subject, run, norm, e, got):
                key, eps = name.split(".")[0], e
    if got[0].shape != (2, 3, 6):
        key = "wrong-shape"
    example = None
    for D in (2, 3, 6):
        try:
            small = Subject(suspect, D)
        except Exception:
            continue
        if small.eps is None:
            small.eps = eps
        runner = Runner(small.native, small.engine, lambda inputs: inputs["x"].shape)
        example = example or common.smallest(ladder(D), runner, partial(wanted, small, right), held(small))
    voice.say(key, example)
    if is_bare and suspect.is_class:
        voice.say("gamma-beta-missing")


def wanted(subject: Subject, right: Norm, case: Inputs) -> Array:
    return subject.value(right, case["x"], subject.eps or 0)


def held(subject: Subject) -> dict[str, Any]:
    found: dict[str, Any] = {"γ": subject.g} if subject.has("gamma") else {}
    return found | ({"β": subject.b} if subject.has("beta") else {}) | {"ε": subject.eps}


def ladder(D: int) -> Iterator[dict[str, Any]]:
    for rows in (1, 2):
        for seed in range(3):
            yield {"x": common.whole(common.rng(seed + 1), 1, rows, D, top=3)}
    yield {"x": cases(D)[0]}
    yield {"x": cases(D)[1]}


def starts(suspect: Suspect, subject: Subject, voice: Voice) -> None:
    """γ starts at 1 and β at 0, so that a new norm only norms."""
    voice.at("start")
    if not suspect.is_class:
        return
    values = dict(zip([w.path for w in subject.held], subject.is_first, strict=True))
    for weight, wanted in ((subject.gamma, 1.0), (subject.beta, 0.0)):
        if weight is not None and values.get(weight.path) != wanted:
            voice.say("norm-start", Example({}, wanted, values.get(weight.path)), weight=weight.path)
    unregistered = [w.path for w in subject.held if not w.registered]
    if unregistered:
        voice.say("unregistered", weights=", ".join(unregistered))


def constant_row(subject: Subject, voice: Voice, run: Runner, right: Norm, eps: float) -> None:
    voice.at("constant_row")
    x = np.zeros((1, 1, 6))
    got, error = run.attempt({"x": x})
    if not equal(got, subject.value(right, x, eps)):
        voice.say("no-eps", Example({"x": x}, subject.value(right, x, eps), error or got))


__all__ = ["check", "parameters_of"]
