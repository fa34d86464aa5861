"""Feed-forward layers: W₂ act(W₁x + b₁) + b₂, and the gated kind, W_down (silu(W_gate x) ∘ W_up x)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from clearhead.reference import gelu, gelu_tanh, relu, relu2, silu

from ..engine import NumPy, equal
from ..finding import Example
from ..names import role_of
from ..suspect import Caller, CannotCall, Sizes, Suspect, forward_of
from ..weights import Weight, keys_of, walk
from . import common
from .common import Inputs, Runner, Voice

Array = np.ndarray
Act = Callable[[Array], Array]
ACTS: dict[str, Act] = {
    "relu": relu,
    "gelu": gelu,
    "gelu_tanh": gelu_tanh,
    "silu": silu,
    "relu2": relu2,
    "leaky": lambda x: np.where(x > 0, x, 0.01 * x),
    "elu": lambda x: np.where(x > 0, x, np.expm1(np.minimum(x, 0))),
}


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


@dataclass
class Layer:
    """One linear map with its bias, out of the learner's weights."""

    matrix: Array  # [out, in]
    bias: Array | float = 0.0

    def __call__(self, x: Array) -> Array:
        return x @ self.matrix.T + self.bias


Plain = Callable[[Array, Layer, Layer, Act], Array]
MISTAKES: dict[str, Plain] = {
    "ffn-no-activation": lambda x, a, b, act: b(a(x)),
    "ffn-activation-last": lambda x, a, b, act: act(b(a(x))),
    "ffn-activation-both": lambda x, a, b, act: act(b(act(a(x)))),
    "residual-inside": lambda x, a, b, act: x + b(act(a(x))),
    "ffn-activation-first": lambda x, a, b, act: b(a(act(x))),
    "ffn-softmax": lambda x, a, b, act: b(np.exp(a(x)) / np.exp(a(x)).sum(-1, keepdims=True)),
    "ffn-sigmoid": lambda x, a, b, act: b(sigmoid(a(x))),
    "ffn-sigmoid.tanh": lambda x, a, b, act: b(np.tanh(a(x))),
    "bias-unused": lambda x, a, b, act: Layer(b.matrix)(act(Layer(a.matrix)(x))),
    "bias-unused.first": lambda x, a, b, act: b(act(Layer(a.matrix)(x))),
    "bias-unused.second": lambda x, a, b, act: Layer(b.matrix)(act(a(x))),
}
Gated = Callable[[Array, Layer, Layer, Layer, Act], Array]
GATED: dict[str, Gated] = {
    "glu-sigmoid": lambda x, g, u, d, act: d(sigmoid(g(x)) * u(x)),
    "glu-both": lambda x, g, u, d, act: d(act(g(x)) * act(u(x))),
    "glu-after": lambda x, g, u, d, act: d(act(g(x) * u(x))),
    "glu-sum": lambda x, g, u, d, act: d(act(g(x)) + u(x)),
    "glu-no-activation": lambda x, g, u, d, act: d(g(x) * u(x)),
    "glu-gate-unused": lambda x, g, u, d, act: d(act(u(x))),
    "residual-inside": lambda x, g, u, d, act: x + d(act(g(x)) * u(x)),
}


