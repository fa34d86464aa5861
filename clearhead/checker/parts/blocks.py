"""Encoder and decoder blocks: where the residual starts, where the norm stands, and who may see whom.

The block is watched at work. Its sublayers are then put together again in every known way, right and wrong, and the
one that gives the block's own output is what the learner wrote.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from clearhead.reference import causal_mask

from ..adapt import MaskForm, mask_forms
from ..engine import NumPy, equal
from ..finding import Example
from ..names import plain, role_of
from ..suspect import Caller, Sizes, Suspect, forward_of
from . import common
from .common import Inputs, Runner, Voice
from .events import Event, watched

Array = np.ndarray
Layer = Callable[[Array], Array]
Form = Callable[[Array, Layer, Layer], Array]
# one residual branch around sublayer f with norm n
PRE: Form = lambda x, f, n: x + f(n(x))
POST: Form = lambda x, f, n: n(x + f(x))
FORMS: dict[str, Form] = {
    "pre": PRE,
    "post": POST,
    "residual-missing": lambda x, f, n: f(n(x)),
    "residual-missing.post": lambda x, f, n: n(f(x)),
    "residual-missing.bare": lambda x, f, n: f(x),
    "residual-from-normed": lambda x, f, n: n(x) + f(n(x)),
    "residual-doubled": lambda x, f, n: 2 * f(n(x)),
    "residual-doubled.post": lambda x, f, n: n(2 * f(x)),
    "norm-missing": lambda x, f, n: x + f(x),
    "norm-on-branch": lambda x, f, n: x + n(f(x)),
    "norm-of-input": lambda x, f, n: n(x) + f(x),
    "norm-twice": lambda x, f, n: n(x + f(n(x))),
}
RIGHT = ("pre", "post")
MEMORY = [
    "memory",
    "context",
    "encout",
    "encoderout",
    "encoutput",
    "encoderoutput",
    "encoderoutputs",
    "source",
    "mem",
    "enc",
    "kv",
    "ctx",
    "encx",
]


@dataclass
class Subject:
    thing: Any
    engine: NumPy
    D: int
    form: MaskForm | None = None
    fixed: dict[str, Any] | None = None
    unbatched: bool = False

    @property
    def parameters(self) -> list[inspect.Parameter]:
        return Caller(forward_of(self.thing), self.engine, ("x",), Sizes()).parameters

    @property
    def memory(self) -> inspect.Parameter | None:
        return next((p for p in self.parameters[1:] if plain(p.name) in MEMORY), None)

    @property
    def masks(self) -> list[str]:
        """The masks of the queries' own sequence, the likeliest first."""
        found = [p.name for p in self.parameters if "mask" in p.name.lower()]
        if self.memory is None:
            return found
        own = [n for n in found if re.search("tgt|trg|target|self|look|causal|dec", n.lower())]
        return own or [n for n in found if not re.search("src|mem|cross|enc|pad", n.lower())]

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.halved(self.thing, engine) if engine.dtype != self.engine.dtype else self.thing
        caller = Caller(forward_of(thing), engine, ("mask", "cache", "training"), Sizes(D=self.D))
        x = inputs["x"][0] if self.unbatched else inputs["x"]
        fixed = {self.parameters[0].name: x}
        fixed |= {p.name: x for p in self.parameters if role_of(p.name, ("q", "k", "v")) and p.default is p.empty}
        if self.memory is not None:
            memory = inputs.get("memory", common.rng(9).normal(size=(inputs["x"].shape[0], 5, self.D)))
            fixed[self.memory.name] = memory
        if inputs.get("allowed") is not None and self.form is not None and self.masks:
            fixed[self.masks[0]] = engine.give(self.form(np.asarray(inputs["allowed"])))
        for parameter in self.parameters:
            if (
                "mask" in parameter.name.lower()
                and parameter.name not in fixed
                and parameter.default is parameter.empty
            ):
                fixed[parameter.name] = None
        return caller.having(**fixed)()

    def runner(self) -> Runner:
        def shape(inputs: Inputs) -> tuple[int, ...]:
            return inputs["x"].shape[1:] if self.unbatched else inputs["x"].shape

        return Runner(self.native, self.engine, shape, lambda a: a[None] if self.unbatched else a)


