"""Feed-forward layers: W₂ act(W₁x + b₁) + b₂, and the gated kind, W_down (silu(W_gate x) ∘ W_up x)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import numpy as np

from clearhead.reference import gelu, gelu_tanh, relu, relu2, silu

from ..candidate import Caller, Candidate, CannotCall, Sizes, find_forward
from ..diagnostic import Example
from ..engine import NumPy, equal
from ..names import role_of
from ..weights import Weight, dict_keys, iter_weights
from . import common
from .common import Inputs, Recorder, Runner

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
class LinearMap:
    """One linear map with its bias, read from the learner's weights."""

    matrix: Array  # [out, in]
    bias: Array | float = 0.0

    def __call__(self, x: Array) -> Array:
        return x @ self.matrix.T + self.bias


Plain = Callable[[Array, LinearMap, LinearMap, Act], Array]
MISTAKES: dict[str, Plain] = {
    "ffn-no-activation": lambda x, a, b, act: b(a(x)),
    "ffn-activation-last": lambda x, a, b, act: act(b(a(x))),
    "ffn-activation-both": lambda x, a, b, act: act(b(act(a(x)))),
    "residual-inside": lambda x, a, b, act: x + b(act(a(x))),
    "ffn-activation-first": lambda x, a, b, act: b(a(act(x))),
    "ffn-softmax": lambda x, a, b, act: b(np.exp(a(x)) / np.exp(a(x)).sum(-1, keepdims=True)),
    "ffn-sigmoid": lambda x, a, b, act: b(sigmoid(a(x))),
    "ffn-sigmoid.tanh": lambda x, a, b, act: b(np.tanh(a(x))),
    "bias-unused": lambda x, a, b, act: LinearMap(b.matrix)(act(LinearMap(a.matrix)(x))),
    "bias-unused.first": lambda x, a, b, act: b(act(LinearMap(a.matrix)(x))),
    "bias-unused.second": lambda x, a, b, act: LinearMap(b.matrix)(act(a(x))),
}
Gated = Callable[[Array, LinearMap, LinearMap, LinearMap, Act], Array]
GATED: dict[str, Gated] = {
    "glu-sigmoid": lambda x, g, u, d, act: d(sigmoid(g(x)) * u(x)),
    "glu-both": lambda x, g, u, d, act: d(act(g(x)) * act(u(x))),
    "glu-after": lambda x, g, u, d, act: d(act(g(x) * u(x))),
    "glu-sum": lambda x, g, u, d, act: d(act(g(x)) + u(x)),
    "glu-no-activation": lambda x, g, u, d, act: d(g(x) * u(x)),
    "glu-gate-unused": lambda x, g, u, d, act: d(act(u(x))),
    "residual-inside": lambda x, g, u, d, act: x + d(act(g(x)) * u(x)),
}


