"""A multi-head layer in our convention: its weights, its heads, how it is called, and what should come out."""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from clearhead.reference import causal_mask

from ..adapt import MaskForm
from ..adapt import pattern as mask_pattern
from ..engine import NumPy
from ..finding import Example
from ..names import plain, size_of, weight_role
from ..suspect import Caller, CannotCall, Sizes, Suspect, forward_of, parameters_of
from ..weights import Projections, Weight, is_bias, keys_of, projections, walk
from . import common, steps
from .common import Inputs, Runner, Voice

ROLES = ("q", "k", "v", "x", "memory", "mask", "causal", "cache", "weights_too", "training")


@dataclass
class Subject:
    """The layer with its weights read, its number of heads, and how it is called."""

    thing: Any
    caller: Caller
    D: int
    H: int
    G: int
    readings: list[Projections]
    given: dict[str, Any] = field(default_factory=dict)  # weights that are passed as arguments
    reading: Projections | None = None
    how: steps.Steps = steps.RIGHT
    unbatched: bool = False
    form: MaskForm | None = None
    neutral: MaskForm | None = None  # of a mask that must be given, and is to hide nothing
    causal: bool = False

    @property
    def mode(self) -> str:
        known = self.caller.known
        if {"q", "k", "v"} <= known:
            return "qkv"
        if "memory" in known or {"q", "k"} <= known:
            return "cross"
        return "self"

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.halved(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=forward_of(thing)).having(**self.given)
        x, source = inputs["x"], inputs.get("source")
        source = x if source is None else source
        if self.unbatched:
            x, source = x[0], source[0]
        given: dict[str, Any] = {}
        if inputs.get("allowed") is not None and self.form is not None:
            given["mask"] = self.form(np.asarray(inputs["allowed"]))
        elif self.neutral is not None:
            given["mask"] = self.neutral(np.ones((inputs["x"].shape[0], 1, x.shape[-2], source.shape[-2]), bool))
        if inputs.get("causal"):
            given["causal"] = True
        known = caller.known
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

    def expected(
        self, inputs: Inputs, how: steps.Steps | None = None, reading: Projections | None = None
    ) -> np.ndarray:
        x = inputs["x"]
        source = x if inputs.get("source") is None else inputs["source"]
        allowed = np.ones((x.shape[0], 1, x.shape[1], source.shape[1]), bool)
        if self.causal or inputs.get("causal"):
            allowed = allowed & causal_mask(*allowed.shape[-2:])
        if inputs.get("allowed") is not None:
            allowed = allowed & np.asarray(inputs["allowed"])
        w = reading or self.reading or self.readings[0]
        return steps.multi_head(x, source, source, w, self.H, self.G, allowed, how or self.how)


def build(suspect: Suspect, sizes: Sizes) -> Subject:
    engine = suspect.engine()
    thing = engine.quiet(suspect.made(sizes))
    caller = Caller(forward_of(thing), engine, ROLES, sizes)
    if suspect.is_function:
        return build_function(thing, caller, sizes, suspect)
    if any(type(p).__name__ == "UninitializedParameter" for p in getattr(thing, "parameters", list)()):
        first_pass(thing, caller, sizes)
        thing = engine.quiet(thing)
    held = [w for w in walk(thing) if w.array.ndim <= 3]
    H, G = heads_of(thing, held, sizes, suspect)
    readings = list(projections(held, H, G))
    if not readings:
        raise CannotCall("weights")
    simplify(held, sizes)
    readings = list(projections([w for w in walk(thing) if w.array.ndim <= 3], H, G))
    return Subject(thing, caller, readings[0].q.shape[1], H, G, readings)


def first_pass(thing: Any, caller: Caller, sizes: Sizes) -> None:
    """Lazy layers learn their width from the first input."""
    x = np.ones((1, 2, sizes.D))
    wanted = {role: x for role in ("q", "k", "v", "x", "memory") if role in caller.known}
    caller(**wanted)


def simplify(held: list[Weight], sizes: Sizes) -> None:
    """Weights of small whole numbers for small layers, so that the example can be followed."""
    generator = common.rng(7)
    if sizes.D > 4:
        return
    for weight in held:
        if weight.array.ndim >= 1 and weight_role(weight.path) is not None:
            weight.set(common.whole(generator, *weight.array.shape))