def check(suspect: Suspect, voice: Voice) -> None:
    voice.at("shapes")
    engine = suspect.engine()
    thing = engine.quiet(suspect.made(Sizes()))
    subject = Subject(thing, engine, width_of(thing))
    x = common.rng(0).normal(size=(2, 4, subject.D))
    got, error = subject.runner().attempt({"x": x})
    if got is None or got.shape != x.shape:
        single = replace(subject, unbatched=True)
        alone, _ = single.runner().attempt({"x": x[:1]})
        if alone is not None and alone.shape == x[:1].shape:
            subject, got, x = single, alone, x[:1]
            voice.assume("unbatched")
    if got is None or got.shape != x.shape:
        voice.say(
            "raises" if got is None else "wrong-shape",
            Example({"x": list(x.shape)}, list(x.shape), error or (None if got is None else list(got.shape))),
            error=error,
        )
        return
    common.all_registered(voice, thing)
    run = subject.runner()
    if not common.repeats(voice, run, {"x": x}):
        return
    judge_structure(suspect, subject, voice, x)
    judge_masks(suspect, subject, voice)
    judge_rows(subject, voice)
    common.keeps_inputs(voice, run, [{"x": x}])
    common.has_gradient(voice, run, {"x": x})
    if subject.memory is not None:
        judge_memory(subject, voice, x)


def width_of(thing: Any) -> int:
    """D, out of the first norm or the widest input that a weight has."""
    from ..weights import walk

    for weight in walk(thing):
        if re.search("norm|ln", weight.path.lower()) and weight.array.ndim == 1:
            return weight.array.size
    return Sizes().D


def judge_structure(suspect: Suspect, subject: Subject, voice: Voice, x: Array) -> None:
    voice.at("structure")
    with watched(subject.thing, subject.engine, suspect.neighbours) as events:
        subject.runner()({"x": x})
    with quiet_grad(subject.engine):
        got = subject.runner()({"x": x})
    assert got is not None
    events = [e for e in events if e.kind in ("attention", "ffn", "norm")]
    layers = [e for e in events if e.kind != "norm"]
    if subject.unbatched:
        x, got = x[0], got[0]
    own = [e for e in layers if e.kind == "attention"][:1]
    if any(differs(value, event.main) for event in own for value in event.args[1:3]):
        voice.say("self-inputs-differ")
    wanted = 3 if subject.memory is not None else 2
    if len(layers) != wanted:
        voice.assume("sublayers_not_found")
        return
    try:
        found = matching(events, layers, x, got, subject)
    except Exception:
        voice.assume("sublayers_not_found")
        return
    if found is None:
        voice.say("block-value", small(events, layers, subject, suspect))
        return
    for key in found:
        if key in ("pre", "post", "parallel", "sandwich"):
            voice.assume(f"norm_{key}")
        else:
            voice.say(key, small(events, layers, subject, suspect))
    norms = [e for e in events if e.kind == "norm"]
    if len(norms) > 1 and len({id(e.target) for e in norms}) < len(norms) and has_spare_norm(subject.thing):
        voice.say("norm-shared")


def differs(value: Any, main: Any) -> bool:
    """Another array of the same shape: not a mask, not the same input again."""
    alike = getattr(value, "shape", None) == main.shape and getattr(value, "dtype", None) == main.dtype
    return alike and not bool((value == main).all())


def has_spare_norm(thing: Any) -> bool:
    """Two norms are kept though one is used."""
    from .events import kind_of

    kept = thing.named_modules() if hasattr(thing, "named_modules") else vars(thing).items()
    return sum(kind_of(name.split(".")[-1], value) == "norm" for name, value in kept if name) > 1


def quiet_grad(engine: NumPy) -> Any:
    if engine.name == "torch":
        import torch

        return torch.no_grad()
    return np.errstate()