class FeedForwardAdapter:
    def __init__(self, candidate: Candidate, D: int, F: int) -> None:
        self.engine = candidate.engine()
        sizes = Sizes(D=D, H=1, F=F)
        self.thing = self.engine.eval_mode(candidate.instantiate(sizes))
        self.caller = Caller(find_forward(self.thing), self.engine, ("x", "training"), sizes)
        self.D = D
        self.given: dict[str, Any] = {}
        self.layers = list(self.from_arguments(F, candidate) if candidate.is_function else self.from_weights())

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.cast_module(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=find_forward(thing)).with_fixed(**self.given)
        return caller(x=inputs["x"]) if "x" in caller.argument_roles else caller(inputs["x"])

    def from_weights(self) -> Iterator[list[LinearMap]]:
        weights = [w for w in iter_weights(self.thing) if w.array.ndim in (1, 2)]
        matrices = [w for w in weights if w.array.ndim == 2]
        biases = [w for w in weights if w.array.ndim == 1 or 1 in w.array.shape]
        matrices = [w for w in matrices if w not in biases or w.linear]
        yield from self.read(matrices, [b.array.ravel() for b in biases if b not in matrices])

    def read(self, matrices: list[Weight], biases: list[Array]) -> Iterator[list[LinearMap]]:
        """Orient each matrix as [out, in] by its sizes (D ≠ F), and assign the biases in order."""
        layers, rest = [], list(biases)
        for index, weight in enumerate(matrices):
            a = weight.array
            is_last = index == len(matrices) - 1
            wanted_in = self.D if not is_last else None
            matrix = a if weight.linear or (a.shape[1] == wanted_in or (is_last and a.shape[0] == self.D)) else a.T
            bias = next((i for i, b in enumerate(rest) if b.shape[0] == matrix.shape[0]), None)
            layers.append(LinearMap(matrix, 0.0 if bias is None else rest.pop(bias)))
        if layers:
            yield layers

    def from_arguments(self, F: int, candidate: Candidate) -> Iterator[list[LinearMap]]:
        """Make weights for a function that takes them: ffn(x, W1, b1, W2, b2)."""
        generator = common.rng(5)
        names = [p.name for p in self.caller.parameters if role_of(p.name, ("x",)) is None and p.default is p.empty]
        matrices = [n for n in names if n.lower().startswith(("w", "k", "u", "v", "gate", "up", "down"))]
        bundles = {n: keys for n in names if (keys := dict_keys(n, candidate))}
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
                layers.append(LinearMap(value if value.shape[0] == out else value.T))
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


def right(x: Array, layers: list[LinearMap], act: Act) -> Array:
    if len(layers) == 3:
        return layers[2](act(layers[0](x)) * layers[1](x))
    return layers[1](act(layers[0](x)))


def orders(layers: list[LinearMap], D: int) -> Iterator[list[LinearMap]]:
    """Yield the possible orders of gate, up and down. The last one must end in D."""
    if len(layers) == 2:
        yield layers
        return
    for order in permutations(layers):
        if order[2].matrix.shape[0] == D and order[0].matrix.shape == order[1].matrix.shape:
            yield list(order)


def check(candidate: Candidate, recorder: Recorder) -> None:
    recorder.start("shapes")
    adapter = FeedForwardAdapter(candidate, 6, 10)
    run = Runner(adapter.native, adapter.engine, lambda inputs: inputs["x"].shape)
    x = common.rng(0).normal(size=(2, 3, 6))
    got, error = run.attempt({"x": x})
    if got is None or got.shape != x.shape:
        recorder.add(
            "raises" if error else "wrong-shape",
            Example({"x": "[2, 3, 6]"}, [2, 3, 6], error or (None if got is None else list(got.shape))),
            error=error,
        )
        return
    if not common.check_deterministic(recorder, run, {"x": x}):
        return
    recorder.start("value")
    check_weights_registered(adapter, recorder)
    layers = adapter.layers[0] if adapter.layers else []
    layers = split_fused(layers)
    if len(layers) == 3 and layers[0].matrix.shape != layers[1].matrix.shape and candidate.part == "feed_forward":
        layers = []
    if len(layers) == 1 and layers[0].matrix.shape[0] == 2 * layers[0].matrix.shape[1]:
        layers = []
    if len(layers) not in (2, 3):
        recorder.assume("weights_not_found")
        check_positionwise(recorder, run)
        return
    found = matching_activation(layers, x, got, adapter)
    if found is None:
        add_mistake(candidate, recorder, adapter, run, layers, x, got)
    else:
        recorder.assume(f"activation_{found}")
        if candidate.part == "swiglu" and len(layers) == 2:
            recorder.add("glu-gate-missing")
        elif candidate.part == "swiglu" and "swi" in candidate.name.lower() and found != "silu":
            recorder.add("glu-activation", activation=found)
    common.check_inputs_unchanged(recorder, run, [{"x": x}])
    common.check_gradient(recorder, run, {"x": x})
    common.check_device(recorder, run, {"x": x}, adapter.thing)
    check_dropout_mean(candidate, recorder, x)


