"""Adapt a multi-head layer to our convention: its weights, its heads, how to call it, and the expected result."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from clearhead.reference import causal_mask

from ..candidate import Caller, Candidate, CannotCall, ProbeSizes, constructor_parameters, find_forward
from ..diagnostic import Example
from ..engine import NumPy
from ..mask_forms import MaskForm
from ..mask_forms import pattern as mask_pattern
from ..names import normalize_name, size_of, weight_role
from ..weights import Projections, Weight, dict_keys, fill_zero_biases, is_bias, iter_weights, projections
from . import attention_steps as steps
from . import common
from .attention_steps import AttentionSteps
from .common import Inputs, Recorder, Runner

LENGTH = 5  # of test sequences: no other size is 5
ROLES = ("q", "k", "v", "x", "memory", "mask", "causal", "cache", "weights_too", "training")


@dataclass
class MultiHeadAdapter:
    """The learner's layer, with its weights, its number of heads, and how to call it."""

    thing: Any
    caller: Caller
    D: int
    H: int
    G: int
    readings: list[Projections]
    given: dict[str, Any] = field(default_factory=dict)  # weights that are passed as arguments
    reading: Projections | None = None
    how: AttentionSteps = steps.RIGHT
    unbatched: bool = False
    form: MaskForm | None = None
    neutral: MaskForm | None = None  # for a required mask: the form of one that hides nothing
    causal: bool = False
    norm: common.InnerNorm | None = None
    is_modeled: bool = True  # False: the layer does more than the definition, so its numbers say nothing
    extra: tuple[str, ...] = ()  # weights that are none of the four projections
    wrap: str = ""  # how the layer's own norm and residual stand around it, a key of common.WRAPS

    @property
    def mode(self) -> str:
        known = self.caller.argument_roles
        if {"q", "k", "v"} <= known:
            return "qkv"
        if "memory" in known or {"q", "k"} <= known:
            return "cross"
        return "self"

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.cast_module(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=find_forward(thing)).with_fixed(**self.given)
        x, source = inputs["x"], inputs.get("source")
        source = x if source is None else source
        if self.unbatched:
            x, source = x[0], source[0]
        given: dict[str, Any] = {}
        if inputs.get("mask") is not None:
            given["mask"] = inputs["mask"]
        elif inputs.get("allowed") is not None and self.form is not None:
            given["mask"] = self.form(np.asarray(inputs["allowed"]))
        elif self.neutral is not None:
            given["mask"] = self.neutral(np.ones((inputs["x"].shape[0], 1, x.shape[-2], source.shape[-2]), bool))
        if inputs.get("causal"):
            given["causal"] = True
        known = caller.argument_roles
        if self.mode == "qkv":
            return caller(q=x, k=source, v=source, **given)
        if self.mode == "cross" and "memory" in known:
            first = "x" if "x" in known else "q" if "q" in known else None
            optional = any(caller.role(p) == "memory" and p.default is not p.empty for p in caller.parameters)
            memory = {} if optional and inputs.get("source") is None else {"memory": source}
            return caller(**({first: x} if first else {}), **memory, **given)
        if self.mode == "cross":
            return caller(q=x, k=source, **given)
        return caller(x=x, **given) if "x" in known else caller(x, **given)

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        w = self.readings[0]
        width = w.v.shape[0] * (self.H // self.G) if w.o is None else w.o.shape[0]
        shape = (*inputs["x"].shape[:2], width)
        return shape[1:] if self.unbatched else shape

    def runner(self, engine: NumPy) -> Runner:
        return Runner(self.native, engine, self.shape, lambda a: a[None] if self.unbatched else a)

    def expected_output(
        self, inputs: Inputs, how: AttentionSteps | None = None, reading: Projections | None = None
    ) -> np.ndarray:
        w, allowed = reading or self.reading or self.readings[0], self.allowed(inputs)

        def layer(x: np.ndarray) -> np.ndarray:
            source = x if inputs.get("source") is None else inputs["source"]
            return steps.multi_head(x, source, source, w, self.H, self.G, allowed, how or self.how)

        if self.norm is None:
            return layer(inputs["x"])
        return common.WRAPS[self.wrap or self.wraps[0]](inputs["x"], layer, self.norm)

    def allowed(self, inputs: Inputs) -> np.ndarray:
        """Return which keys each query may read, [B, 1, T, S]."""
        x = inputs["x"]
        source = x if inputs.get("source") is None else inputs["source"]
        allowed = np.ones((x.shape[0], 1, x.shape[1], source.shape[1]), bool)
        if self.causal or inputs.get("causal"):
            allowed = allowed & causal_mask(*allowed.shape[-2:])
        if inputs.get("allowed") is not None:
            allowed = allowed & np.asarray(inputs["allowed"])
        return allowed

    def reads_nothing(self, inputs: Inputs, how: AttentionSteps) -> np.ndarray:
        """Return which queries [B, T] may read no key."""
        return np.asarray(~how.allow(self.allowed(inputs))[:, 0].any(-1))

    @property
    def wraps(self) -> tuple[str, ...]:
        return ("",) if self.norm is None else tuple(common.WRAPS)


def build(candidate: Candidate, sizes: ProbeSizes) -> MultiHeadAdapter:
    engine = candidate.engine()
    thing = engine.eval_mode(candidate.instantiate(sizes))
    caller = candidate.caller(thing, ROLES, sizes)
    if candidate.is_function:
        return build_function(thing, caller, sizes, candidate)
    is_torch = hasattr(thing, "named_parameters") and hasattr(thing, "_parameters")
    if is_torch and any(type(p).__name__ == "UninitializedParameter" for p in thing.parameters()):
        first_pass(thing, caller, sizes)
        thing = engine.eval_mode(thing)
    use_batch_first(thing)
    norm = common.find_inner_norm(thing, engine)
    held = held_weights(thing, norm)
    H, G = count_heads(thing, held, sizes, candidate)
    try:
        is_known = bool(list(projections(held, H, G)))
    except ValueError:  # the weights of several layers
        is_known = False
    if not is_known:
        raise CannotCall("weights")
    fill_zero_biases([w for w in held if is_bias(w.path)])
    set_small_weights(held, sizes)
    held = held_weights(thing, norm)
    readings = list(projections(held, H, G))
    extra = tuple(w.path for w in held if w.array.ndim and weight_role(w.path) is None)
    return MultiHeadAdapter(thing, caller, readings[0].q.shape[1], H, G, readings, norm=norm, extra=extra)


def held_weights(thing: Any, norm: common.InnerNorm | None) -> list[Weight]:
    known = set() if norm is None else norm.weights
    return [w for w in iter_weights(thing) if w.array.ndim <= 3 and id(w.value) not in known]


def use_batch_first(thing: Any) -> None:
    """Let torch's own layers take [B, T, D]: which axis comes first is a setting of theirs."""
    if type(thing).__module__.startswith("torch.nn"):
        for module in thing.modules():
            if hasattr(module, "batch_first"):
                module.batch_first = True


def first_pass(thing: Any, caller: Caller, sizes: ProbeSizes) -> None:
    """Run lazy layers once, so that they learn their width."""
    x = np.ones((1, 2, sizes.D))
    wanted = {role: x for role in ("q", "k", "v", "x", "memory") if role in caller.argument_roles}
    caller(**wanted)


def set_small_weights(held: list[Weight], sizes: ProbeSizes) -> None:
    """Give small layers small integer weights, so that a reader can follow the example."""
    generator = common.rng(7)
    if sizes.D > 4:
        return
    for weight in held:
        if weight.array.ndim >= 1 and weight_role(weight.path) is not None:
            weight.set(common.small_integers(generator, *weight.array.shape))


def build_function(thing: Any, caller: Caller, sizes: ProbeSizes, candidate: Candidate) -> MultiHeadAdapter:
    """Adapt a function that takes its weights as arguments: mha(x, Wq, Wk, Wv, Wo, heads)."""
    generator = common.rng(7)
    held: list[Weight] = []
    given: dict[str, Any] = {}
    draw = (
        (lambda *shape: common.small_integers(generator, *shape))
        if sizes.D <= 4
        else lambda *shape: generator.normal(size=shape)
    )
    heads = 1
    for parameter in caller.parameters:
        name = normalize_name(parameter.name)
        matrix = re.fullmatch(r"w_?(q|k|v|o|qkv|out|query|key|value)|(q|k|v|o|out)(proj|w|weight)s?|wo?ut|wproj", name)
        bias = re.fullmatch(r"b(q|k|v|o|qkv|out)", name)
        if size_of(parameter.name) == "H":
            heads = sizes.H
        keys = dict_keys(parameter.name, candidate) if weight_role(parameter.name) else None
        if keys:
            out = sizes.D * {"qkv": 3, "kv": 2}.get(weight_role(parameter.name) or "", 1)
            given[parameter.name] = dict(zip(keys, (draw(sizes.D, out), draw(out)), strict=True))
            held += [Weight(f"{parameter.name}.{k}", None, k, value) for k, value in given[parameter.name].items()]
            continue
        if matrix and parameter.default is parameter.empty:
            value = draw(sizes.D, 3 * sizes.D if "qkv" in name else sizes.D)
        elif bias and parameter.default is parameter.empty:
            value = draw(3 * sizes.D if "qkv" in name else sizes.D)
        else:
            continue
        given[parameter.name] = value
        held.append(Weight(parameter.name, None, parameter.name, value))
    readings = list(projections(held, heads, heads))
    if not readings:
        raise CannotCall("weights")
    return MultiHeadAdapter(thing, caller, sizes.D, heads, heads, readings, given)


def count_heads(thing: Any, held: list[Weight], sizes: ProbeSizes, candidate: Candidate) -> tuple[int, int]:
    """Return the number of query and key heads: from attributes, from a list of heads, or from the constructor."""
    numbers = {size_of(n): v for n, v in vars(thing).items() if isinstance(v, int) and not isinstance(v, bool)}
    queries = [w for w in held if w.array.ndim >= 2 and weight_role(w.path) == "q" and not is_bias(w.path)]
    if len(queries) > 1:
        return len(queries), len(queries)
    if queries and queries[0].array.ndim == 3:
        return queries[0].array.shape[0], queries[0].array.shape[0]
    has_heads = candidate.constructor_takes("H")
    has_config = candidate.is_class and any(
        re.search("conf|cfg|args", p.name) for p in constructor_parameters(candidate.thing)
    )
    H = numbers.get("H") or (sizes.H if has_heads or has_config else 1)
    G = numbers.get("G") or H
    keys = [w for w in held if w.array.ndim == 2 and weight_role(w.path) == "k"]
    if "G" not in numbers and queries and keys and queries[0].linear:
        G = H * keys[0].array.shape[0] // queries[0].array.shape[0] or 1
    return H, G


def random_case(adapter: MultiHeadAdapter, T: int = LENGTH, S: int | None = None, seed: int = 0) -> dict[str, Any]:
    generator = common.rng(seed)
    B = 1 if adapter.unbatched else 2
    case = {"x": generator.normal(size=(B, T, adapter.D))}
    if S is not None:
        case["source"] = generator.normal(size=(B, S, adapter.D))
    return case


def smallest_example(
    candidate: Candidate, adapter: MultiHeadAdapter, recorder: Recorder, mask: bool = False, **flags: bool
) -> Example | None:
    """Return the smallest failing layer and input, starting from width 2 and one head."""
    for sizes in (ProbeSizes(D=2, H=1), ProbeSizes(D=2, H=2), ProbeSizes(D=4, H=2), ProbeSizes(D=4, H=2, G=1)):
        try:
            tiny = build(candidate, sizes)
        except Exception:
            continue
        if tiny.D != sizes.D or (tiny.H // tiny.G != adapter.H // adapter.G and tiny.D < 4):
            continue
        index = next((i for i, r in enumerate(adapter.readings) if r is adapter.reading), 0)
        tiny.reading = tiny.readings[index] if index < len(tiny.readings) else tiny.readings[0]
        tiny = replace(
            tiny,
            causal=adapter.causal,
            unbatched=adapter.unbatched,
            form=adapter.form,
            neutral=adapter.neutral,
            how=adapter.how,
            wrap=adapter.wrap,
        )
        weights = {n: getattr(tiny.reading, n[-1].lower()) for n in ("W_Q", "W_K", "W_V", "W_O")}
        weights |= {f"b_{n}": getattr(tiny.reading, f"{n.lower()}_bias") for n in "QKVO"}
        weights = {n: w for n, w in weights.items() if isinstance(w, np.ndarray)}
        for T in (1, 2, 3):
            for seed in range(4):
                case: dict[str, Any] = {"x": common.small_integers(common.rng(seed), 1, T, tiny.D), **flags}
                if mask:
                    case["allowed"] = np.arange(T)[None, None, None] < max(1, T - 1)
                    case["allowed"] = np.broadcast_to(case["allowed"], (1, 1, T, T))
                found = common.smallest_failure([case], tiny.runner(candidate.engine()), tiny.expected_output, weights)
                if found is not None:
                    return found
    case = {**random_case(adapter), **flags}
    if mask:
        case["allowed"] = mask_pattern(adapter.form.kind if adapter.form else "any", case["x"].shape[0], LENGTH, LENGTH)
    return common.smallest_failure([case], adapter.runner(candidate.engine()), adapter.expected_output)
