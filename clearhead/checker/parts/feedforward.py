"""Feed-forward layers: W₂ act(W₁x + b₁) + b₂, and the gated kind, W_down (silu(W_gate x) ∘ W_up x)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations, product
from typing import Any

import numpy as np

from clearhead.reference import gelu, gelu_tanh, relu, relu2, silu

from ..candidate import Candidate, CannotCall, ProbeSizes, find_forward
from ..diagnostic import Example
from ..engine import NumPy, equal
from ..names import role_of, size_of
from ..weights import Weight, dict_keys, fill_zero_biases, iter_weights
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
    """The learner's layer, with every way to read its weights as linear maps."""

    def __init__(self, candidate: Candidate, D: int, F: int) -> None:
        self.engine = candidate.engine()
        sizes = ProbeSizes(D=D, H=1, F=F)
        self.thing = self.engine.eval_mode(candidate.instantiate(sizes))
        self.caller = candidate.caller(self.thing, ("x", "training"), sizes)
        self.D = D
        self.given: dict[str, Any] = {}
        self.norm: common.InnerNorm | None = None
        self.wrap = "norm_inside"
        self.is_documented_tanh = bool(re.search(r'(?s)""".*tanh.*"""', candidate.source))
        self.is_plain_glu = bool(re.search(r"(?<!swi)(?<!ge)glu", candidate.name.lower()))  # its gate is a sigmoid
        self.readings = list(self.from_arguments(F, candidate) if candidate.is_function else self.from_weights())

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.cast_module(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=find_forward(thing)).with_fixed(**self.given)
        return caller(x=inputs["x"]) if "x" in caller.argument_roles else caller(inputs["x"])

    def runner(self) -> Runner:
        return Runner(self.native, self.engine, lambda inputs: inputs["x"].shape)

    def wrapped(self, x: Array, layer: common.Layer) -> Array:
        """Apply the layer with the norm and the residual that it holds itself."""
        return layer(x) if self.norm is None else common.WRAPS[self.wrap](x, layer, self.norm)

    @property
    def wraps(self) -> tuple[str, ...]:
        return ("",) if self.norm is None else tuple(common.WRAPS)

    def from_weights(self) -> Iterator[list[LinearMap]]:
        weights = [w for w in iter_weights(self.thing) if w.array.ndim in (1, 2)]
        self.norm = common.find_inner_norm(self.thing, self.engine)
        if self.norm is not None:
            weights = [w for w in weights if id(w.value) not in self.norm.weights]
        biases = [w for w in weights if w.array.ndim == 1 or (1 in w.array.shape and not w.linear)]
        matrices = [w for w in weights if w not in biases]
        fill_zero_biases(biases)
        if matrices and not any(self.D in w.array.shape for w in matrices):
            self.D = matrices[0].array.shape[1] if matrices[0].linear else min(matrices[0].array.shape)
        if len(matrices) in (2, 3):
            yield from orientations(matrices, [b.array.ravel() for b in biases], self.D)

    def from_arguments(self, F: int, candidate: Candidate) -> Iterator[list[LinearMap]]:
        """Make weights for a function that takes them: ffn(x, W1, b1, W2, b2) or swiglu(x, w1, w2, w3)."""
        names = [p.name for p in self.caller.parameters if role_of(p.name, ("x",)) is None and p.default is p.empty]
        bundles = {n: keys for n in names if (keys := dict_keys(n, candidate))}
        starts = ("w", "k", "u", "v", "gate", "up", "down", "c_fc", "c_proj", "in", "out")
        matrices = list(bundles) or [n for n in names if n.lower().startswith(starts) and size_of(n) is None]
        if len(matrices) not in (2, 3):
            raise CannotCall(", ".join(names))
        is_llama = len(matrices) == 3 and all(str(i + 1) in name for i, name in enumerate(matrices))
        downs = [1, 2] if is_llama else [2, 1] if len(matrices) == 3 else [1]
        for down, is_out_in in product(downs, (False, True)):
            layers = self.make_weights(names, matrices, bundles, down, is_out_in, F)
            try:
                self.runner()({"x": np.ones((1, 2, self.D))})
            except Exception:
                continue
            yield [*layers[:down], *layers[down + 1 :], layers[down]]
            return

    def make_weights(
        self, names: list[str], matrices: list[str], bundles: dict[str, Any], down: int, is_out_in: bool, F: int
    ) -> list[LinearMap]:
        generator, layers = common.rng(5), []
        self.given = {n: self.caller.sizes[str(size_of(n))] for n in names if n not in matrices and size_of(n)}
        for index, name in enumerate(matrices):
            out, into = (self.D, F) if index == down else (F, self.D)
            matrix = generator.normal(size=(out, into))
            self.given[name] = matrix if is_out_in else matrix.T
            layers.append(LinearMap(matrix))
        for index, name in enumerate(n for n in names if n not in matrices and n not in self.given):
            layer = layers[min(index, len(layers) - 1)]
            self.given[name] = layer.bias = generator.normal(size=layer.matrix.shape[0])
        for layer, (name, keys) in zip(layers, bundles.items(), strict=False):
            layer.bias = generator.normal(size=layer.matrix.shape[0])
            self.given[name] = dict(zip(keys, (self.given[name], layer.bias), strict=True))
        return layers