class Subject:
    def __init__(self, suspect: Suspect, D: int, F: int) -> None:
        self.engine = suspect.engine()
        sizes = Sizes(D=D, H=1, F=F)
        self.thing = self.engine.quiet(suspect.made(sizes))
        self.caller = Caller(forward_of(self.thing), self.engine, ("x", "training"), sizes)
        self.D = D
        self.given: dict[str, Any] = {}
        self.layers = list(self.from_arguments(F, suspect) if suspect.is_function else self.from_weights())

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.halved(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=forward_of(thing)).having(**self.given)
        return caller(x=inputs["x"]) if "x" in caller.known else caller(inputs["x"])

    def from_weights(self) -> Iterator[list[Layer]]:
        weights = [w for w in walk(self.thing) if w.array.ndim in (1, 2)]
        matrices = [w for w in weights if w.array.ndim == 2]
        biases = [w for w in weights if w.array.ndim == 1 or 1 in w.array.shape]
        matrices = [w for w in matrices if w not in biases or w.linear]
        yield from self.read(matrices, [b.array.ravel() for b in biases if b not in matrices])

    def read(self, matrices: list[Weight], biases: list[Array]) -> Iterator[list[Layer]]:
        """[out, in] by the sizes, since D ≠ F; the k-th bias that fits belongs to the k-th matrix."""
        layers, rest = [], list(biases)
        for index, weight in enumerate(matrices):
            a = weight.array
            is_last = index == len(matrices) - 1
            wanted_in = self.D if not is_last else None
            matrix = a if weight.linear or (a.shape[1] == wanted_in or (is_last and a.shape[0] == self.D)) else a.T
            bias = next((i for i, b in enumerate(rest) if b.shape[0] == matrix.shape[0]), None)
            layers.append(Layer(matrix, 0.0 if bias is None else rest.pop(bias)))
        if layers:
            yield layers

    def from_arguments(self, F: int, suspect: Suspect) -> Iterator[list[Layer]]:
        """ffn(x, W1, b1, W2, b2), or dicts of W and b: we make the weights, as x @ W and as W @ x."""
        generator = common.rng(5)
        names = [p.name for p in self.caller.parameters if role_of(p.name, ("x",)) is None and p.default is p.empty]
        matrices = [n for n in names if n.lower().startswith(("w", "k", "u", "v", "gate", "up", "down"))]
        bundles = {n: keys for n in names if (keys := keys_of(n, suspect))}
        matrices = list(bundles) or matrices
        if len(matrices) not in (2, 3):
            raise CannotCall(", ".join(names))
        for first in ((self.D, F), (F, self.D)):
            self.given, layers = {}, []
            for index, name in enumerate(matrices):
                is_last = index == len(matrices) - 1
                shape = first[::-1] if is_last else first
                value = generator.normal(size=shape)
                self.given[name] = value
                out = self.D if is_last else F
                layers.append(Layer(value if value.shape[0] == out else value.T))
            for index, name in enumerate(n for n in names if n not in matrices):
                size = layers[min(index, len(layers) - 1)].matrix.shape[0]
                self.given[name] = layers[min(index, len(layers) - 1)].bias = generator.normal(size=size)
            for layer, (name, keys) in zip(layers, bundles.items(), strict=False):
                layer.bias = generator.normal(size=layer.matrix.shape[0])
                self.given[name] = dict(zip(keys, (self.given[name], layer.bias), strict=True))
            try:
                Runner(self.native, self.engine, lambda i: i["x"].shape)({"x": np.ones((1, 2, self.D))})
            except Exception:
                continue
            yield layers
            return


def right(x: Array, layers: list[Layer], act: Act) -> Array:
    if len(layers) == 3:
        return layers[2](act(layers[0](x)) * layers[1](x))
    return layers[1](act(layers[0](x)))


def orders(layers: list[Layer], D: int) -> Iterator[list[Layer]]:
    """Gate, up and down in any order of definition: down is the one that ends in D."""
    if len(layers) == 2:
        yield layers
        return
    for order in permutations(layers):
        if order[2].matrix.shape[0] == D and order[0].matrix.shape == order[1].matrix.shape:
            yield list(order)


def check(suspect: Suspect, voice: Voice) -> None:
    voice.at("shapes")
    subject = Subject(suspect, 6, 10)
    run = Runner(subject.native, subject.engine, lambda inputs: inputs["x"].shape)
    x = common.rng(0).normal(size=(2, 3, 6))
    got, error = run.attempt({"x": x})
    if got is None or got.shape != x.shape:
        voice.say(
            "raises" if error else "wrong-shape",
            Example({"x": "[2, 3, 6]"}, [2, 3, 6], error or (None if got is None else list(got.shape))),
            error=error,
        )
        return
    if not common.repeats(voice, run, {"x": x}):
        return
    voice.at("value")
    registered(subject, voice)
    layers = subject.layers[0] if subject.layers else []
    layers = unfused(layers)
    if len(layers) == 3 and layers[0].matrix.shape != layers[1].matrix.shape and suspect.part == "feed_forward":
        layers = []
    if len(layers) == 1 and layers[0].matrix.shape[0] == 2 * layers[0].matrix.shape[1]:
        layers = []
    if len(layers) not in (2, 3):
        voice.assume("weights_not_found")
        positionwise(voice, run)
        return
    found = agreeing(layers, x, got, subject)
    if found is None:
        report(suspect, voice, subject, run, layers, x, got)
    else:
        voice.assume(f"activation_{found}")
        if suspect.part == "swiglu" and len(layers) == 2:
            voice.say("glu-gate-missing")
        elif suspect.part == "swiglu" and "swi" in suspect.name.lower() and found != "silu":
            voice.say("glu-activation", activation=found)
    common.keeps_inputs(voice, run, [{"x": x}])
    common.has_gradient(voice, run, {"x": x})
    common.keeps_device(voice, run, {"x": x}, subject.thing)
    dropout_scales(suspect, voice, x)