def matching(
    events: list[Event], layers: list[Event], x: Array, got: Array, subject: Subject
) -> tuple[str, ...] | None:
    """What the block did, branch by branch; the plain names if it is right, mistakes if not."""
    norms: list[Layer] = [e.again for e in events if e.kind == "norm"]
    unnormed: Layer = lambda h: h
    tolerance = max(subject.engine.tolerance, 1e-6)
    with quiet_grad(subject.engine):
        if len(norms) == 2 * len(layers):
            h = x
            for i, layer in enumerate(layers):
                h = h + norms[2 * i + 1](layer.again(norms[2 * i](h)))
            if equal(got, h, tolerance):
                return ("sandwich",)
        padded = (norms + [norms[-1] if norms else unnormed] * len(layers))[: len(layers)]
        if len(layers) == 2:
            first, second = (layer.again for layer in layers)
            for n, m in ((padded[0], padded[0]), (padded[0], padded[1])):
                if equal(got, x + first(n(x)) + second(m(x)), tolerance):
                    return ("parallel",)
            y = x + first(padded[0](x))
            if equal(got, x + second(padded[1](y)), tolerance):
                return ("residual-from-start",)
        for order in ([*range(len(layers))],):
            found = search(order, layers, padded, norms, x, got, tolerance)
            if found:
                return named(found, layers, norms)
    return None


def search(
    order: list[int],
    layers: list[Event],
    padded: list[Layer],
    norms: list[Layer],
    x: Array,
    got: Array,
    tolerance: float,
) -> tuple[str, ...] | None:
    """Right ones first, then with the fewest mistakes."""
    choices = [padded] if len(norms) >= len(layers) else [padded, *shifted(norms, len(layers))]
    combos = sorted(product(FORMS, repeat=len(layers)), key=badness)
    for assigned in choices:
        for forms in combos:
            h = x
            for index, form in zip(order, forms, strict=True):
                h = FORMS[form](h, layers[index].again, assigned[index])
            if equal(got, h, tolerance):
                return forms
    return None


def shifted(norms: list[Layer], count: int) -> Iterator[list[Layer]]:
    """One norm fewer than branches: it may belong to any of them."""
    for gap in range(count):
        filled = [*norms[:gap], norms[0] if norms else (lambda h: h), *norms[gap:]]
        if len(filled) >= count:
            yield filled[:count]


def badness(forms: tuple[str, ...]) -> tuple[int, int, int]:
    wrong = sum(form not in RIGHT for form in forms)
    rank = sum(list(FORMS).index(form) for form in forms)
    return wrong, len(set(forms)), rank


def named(forms: tuple[str, ...], layers: list[Event], norms: list[Layer]) -> tuple[str, ...]:
    keys = tuple(dict.fromkeys(form.split(".")[0] for form in forms))
    wrong = tuple(key for key in keys if key not in RIGHT)
    if wrong:
        return wrong
    if layers[0].kind == "ffn":
        return ("order-swapped",)
    return keys if len(keys) == 1 else ("norm-mixed",)


def small(events: list[Event], layers: list[Event], subject: Subject, suspect: Suspect) -> Example | None:
    """Width 2 and one position if the class can be built so; else the first numbers of the first position."""
    for D in (2, 4, 12):
        try:
            thing = subject.engine.quiet(suspect.made(Sizes(D=D, H=1 if D == 2 else 2, F=3)))
            tiny = replace(subject, thing=thing, D=width_of(thing))
            if tiny.D != D:
                continue
            x = common.whole(common.rng(1), 1, 1, D)
            with watched(thing, subject.engine, suspect.neighbours) as seen:
                got = tiny.runner()({"x": x})
            seen = [e for e in seen if e.kind in ("attention", "ffn", "norm")]
            inner = [e for e in seen if e.kind != "norm"]
            norms = [e.again for e in seen if e.kind == "norm"] or [lambda h: h]
            norms = (norms + norms * 3)[: len(inner)]
            h, p = (x[0], x[0]) if subject.unbatched else (x, x)
            with quiet_grad(subject.engine):
                for layer, norm in zip(inner, norms, strict=True):
                    h, p = PRE(h, layer.again, norm), POST(p, layer.again, norm)
        except Exception:
            continue
        if got is not None and not equal(got.reshape(h.shape), h, 1e-5) and not equal(got.reshape(p.shape), p, 1e-5):
            return Example(
                {"x": x, "expected for": "pre-norm, post-norm"}, np.stack((h.ravel(), p.ravel())), got.ravel()
            )
    return None


