"""Rotary positions: pairs of coordinates turned by position · θ^(−2i/K)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from clearhead.reference import rotate

from ..engine import NumPy, equal
from ..finding import Example
from ..names import plain
from ..suspect import Caller, CannotCall, NotWritten, Sizes, Suspect, arrays, forward_of
from . import common
from .common import Inputs, Runner, Voice

Array = np.ndarray
LAYOUTS = ("halves", "interleaved")
# `B, H, T, d = x.shape`: the learner says where the heads are
HEADS_SECOND = r"(?i)b\w*,\s*(h|n_?h|num_h|heads)\w*,\s*[tnlsq]\w*,\s*\w+\s*=\s*\w+\.(shape|size)"


def angles(T: int, K: int, start: int = 0, power: float = 2.0, base: float = 10000.0) -> Array:
    return (np.arange(T) + start)[:, None] * base ** (-power * np.arange(K // 2) / K)


def pairs(x: Array, layout: str) -> tuple[Array, Array]:
    K = x.shape[-1]
    return (x[..., : K // 2], x[..., K // 2 :]) if layout == "halves" else (x[..., ::2], x[..., 1::2])


def joined(a: Array, b: Array, layout: str) -> Array:
    if layout == "halves":
        return np.concatenate((a, b), -1)
    return np.stack((a, b), -1).reshape(*a.shape[:-1], -1)


def turned(x: Array, phi: Array, layout: str, sign: int = 1) -> Array:
    a, b = pairs(x, layout)
    cos, sin = np.cos(phi), sign * np.sin(phi)
    return joined(a * cos - b * sin, a * sin + b * cos, layout)


def mixed_layout(x: Array, angle_layout: str) -> Array:
    """cos and sin repeated for one layout, the halves swapped for the other: no rotation at all."""
    T, K = x.shape[-2:]
    phi = angles(T, K)
    wide = joined(phi, phi, angle_layout)
    a, b = pairs(x, "halves" if angle_layout == "interleaved" else "interleaved")
    swapped = joined(-b, a, "halves" if angle_layout == "interleaved" else "interleaved")
    return x * np.cos(wide) + swapped * np.sin(wide)


def by_layout(make: Callable[[Array, str], Array]) -> dict[str, Callable[[Array], Array]]:
    return {layout: partial(call_with, make, layout) for layout in LAYOUTS}


def call_with(make: Callable[[Array, str], Array], layout: str, x: Array) -> Array:
    return make(x, layout)


def by_angles(layout: str, x: Array, sign: int = 1, **changed: Any) -> Array:
    """Turned by angles with one thing changed."""
    return turned(x, angles(x.shape[-2], x.shape[-1], **changed), layout, sign)


def wrong_angles(**changed: Any) -> dict[str, Callable[[Array], Array]]:
    return {layout: partial(by_angles, layout, **changed) for layout in LAYOUTS}


BANK: dict[str, dict[str, Callable[[Array], Array]]] = {
    "rope-direction": wrong_angles(sign=-1),
    "rope-off-by-one": wrong_angles(start=1),
    "rope-exponent": wrong_angles(power=1.0),
    "rope-exponent.four": wrong_angles(power=4.0),
    "rope-base": wrong_angles(base=1000.0),
    "rope-mixed-layout": by_layout(lambda x, layout: mixed_layout(x, layout)),
    "rope-no-minus": by_layout(lambda x, layout: no_minus(x, layout)),
    "rope-not-turned": {"": lambda x: x * 1.0},
    "rope-only-cosine": by_layout(lambda x, layout: only_cosine(x, layout)),
}


def only_cosine(x: Array, layout: str) -> Array:
    phi = angles(x.shape[-2], x.shape[-1])
    return x * np.cos(joined(phi, phi, layout))


def no_minus(x: Array, layout: str) -> Array:
    """a cos + b sin, a sin + b cos: the minus sign is lost."""
    phi = angles(*x.shape[-2:])
    a, b = pairs(x, layout)
    return joined(a * np.cos(phi) + b * np.sin(phi), a * np.sin(phi) + b * np.cos(phi), layout)


class Subject:
    """Turns x [B, H, T, K] however the learner's function wants it."""

    def __init__(self, suspect: Suspect, K: int) -> None:
        self.suspect, self.engine, self.K = suspect, suspect.engine(), K
        self.sizes = Sizes(D=K, H=1, L=16)
        self.thing = self.engine.quiet(suspect.made(self.sizes))
        self.function = forward_of(self.thing)
        self.heads_third = False

    def __call__(self, x: Array) -> Array:
        found = arrays(self.raw(x), self.engine)
        if not found:
            raise CannotCall("x")
        self.all = [a.transpose(0, 2, 1, 3) if self.heads_third and a.ndim == 4 else a for a in found]
        return self.all[0]

    def raw(self, x: Array) -> Any:
        given = x.transpose(0, 2, 1, 3) if self.heads_third else x
        caller = Caller(self.function, self.engine, ("q", "k", "v", "x", "positions"), self.sizes)
        fixed: dict[str, Any] = {}
        T = x.shape[-2]
        for parameter in caller.parameters:
            name, required = plain(parameter.name), parameter.default is inspect.Parameter.empty
            if name in ("cos", "sin", "coscached", "sincached", "cosines", "sines"):
                fixed[parameter.name] = self.trig(name[:3], T)
            elif name.startswith("freqs") or name in ("freqscis", "rotarypos", "angles", "freq"):
                fixed[parameter.name] = self.frequencies(T)
            elif name in ("positions", "pos", "positionids", "tokenpositions", "inputpos") and required:
                fixed[parameter.name] = np.arange(T)
            elif name in ("seqlen", "length", "t", "n") and required:
                fixed[parameter.name] = T
        caller = caller.having(**fixed)
        if {"q", "k"} <= caller.known:
            values = {"v": given} if "v" in caller.known else {}
            return caller(q=given, k=given, **values)
        return caller(x=given) if "x" in caller.known else caller(given)

    def elsewhere(self, inputs: Inputs, engine: NumPy) -> Any:
        moved = copy(self)
        moved.engine, moved.function = engine, forward_of(common.halved(self.thing, engine))
        return moved.raw(inputs["x"])

    def trig(self, which: str, T: int) -> Array:
        """cos and sin as this function wants them: half as wide, or repeated."""
        phi = angles(T, self.K)
        wide = np.concatenate((phi, phi), -1) if self.style != "half" else phi
        wide = np.repeat(phi, 2, -1) if self.style == "repeated" else wide
        return np.cos(wide) if which == "cos" else np.sin(wide)

    style = "wide"

    def frequencies(self, T: int) -> Any:
        """The file's own table if it makes one, else complex numbers e^{iφ}."""
        for name, thing in self.suspect.neighbours.items():
            if inspect.isfunction(thing) and any(word in name.lower() for word in ("freq", "precompute", "build_rope")):
                made = Caller(thing, self.engine, ("length",), Sizes(D=self.K, H=1, L=T))
                parameters = [p.name for p in made.parameters if p.default is p.empty]
                return thing(**dict(zip(parameters, (self.K, T), strict=False)))
        return np.exp(1j * angles(T, self.K))