def build_function(thing: Any, caller: Caller, sizes: Sizes, suspect: Suspect) -> Subject:
    """mha(x, Wq, Wk, Wv, Wo, heads), or dicts of matrix and bias: the weights are arguments, and ours."""
    generator = common.rng(7)
    held: list[Weight] = []
    given: dict[str, Any] = {}
    draw = (
        (lambda *shape: common.whole(generator, *shape))
        if sizes.D <= 4
        else lambda *shape: generator.normal(size=shape)
    )
    heads = 1
    for parameter in caller.parameters:
        name = plain(parameter.name)
        matrix = re.fullmatch(r"w_?(q|k|v|o|qkv|out|query|key|value)|(q|k|v|o|out)(proj|w|weight)s?|wo?ut|wproj", name)
        bias = re.fullmatch(r"b(q|k|v|o|qkv|out)", name)
        if size_of(parameter.name) == "H":
            heads = sizes.H
        keys = keys_of(parameter.name, suspect) if weight_role(parameter.name) else None
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
    return Subject(thing, caller, sizes.D, heads, heads, readings, given)


def heads_of(thing: Any, held: list[Weight], sizes: Sizes, suspect: Suspect) -> tuple[int, int]:
    """How many heads: an attribute says so, or a list of them, or the constructor was told."""
    numbers = {size_of(n): v for n, v in vars(thing).items() if isinstance(v, int) and not isinstance(v, bool)}
    queries = [w for w in held if w.array.ndim >= 2 and weight_role(w.path) == "q" and not is_bias(w.path)]
    if len(queries) > 1:
        return len(queries), len(queries)
    if queries and queries[0].array.ndim == 3:
        return queries[0].array.shape[0], queries[0].array.shape[0]
    told = suspect.is_class and any(size_of(p.name) == "H" for p in parameters_of(suspect.thing.__init__))
    has_config = suspect.is_class and any(
        re.search("conf|cfg|args", p.name) for p in parameters_of(suspect.thing.__init__)
    )
    H = numbers.get("H") or (sizes.H if told or has_config else 1)
    G = numbers.get("G") or H
    keys = [w for w in held if w.array.ndim == 2 and weight_role(w.path) == "k"]
    if "G" not in numbers and queries and keys and queries[0].linear:
        G = H * keys[0].array.shape[0] // queries[0].array.shape[0] or 1
    return H, G


def big(subject: Subject, T: int = 4, S: int | None = None, seed: int = 0) -> dict[str, Any]:
    generator = common.rng(seed)
    B = 1 if subject.unbatched else 2
    case = {"x": generator.normal(size=(B, T, subject.D))}
    if S is not None:
        case["source"] = generator.normal(size=(B, S, subject.D))
    return case


def small(suspect: Suspect, subject: Subject, voice: Voice, mask: bool = False, **flags: bool) -> Example | None:
    """The smallest layer and input that fail: width 2, one head, and up."""
    for sizes in (Sizes(D=2, H=1), Sizes(D=2, H=2), Sizes(D=4, H=2), Sizes(D=4, H=2, G=1)):
        try:
            tiny = build(suspect, sizes)
        except Exception:
            continue
        if tiny.D != sizes.D or (tiny.H // tiny.G != subject.H // subject.G and tiny.D < 4):
            continue
        index = next((i for i, r in enumerate(subject.readings) if r is subject.reading), 0)
        tiny.reading = tiny.readings[index] if index < len(tiny.readings) else tiny.readings[0]
        tiny = replace(
            tiny,
            causal=subject.causal,
            unbatched=subject.unbatched,
            form=subject.form,
            neutral=subject.neutral,
            how=subject.how,
        )
        weights = {n: getattr(tiny.reading, n[-1].lower()) for n in ("W_Q", "W_K", "W_V", "W_O")}
        weights |= {f"b_{n}": getattr(tiny.reading, f"{n.lower()}_bias") for n in "QKVO"}
        weights = {n: w for n, w in weights.items() if isinstance(w, np.ndarray)}
        for T in (1, 2, 3):
            for seed in range(4):
                case: dict[str, Any] = {"x": common.whole(common.rng(seed), 1, T, tiny.D), **flags}
                if mask:
                    case["allowed"] = np.arange(T)[None, None, None] < max(1, T - 1)
                    case["allowed"] = np.broadcast_to(case["allowed"], (1, 1, T, T))
                found = common.smallest([case], tiny.runner(suspect.engine()), tiny.expected, weights)
                if found is not None:
                    return found
    case = {**big(subject), **flags}
    if mask:
        case["allowed"] = mask_pattern(subject.form.kind if subject.form else "any", case["x"].shape[0], 4, 4)
    return common.smallest([case], subject.runner(suspect.engine()), subject.expected)