def orientations(matrices: list[Weight], biases: list[Array], D: int) -> Iterator[list[LinearMap]]:
    """Yield the readings of the matrices as [out, in]: all stored so, or all stored as [in, out]."""
    for is_out_in in (True, False):
        arrays = [w.array if w.linear or is_out_in else w.array.T for w in matrices]
        fits = sum(a.shape[0] == D and a.shape[1] != D for a in arrays) == 1 or any(a.shape == (D, D) for a in arrays)
        if fits and arrays[0].shape[1] == D:
            rest, layers = list(biases), []
            for a in arrays:
                index = next((i for i, b in enumerate(rest) if b.shape[0] == a.shape[0]), None)
                layers.append(LinearMap(a, 0.0 if index is None else rest.pop(index)))
            yield layers
        if all(w.linear for w in matrices):
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
    run = adapter.runner()
    x = common.rng(0).normal(size=(2, 3, adapter.D))
    got, error = run.attempt({"x": x})
    if got is None or got.shape != x.shape:
        shape = None if got is None else list(got.shape)
        recorder.cannot_run(error or f"the result has the shape {shape}", {"x": list(x.shape)})
        return
    if not common.check_deterministic(recorder, run, {"x": x}):
        return
    recorder.start("value")
    check_weights_registered(adapter, recorder)
    readings = [split for reading in adapter.readings if len(split := split_fused(reading)) in (2, 3)]
    if candidate.part == "swiglu":
        readings = [gated_unit(reading) for reading in readings]
    if not readings:
        recorder.assume("weights_not_found")
        check_positionwise(recorder, run, adapter.D)
        return
    found = None
    for wrap in adapter.wraps:
        adapter.wrap = wrap
        found = next((f for layers in readings if (f := matching_activation(layers, x, got, adapter))), None)
        if found is not None:
            break
    if adapter.wrap and found is not None:
        recorder.assume(adapter.wrap)
    if found is None:
        add_mistake(candidate, recorder, adapter, run, readings, x, got)
    else:
        recorder.assume(f"activation_{found}")
        if candidate.part == "swiglu" and len(readings[0]) == 2 and "glu" in candidate.name.lower():
            recorder.add("glu-gate-missing")
        elif candidate.part == "swiglu" and "swi" in candidate.name.lower() and found != "silu":
            recorder.add("glu-activation", activation=found)
    common.check_inputs_unchanged(recorder, run, [{"x": x}])
    common.check_gradient(recorder, run, {"x": x})
    common.check_device(recorder, run, {"x": x}, adapter.thing)
    if adapter.wrap != "residual_post":  # the norm of a sum does not keep its mean
        check_dropout_mean(candidate, recorder, x)


def split_fused(layers: list[LinearMap]) -> list[LinearMap]:
    """Split a fused gate-and-up matrix in two."""
    if len(layers) != 2 or layers[0].matrix.shape[0] != 2 * layers[1].matrix.shape[1]:
        return layers
    half = layers[1].matrix.shape[1]
    biases = [layers[0].bias] * 2 if isinstance(layers[0].bias, float) else np.split(layers[0].bias, 2)
    return [LinearMap(layers[0].matrix[:half], biases[0]), LinearMap(layers[0].matrix[half:], biases[1]), layers[1]]


def gated_unit(layers: list[LinearMap]) -> list[LinearMap]:
    """Read two square matrices as gate and up, without a map back to D: act(W_gate x) ∘ W_up x."""
    is_square = len(layers) == 2 and layers[0].matrix.shape == layers[1].matrix.shape
    return [*layers, LinearMap(np.eye(len(layers[0].matrix)))] if is_square else layers