def check(suspect: Suspect, voice: Voice) -> None:
    voice.at("value")
    x = common.rng(0).normal(size=(2, 3, 5, 8))
    error, got, subject = "", None, Subject(suspect, 8)
    results: list[tuple[Array, Subject]] = []
    for style in ("wide", "half", "repeated"):
        for heads_third in (False, True):
            for rank in (4, 3, 2):
                subject = Subject(suspect, 8)
                subject.style, subject.heads_third = style, heads_third
                if heads_third and (rank < 4 or re.search(HEADS_SECOND, suspect.source)):
                    continue
                value = x if rank == 4 else x[0] if rank == 3 else x[0, 0]
                try:
                    got = subject(value)
                except (NotWritten, NotImplementedError):
                    raise
                except Exception as problem:
                    error = error or common.error_text(problem)
                    continue
                if got.shape == value.shape:
                    results.append((got, subject))
                    if matches_right(voice, subject, value, got):
                        after(suspect, voice, subject, value)
                        run = Runner(subject.elsewhere, subject.engine, lambda inputs: ())
                        common.keeps_device(voice, run, {"x": value}, subject.thing)
                        return
    if not results:
        voice.say("raises" if error else "wrong-shape", Example({"x": "[2, 3, 5, 8]"}, None, error), error=error)
        return
    for got, subject in results:
        value = x if got.ndim == 4 else x[0] if got.ndim == 3 else x[0, 0]
        for key, forms in BANK.items():
            for wrong in forms.values():
                if equal(got, wrong(value), 1e-5):
                    voice.say(key.split(".")[0], small(suspect, subject))
                    return
        if equal(got, np.swapaxes(rotate(np.swapaxes(value, 0, -2), np.arange(value.shape[0])), 0, -2), 1e-5) or (
            got.ndim == 4 and any(equal(got, over_heads(value, layout), 1e-5) for layout in LAYOUTS)
        ):
            voice.say("rope-wrong-axis", small(suspect, subject))
            return
    got, subject = results[0]
    value = x if got.ndim == 4 else x[0] if got.ndim == 3 else x[0, 0]
    lengths = np.allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(value, axis=-1), atol=1e-5)
    voice.say("value" if lengths else "rope-changes-length", small(suspect, subject))