def future_leaks(subject: Subject, form: MaskForm | None) -> bool | None:
    """Whether an earlier position sees a change in the last one; None if it cannot be run."""
    B = 1 if subject.unbatched else 2
    x = common.rng(0).normal(size=(B, 4, subject.D))
    later = x.copy()
    later[:, -1] *= -2
    allowed = np.broadcast_to(causal_mask(4), (B, 1, 4, 4)).copy() if form is not None else None
    run = replace(subject, form=form).runner()
    one, _ = run.attempt({"x": x, "allowed": allowed})
    two, _ = run.attempt({"x": later, "allowed": allowed})
    if one is None or two is None or np.isnan(one).any():
        return None
    return not equal(one[:, :-1], two[:, :-1], 1e-5)


def judge_masks(suspect: Suspect, subject: Subject, voice: Voice) -> None:
    """A decoder hides the future by itself or by its mask; a mask that is taken is used."""
    voice.at("future")
    if subject.masks:
        answers = {}
        for form in mask_forms():
            if form.kind == "keys" or (subject.unbatched and form.shape != "T S"):
                continue
            leaks = future_leaks(subject, form)
            if leaks is False:
                voice.assume(form.sense)
                return
            if leaks is not None:
                answers[form.sense] = leaks
        if answers and future_leaks(subject, None) is not False:
            keys_only = any(keys_leak(subject, form) is False for form in mask_forms() if form.kind == "keys")
            if not keys_only:
                voice.say("mask-ignored" if unmoved(subject) else "future-leak")
        return
    if suspect.part == "decoder_block" and not is_encoder(suspect) and future_leaks(subject, None):
        voice.say("future-leak")


def is_encoder(suspect: Suspect) -> bool:
    """A block without any talk of masks, of a file without a language model, may read both ways."""
    talk = re.search(r"causal|mask|tril|triu|decoder|gpt|llama|future", suspect.source + suspect.name, re.IGNORECASE)
    beside = any(
        re.search(r"causal|gpt|llama|decoder|tril|mask", str(name), re.IGNORECASE) for name in suspect.neighbours
    )
    return not talk and not beside


def keys_leak(subject: Subject, form: MaskForm) -> bool | None:
    B = 1 if subject.unbatched else 2
    x = common.rng(0).normal(size=(B, 4, subject.D))
    other = x.copy()
    other[:, -1] *= -2
    allowed = np.broadcast_to(np.arange(4) < 3, (B, 1, 4, 4)).copy()
    run = replace(subject, form=form).runner()
    one, two = run.attempt({"x": x, "allowed": allowed})[0], run.attempt({"x": other, "allowed": allowed})[0]
    return None if one is None or two is None else not equal(one[:, :-1], two[:, :-1], 1e-5)


def unmoved(subject: Subject) -> bool:
    """The mask makes no difference at all."""
    B = 1 if subject.unbatched else 2
    x = common.rng(0).normal(size=(B, 4, subject.D))
    plain_out, _ = subject.runner().attempt({"x": x})
    allowed = np.broadcast_to(causal_mask(4), (B, 1, 4, 4)).copy()
    for form in mask_forms():
        got, _ = replace(subject, form=form).runner().attempt({"x": x, "allowed": allowed})
        if got is not None and not equal(got, plain_out if plain_out is not None else got, 1e-9):
            return False
    return True


def judge_rows(subject: Subject, voice: Voice) -> None:
    voice.at("batch")
    if subject.unbatched:
        return
    x = common.rng(0).normal(size=(2, 4, subject.D))
    other = x.copy()
    other[1] *= -2
    one, two = subject.runner().attempt({"x": x})[0], subject.runner().attempt({"x": other})[0]
    if one is not None and two is not None and not equal(one[0], two[0], 1e-5):
        voice.say("batch-mixed")


def judge_memory(subject: Subject, voice: Voice, x: Array) -> None:
    voice.at("memory")
    memory = common.rng(4).normal(size=(x.shape[0], 5, subject.D))
    one = subject.runner().attempt({"x": x, "memory": memory})[0]
    two = subject.runner().attempt({"x": x, "memory": -2 * memory})[0]
    if one is not None and two is not None and equal(one, two, 1e-9):
        voice.say("memory-ignored")