def matching_activation(layers: list[LinearMap], x: Array, got: Array, adapter: FeedForwardAdapter) -> str | None:
    acts = ACTS | ({"sigmoid": sigmoid} if adapter.is_plain_glu and len(layers) == 3 else {})
    acts |= {"tanh": np.tanh} if adapter.is_documented_tanh else {}
    for order, (name, act) in product(orders(layers, adapter.D), acts.items()):
        want = adapter.wrapped(x, partial(right, layers=order, act=act))
        if equal(got, want, max(adapter.engine.tolerance, 1e-6)):
            return name
    return None


def add_mistake(
    candidate: Candidate,
    recorder: Recorder,
    adapter: FeedForwardAdapter,
    run: Runner,
    readings: list[list[LinearMap]],
    x: Array,
    got: Array,
) -> None:
    """Name the mistake; if the numbers match no known one, report the difference."""
    key = known_mistake(readings, x, got, adapter)
    example = mixed_positions(run, adapter.D) if key == "value" else None
    if example is not None:
        recorder.add("ffn-mixes-positions", example)
        return
    if key == "value" and len(readings[0]) == 3 and candidate.part == "feed_forward":
        recorder.assume("weights_not_found")  # three matrices need not be gate, up and down
        return
    recorder.add(key, smallest_example(candidate))


def apply_mistake(wrong: Callable[..., Array], order: list[LinearMap], act: Act, x: Array) -> Array:
    return wrong(x, *order, act)


def known_mistake(readings: list[list[LinearMap]], x: Array, got: Array, adapter: FeedForwardAdapter) -> str:
    with np.errstate(all="ignore"):
        for wrap, layers in product(adapter.wraps, readings):
            adapter.wrap = wrap
            bank: dict[str, Any] = GATED if len(layers) == 3 else MISTAKES
            for order, act, (name, wrong) in product(orders(layers, adapter.D), ACTS.values(), bank.items()):
                layer = partial(apply_mistake, wrong, order, act)
                if equal(got, adapter.wrapped(x, layer), max(adapter.engine.tolerance, 1e-6)):
                    return name.split(".")[0]
    return "value"


def smallest_example(candidate: Candidate) -> Example | None:
    for D, F in ((1, 2), (2, 3), (3, 4), (6, 10)):
        try:
            small = FeedForwardAdapter(candidate, D, F)
            x = common.small_integers(common.rng(2), 1, 2, small.D)
            value, error = small.runner().attempt({"x": x})
            layers = split_fused(small.readings[0])
            wants = [
                small.wrapped(x, partial(right, layers=order, act=act))
                for order in orders(layers, small.D)
                for act in ACTS.values()
            ]
        except Exception:
            continue
        if wants and not any(equal(value, want, 1e-5) for want in wants):
            matrices = {f"W{i + 1}": layer.matrix for i, layer in enumerate(layers)}
            return Example({"x": x}, wants[3 if len(layers) == 3 else 0], error or value, matrices)
    return None


def check_weights_registered(adapter: FeedForwardAdapter, recorder: Recorder) -> None:
    loose = [w.path for w in iter_weights(adapter.thing) if not w.registered]
    if loose:
        recorder.add("unregistered", weights=", ".join(loose[:3]))


def mixed_positions(run: Runner, D: int) -> Example | None:
    """Return an example in which a change at one position changes another position."""
    for B in (1, 2):
        x = common.small_integers(common.rng(0), B, 2, D)
        other = x.copy()
        other[:, 1:] += common.small_integers(common.rng(1), B, 1, D)
        one, two = run.attempt({"x": x})[0], run.attempt({"x": other})[0]
        if one is not None and two is not None and not equal(one[:, 0], two[:, 0], run.engine.tolerance):
            return Example({"x": x, "and": other}, one[0, 0], two[0, 0])
    return None


def check_positionwise(recorder: Recorder, run: Runner, D: int = 6) -> None:
    recorder.start("positions")
    example = mixed_positions(run, D)
    if example is not None:
        recorder.add("ffn-mixes-positions", example)


def check_dropout_mean(candidate: Candidate, recorder: Recorder, x: Array) -> None:
    def value(module: Any, batch: Array) -> Any:
        caller = candidate.caller(module, ("x",), ProbeSizes(D=6, H=1, F=10))
        return caller(x=batch) if "x" in caller.argument_roles else caller(batch)

    common.check_dropout_mean(recorder, ProbeSizes(D=6, H=1, F=10), value, x[:1, :1])