def over_heads(x: Array, layout: str) -> Array:
    """Turned by the number of the head, not by the position."""
    return np.swapaxes(rotate(np.swapaxes(x, 1, 2), np.arange(x.shape[1]), layout=layout), 1, 2)


def matches_right(voice: Voice, subject: Subject, x: Array, got: Array) -> bool:
    for layout in LAYOUTS:
        if equal(got, rotate(x, np.arange(x.shape[-2]), layout=layout), 1e-5):
            voice.assume(f"rope_{layout}")
            if subject.heads_third:
                voice.assume("heads_third")
            return True
    return False


def after(suspect: Suspect, voice: Voice, subject: Subject, x: Array) -> None:
    """Keys are turned like queries, values not at all."""
    voice.at("queries_keys_values")
    same = [equal(a, subject.all[0], 1e-6) for a in subject.all if a.shape == subject.all[0].shape]
    if len(same) >= 2 and not same[1]:
        voice.say(
            "rope-on-queries-only",
            Example({"x": x[..., :2, :2]}, subject.all[0][..., :2, :2], subject.all[1][..., :2, :2]),
        )
    if len(same) >= 3 and same[2]:
        voice.say("rope-on-values", Example({"v": x[..., :2, :2]}, x[..., :2, :2], subject.all[2][..., :2, :2]))


def small(suspect: Suspect, like: Subject) -> Example | None:
    """One head of two coordinates at two positions, if that shows it; else four coordinates."""
    for K in (2, 4, 8):
        for T in (1, 2, 3):
            try:
                subject = Subject(suspect, K)
                subject.style, subject.heads_third = like.style, like.heads_third
                x = np.zeros((1, 1, T, K))
                x[..., 0], x[..., -1] = 1.0, 2.0
                value = x if like.all[0].ndim == 4 else x[0] if like.all[0].ndim == 3 else x[0, 0]
                got = subject(value)
            except Exception:
                continue
            wants = [rotate(value, np.arange(T), layout=layout) for layout in LAYOUTS]
            if not any(equal(got, want, 1e-5) for want in wants):
                return Example({"x": value}, wants[0], got)
    return None