def split_fused(layers: list[LinearMap]) -> list[LinearMap]:
    """Split a fused gate-and-up matrix in two."""
    if len(layers) != 2 or layers[0].matrix.shape[0] != 2 * layers[1].matrix.shape[1]:
        return layers
    half = layers[1].matrix.shape[1]
    biases = [layers[0].bias] * 2 if isinstance(layers[0].bias, float) else np.split(layers[0].bias, 2)
    return [LinearMap(layers[0].matrix[:half], biases[0]), LinearMap(layers[0].matrix[half:], biases[1]), layers[1]]


def matching_activation(layers: list[LinearMap], x: Array, got: Array, adapter: FeedForwardAdapter) -> str | None:
    for order in orders(layers, adapter.D):
        for name, act in ACTS.items():
            if equal(got, right(x, order, act), max(adapter.engine.tolerance, 1e-6)):
                return name
    return None


def add_mistake(
    candidate: Candidate,
    recorder: Recorder,
    adapter: FeedForwardAdapter,
    run: Runner,
    layers: list[LinearMap],
    x: Array,
    got: Array,
) -> None:
    key = "value"
    with np.errstate(all="ignore"):
        for order in orders(layers, adapter.D):
            for act in ACTS.values():
                bank: dict[str, Any] = GATED if len(order) == 3 else MISTAKES
                for name, wrong in bank.items():
                    if key == "value" and equal(got, wrong(x, *order, act), run.engine.tolerance):
                        key = name.split(".")[0]
    example = mixing(run) if key == "value" else None
    if example is not None:
        recorder.add("ffn-mixes-positions", example)
        return
    for D, F in ((1, 2), (2, 3), (3, 4), (6, 10)):
        try:
            small = FeedForwardAdapter(candidate, D, F)
            x = common.small_integers(common.rng(2), 1, 2, D)
            value, error = Runner(small.native, small.engine, lambda i: i["x"].shape).attempt({"x": x})
            wants = [right(x, order, act) for order in orders(split_fused(small.layers[0]), D) for act in ACTS.values()]
        except Exception:
            continue
        if wants and not any(equal(value, want, 1e-5) for want in wants):
            name_mistake = {f"W{i + 1}": layer.matrix for i, layer in enumerate(small.layers[0])}
            want = wants[3 if len(small.layers[0]) == 3 else 0]
            example = Example({"x": x}, want, error or value, name_mistake)
            break
    recorder.add(key, example)


def check_weights_registered(adapter: FeedForwardAdapter, recorder: Recorder) -> None:
    loose = [w.path for w in iter_weights(adapter.thing) if not w.registered]
    if loose:
        recorder.add("unregistered", weights=", ".join(loose[:3]))


def mixing(run: Runner) -> Example | None:
    """Return an example in which a change at one position changes another position."""
    for B in (1, 2):
        x = common.small_integers(common.rng(0), B, 2, 6)
        other = x.copy()
        other[:, 1:] += common.small_integers(common.rng(1), B, 1, 6)
        one, two = run.attempt({"x": x})[0], run.attempt({"x": other})[0]
        if one is not None and two is not None and not equal(one[:, 0], two[:, 0], run.engine.tolerance):
            return Example({"x": x, "and": other}, one[0, 0], two[0, 0])
    return None


def check_positionwise(recorder: Recorder, run: Runner) -> None:
    recorder.start("positions")
    example = mixing(run)
    if example is not None:
        recorder.add("ffn-mixes-positions", example)


def check_dropout_mean(candidate: Candidate, recorder: Recorder, x: Array) -> None:
    def value(module: Any, batch: Array) -> Any:
        caller = Caller(find_forward(module), candidate.engine(), ("x",), Sizes(D=6, H=1, F=10))
        return caller(x=batch) if "x" in caller.argument_roles else caller(batch)

    common.check_dropout_mean(recorder, Sizes(D=6, H=1, F=10), value, x[:1, :1])