def unfused(layers: list[Layer]) -> list[Layer]:
    """Gate and up in one matrix, twice as high as the width that down takes."""
    if len(layers) != 2 or layers[0].matrix.shape[0] != 2 * layers[1].matrix.shape[1]:
        return layers
    half = layers[1].matrix.shape[1]
    biases = [layers[0].bias] * 2 if isinstance(layers[0].bias, float) else np.split(layers[0].bias, 2)
    return [Layer(layers[0].matrix[:half], biases[0]), Layer(layers[0].matrix[half:], biases[1]), layers[1]]


def agreeing(layers: list[Layer], x: Array, got: Array, subject: Subject) -> str | None:
    for order in orders(layers, subject.D):
        for name, act in ACTS.items():
            if equal(got, right(x, order, act), max(subject.engine.tolerance, 1e-6)):
                return name
    return None


def report(
    suspect: Suspect, voice: Voice, subject: Subject, run: Runner, layers: list[Layer], x: Array, got: Array
) -> None:
    key = "value"
    with np.errstate(all="ignore"):
        for order in orders(layers, subject.D):
            for act in ACTS.values():
                bank: dict[str, Any] = GATED if len(order) == 3 else MISTAKES
                for name, wrong in bank.items():
                    if key == "value" and equal(got, wrong(x, *order, act), run.engine.tolerance):
                        key = name.split(".")[0]
    example = mixing(run) if key == "value" else None
    if example is not None:
        voice.say("ffn-mixes-positions", example)
        return
    for D, F in ((1, 2), (2, 3), (3, 4), (6, 10)):
        try:
            small = Subject(suspect, D, F)
            x = common.whole(common.rng(2), 1, 2, D)
            value, error = Runner(small.native, small.engine, lambda i: i["x"].shape).attempt({"x": x})
            wants = [right(x, order, act) for order in orders(unfused(small.layers[0]), D) for act in ACTS.values()]
        except Exception:
            continue
        if wants and not any(equal(value, want, 1e-5) for want in wants):
            named = {f"W{i + 1}": layer.matrix for i, layer in enumerate(small.layers[0])}
            want = wants[3 if len(small.layers[0]) == 3 else 0]
            example = Example({"x": x}, want, error or value, named)
            break
    voice.say(key, example)


def registered(subject: Subject, voice: Voice) -> None:
    loose = [w.path for w in walk(subject.thing) if not w.registered]
    if loose:
        voice.say("unregistered", weights=", ".join(loose[:3]))


def mixing(run: Runner) -> Example | None:
    """A change in the second position that shows in the first."""
    for B in (1, 2):
        x = common.whole(common.rng(0), B, 2, 6)
        other = x.copy()
        other[:, 1:] += common.whole(common.rng(1), B, 1, 6)
        one, two = run.attempt({"x": x})[0], run.attempt({"x": other})[0]
        if one is not None and two is not None and not equal(one[:, 0], two[:, 0], run.engine.tolerance):
            return Example({"x": x, "and": other}, one[0, 0], two[0, 0])
    return None


def positionwise(voice: Voice, run: Runner) -> None:
    voice.at("positions")
    example = mixing(run)
    if example is not None:
        voice.say("ffn-mixes-positions", example)


def dropout_scales(suspect: Suspect, voice: Voice, x: Array) -> None:
    def value(module: Any, batch: Array) -> Any:
        caller = Caller(forward_of(module), suspect.engine(), ("x",), Sizes(D=6, H=1, F=10))
        return caller(x=batch) if "x" in caller.known else caller(batch)

    common.dropout_scales(voice, Sizes(D=6, H=1, F=10), value, x[:1, :1])
