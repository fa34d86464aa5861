"""Encoder and decoder blocks: where the residual starts, where the norm stands, and who may see whom.

The block is watched at work. Its sublayers are then put together again in every known way, right and wrong, and the
one that gives the block's own output is what the learner wrote.
"""

from __future__ import annotations

import inspect
import re
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
from .residuals import POST, PRE, Array, matching, quiet_grad

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

# places in [B, T, D]
FIRST, LAST = (slice(None), 0), (slice(None), -1)


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
        thing = common.halved(self.thing, engine)
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
    judge_rows(suspect, subject, voice)
    common.keeps_inputs(voice, run, [{"x": x}])
    common.has_gradient(voice, run, {"x": x})
    common.keeps_device(voice, run, {"x": x}, thing)
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
    for other in (value for event in own for value in event.args[1:3] if differs(value, event.main)):
        main, value = (subject.engine.take(a) for a in (own[0].main, other))
        assert main is not None
        assert value is not None
        voice.say("self-inputs-differ", Example({}, main[0, :1, :4], value[0, :1, :4]))
    wanted = 3 if subject.memory is not None else 2
    if len(layers) != wanted:
        voice.assume("sublayers_not_found")
        return
    try:
        found = matching(events, layers, x, got, subject.engine)
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
                key = "mask-ignored" if unmoved(subject) else "future-leak"
                form = next(form for form in mask_forms() if form.sense in answers and form.kind != "keys")
                voice.say(key, witness(suspect, replace(subject, form=form), LAST, FIRST))
        return
    if suspect.part == "decoder_block" and not is_encoder(suspect) and future_leaks(subject, None):
        voice.say("future-leak", witness(suspect, subject, LAST, FIRST))


def witness(suspect: Suspect, subject: Subject, changed: Any, read: Any) -> Example | None:
    """The smallest input on which a change in one place shows in another, where it must not."""
    B = 1 if subject.unbatched or changed is LAST else 2
    allowed = np.broadcast_to(causal_mask(2), (B, 1, 2, 2)).copy() if subject.form is not None else None
    for D, seed in product((2, 4, 12), range(4)):
        x = common.whole(common.rng(seed), B, 2, D)
        other = x.copy()
        other[changed] = common.whole(common.rng(seed + 10), *x[changed].shape)
        try:
            thing = subject.engine.quiet(suspect.made(Sizes(D=D, H=1 if D == 2 else 2, F=3)))
            tiny = replace(subject, thing=thing, D=width_of(thing))
            one, two = (tiny.runner()({"x": value, "allowed": allowed}) for value in (x, other))
        except Exception:
            continue
        if one is not None and two is not None and np.isfinite(one).all() and not equal(one[read], two[read], 1e-5):
            mask = {} if allowed is None else {"allowed": allowed[0, 0].astype(int)}
            return Example({"x": x, "and": other, **mask}, one[read], two[read])
    return None


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


def judge_rows(suspect: Suspect, subject: Subject, voice: Voice) -> None:
    voice.at("batch")
    if subject.unbatched:
        return
    x = common.rng(0).normal(size=(2, 4, subject.D))
    other = x.copy()
    other[1] *= -2
    one, two = subject.runner().attempt({"x": x})[0], subject.runner().attempt({"x": other})[0]
    if one is not None and two is not None and not equal(one[0], two[0], 1e-5):
        voice.say("batch-mixed", witness(suspect, subject, 1, 0))


def judge_memory(subject: Subject, voice: Voice, x: Array) -> None:
    voice.at("memory")
    memory = common.rng(4).normal(size=(x.shape[0], 5, subject.D))
    one = subject.runner().attempt({"x": x, "memory": memory})[0]
    two = subject.runner().attempt({"x": x, "memory": -2 * memory})[0]
    if one is not None and two is not None and equal(one, two, 1e-9):
        voice.say("memory-ignored", Example({"memory": memory[0, 0, :2], "and": -2 * memory[0, 0, :2]}, "≠", "="))
