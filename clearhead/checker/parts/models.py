"""Whole models: an encoder, and a language model from tokens to logits."""

from __future__ import annotations

import re
from copy import copy
from typing import Any

import numpy as np

from clearhead.reference import cross_entropy

from ..adapt import mask_forms
from ..engine import NumPy, equal
from ..finding import Example
from ..names import plain
from ..suspect import Caller, CannotCall, Sizes, Suspect, arrays, forward_of
from . import common
from .common import Inputs, Runner, Voice
from .events import watched

SOURCE = ("src", "source", "srcids", "encinput", "srctokens", "inputs")
TARGETS = ("targets", "labels", "y", "target")
TOKENS = np.array([[1, 4, 2, 7, 5], [3, 6, 8, 2, 9]])


class Subject:
    """Tokens to logits, or vectors to vectors."""

    def __init__(self, suspect: Suspect, sizes: Sizes) -> None:
        self.engine, self.sizes, self.suspect = suspect.engine(), sizes, suspect
        self.thing = self.engine.quiet(suspect.made(sizes))
        self.names = [p.name for p in self.caller.parameters]
        self.wants_targets = False

    @property
    def caller(self) -> Caller:
        return Caller(forward_of(self.thing), self.engine, ("mask", "cache", "training", "tokens"), self.sizes)

    def targets(self) -> str | None:
        return next((n for n in self.names[1:] if plain(n) in TARGETS), None)

    def source(self) -> str | None:
        named = [n for n in self.names if plain(n) in SOURCE]
        return (
            named[0]
            if named and len([n for n in self.names if plain(n) in (*SOURCE, "tgt", "trg", "target")]) > 1
            else None
        )

    def raw(self, tokens: np.ndarray, **fixed: Any) -> Any:
        given: dict[str, Any] = {}
        source = self.source()
        names = [n for n in self.names if n != source]
        if source is not None:
            given[source] = TOKENS[: len(tokens)]
        given[names[0]] = tokens
        if self.wants_targets and self.targets() and self.targets() != names[0]:
            given[str(self.targets())] = tokens
        return self.caller.having(**given, **fixed)()

    def elsewhere(self, inputs: Inputs, engine: NumPy) -> Any:
        moved = copy(self)
        moved.engine, moved.thing = engine, common.halved(self.thing, engine)
        return moved.raw(inputs["x"])

    def __call__(self, tokens: np.ndarray, **fixed: Any) -> np.ndarray:
        with quiet(self.engine):
            found = arrays(self.raw(tokens, **fixed), self.engine)
        big = [a for a in found if a.ndim >= 2]
        if not big:
            raise CannotCall(self.names[0])
        value = big[0]
        return value.reshape(*tokens.shape, -1) if value.ndim == 2 and value.shape[0] == tokens.size else value


def quiet(engine: NumPy) -> Any:
    if engine.name == "torch":
        import torch

        return torch.no_grad()
    return np.errstate()


def check_lm(suspect: Suspect, voice: Voice) -> None:
    voice.at("shapes")
    subject = Subject(suspect, Sizes())
    try:
        logits = subject(TOKENS)
        if logits.shape[:2] != TOKENS.shape and subject.targets():
            subject.wants_targets = True
            logits = subject(TOKENS)
    except (CannotCall, NotImplementedError):
        raise
    except Exception as error:
        voice.say("raises", Example({"tokens": TOKENS}, None, common.error_text(error)), error=common.error_text(error))
        return
    if logits.shape[:2] != TOKENS.shape:
        voice.say("wrong-shape", Example({"tokens": list(TOKENS.shape)}, [2, 5, logits.shape[-1]], list(logits.shape)))
        return
    again = subject(TOKENS)
    if not np.array_equal(logits, again, equal_nan=True):
        voice.say("dropout-in-eval", Example({"tokens": TOKENS[0]}, logits[0, 0, :3], again[0, 0, :3]))
        return
    common.all_registered(voice, subject.thing)
    judge_future(subject, voice, logits)
    judge_rows(subject, voice, logits)
    judge_order(suspect, subject, voice)
    judge_layers(suspect, subject, voice)
    judge_loss(subject, voice, logits)
    judge_length(subject, voice)
    judge_cache(subject, voice, logits)
    judge_device(subject, voice, TOKENS)


def judge_device(subject: Subject, voice: Voice, inputs: np.ndarray) -> None:
    run = Runner(subject.elsewhere, subject.engine, lambda inputs: ())
    common.keeps_device(voice, run, {"x": inputs}, subject.thing)


def judge_future(subject: Subject, voice: Voice, logits: np.ndarray) -> None:
    voice.at("future")
    for t in (4, 1):
        changed = TOKENS.copy()
        changed[:, t:] = (changed[:, t:] + 1) % 10
        other = subject(changed)
        if not equal(other[:, :t], logits[:, :t], 1e-5):
            small = np.array([[1, 2]])
            other_small = np.array([[1, 3]])
            voice.say(
                "future-leak",
                Example(
                    {"tokens": small, "and": other_small}, subject(small)[0, 0, :4], subject(other_small)[0, 0, :4]
                ),
            )
            return


def judge_rows(subject: Subject, voice: Voice, logits: np.ndarray) -> None:
    voice.at("batch")
    changed = TOKENS.copy()
    changed[1] = (changed[1] + 1) % 10
    other = subject(changed)
    if not equal(other[0], logits[0], 1e-5):
        t = int(np.abs(other[0] - logits[0]).max(-1).argmax())
        voice.say("batch-mixed", Example({"tokens": TOKENS, "and": changed}, logits[0, t, :4], other[0, t, :4]))


def judge_order(suspect: Suspect, subject: Subject, voice: Voice) -> None:
    """With one layer and no positions, the last token cannot tell in which order the others came."""
    voice.at("order")
    try:
        shallow = Subject(suspect, Sizes(N=1))
        shallow.wants_targets = subject.wants_targets
        one, two = shallow(TOKENS), shallow(TOKENS[:, [1, 0, 2, 3, 4]])
    except Exception:
        return
    if equal(one[:, -1], two[:, -1], 1e-6):
        ignores = equal(one[:, -1], shallow((TOKENS + np.eye(1, 5, dtype=int)) % 10)[:, -1], 1e-9)
        voice.say(
            "no-attention" if ignores else "no-positions", Example({"tokens": [1, 4, 2], "and": [4, 1, 2]}, "≠", "=")
        )


def judge_layers(suspect: Suspect, subject: Subject, voice: Voice, inputs: np.ndarray = TOKENS) -> None:
    """Every layer has weights of its own, every weight is used, and a pre-norm stack ends in a norm."""
    voice.at("layers")
    if subject.engine.name != "torch":
        return
    import torch

    for module in subject.thing.modules():
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            items = [m for m in module if any(True for _ in m.parameters())]
            if len({id(m) for m in items}) < len(items):
                voice.say("layers-shared", count=len(items))
                return
    subject.thing.zero_grad()
    result = subject.raw(inputs)
    results: list[Any] = list(result) if isinstance(result, tuple | list) else [result]
    value = next(t for t in results if isinstance(t, torch.Tensor) and t.ndim >= 2)
    if value.requires_grad:
        (value * torch.randn_like(value)).sum().backward()
        unused = [name for name, p in subject.thing.named_parameters() if p.grad is None]
        if unused:
            voice.say("weight-unused", weights=", ".join(unused[:3]))
    judge_final_norm(suspect, subject, voice, inputs)


def judge_final_norm(suspect: Suspect, subject: Subject, voice: Voice, inputs: np.ndarray) -> None:
    voice.at("final_norm")
    with quiet(subject.engine), watched(subject.thing, subject.engine, suspect.neighbours) as events:
        subject(inputs)
    blocks = [e for e in events if e.kind == "block"]
    if not blocks or any(e.kind == "norm" for e in events[events.index(blocks[-1]) :]):
        return
    out = subject.engine.take(blocks[-1].result[0] if isinstance(blocks[-1].result, tuple) else blocks[-1].result)
    if (
        out is not None
        and not np.allclose(out.var(-1), 1, atol=0.05)
        and not np.allclose((out**2).mean(-1), 1, atol=0.05)
    ):
        voice.say("final-norm-missing")


def judge_loss(subject: Subject, voice: Voice, logits: np.ndarray) -> None:
    """The loss is the mean cross-entropy of its own logits."""
    voice.at("loss")
    name = subject.targets()
    if name is None or subject.source() is not None:
        return
    targets = np.roll(TOKENS, -1, 1)
    with quiet(subject.engine):
        result = subject.raw(TOKENS, **{name: targets}) if not subject.wants_targets else None
        if result is None:
            subject.wants_targets = False
            result = subject.raw(TOKENS, **{name: targets})
            subject.wants_targets = True
    scalars = [a for a in arrays(result, subject.engine) if a.size == 1]
    if not scalars:
        return
    loss = float(scalars[0].ravel()[0])
    want = float(cross_entropy(logits, targets))
    inside = float(cross_entropy(logits[:, :-1], targets[:, 1:]))
    if not np.isclose(loss, want, rtol=1e-4) and not np.isclose(loss, inside, rtol=1e-4):
        total = np.isclose(loss, want * TOKENS.size, rtol=1e-4)
        voice.say("loss-summed" if total else "loss-value", Example({}, round(want, 5), round(loss, 5)))


def judge_length(subject: Subject, voice: Voice) -> None:
    voice.at("longest")
    for T in (1, subject.sizes.L):
        try:
            subject(np.ones((1, T), np.int64))
        except Exception as error:
            voice.say(
                "length-fails",
                Example({"T": T}, None, common.error_text(error)),
                length=T,
                error=common.error_text(error),
            )
            return


def judge_cache(subject: Subject, voice: Voice, logits: np.ndarray) -> None:
    voice.at("cache")
    from ..names import role_of

    name = next((n for n in subject.names if role_of(n, ("cache",))), None)
    if name is None or voice.is_wrong:
        return
    cache, steps = None, []
    try:
        with quiet(subject.engine):
            for t in range(TOKENS.shape[1]):
                result = subject.raw(TOKENS[:, t : t + 1], **{name: cache})
                steps.append(arrays(result, subject.engine)[0])
                cache = result[-1]
    except Exception:
        voice.assume("cache_not_tried")
        return
    got = np.concatenate(steps, 1)
    if not equal(got, logits, 1e-5):
        t = int(np.abs(got - logits).max((0, 2)).argmax())
        voice.say("cache-differs", Example({"step": t}, logits[0, t, :4], got[0, t, :4]), step=t)


def embeds(thing: Any) -> bool:
    """It has a table for tokens, so that it takes their numbers."""
    from ..weights import walk

    return any(w.array.ndim == 2 and Sizes().V in w.array.shape for w in walk(thing))


def check_encoder(suspect: Suspect, voice: Voice) -> None:
    """A stack of blocks that reads both ways; padding that is masked must not matter."""
    voice.at("shapes")
    subject = Subject(suspect, Sizes())
    x = common.rng(0).normal(size=(2, 5, Sizes().D))
    first, second = (TOKENS, x) if embeds(subject.thing) else (x, TOKENS)
    try:
        out, inputs = subject(first), first
    except (CannotCall, NotImplementedError):
        raise
    except Exception:
        try:
            out, inputs = subject(second), second
        except Exception as error:
            voice.say(
                "raises", Example({"x": list(x.shape)}, None, common.error_text(error)), error=common.error_text(error)
            )
            return
    common.all_registered(voice, subject.thing)
    if not equal(subject(inputs), out, 1e-9):
        voice.say("dropout-in-eval", Example({}, out[0, 0, :3], subject(inputs)[0, 0, :3]))
        return
    changed = inputs.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 10 if inputs.dtype.kind == "i" else -2 * changed[:, -1]
    if equal(subject(changed)[:, 0], out[:, 0], 1e-9):
        voice.say("encoder-one-way", Example({"x": inputs[0, -1:], "and": changed[0, -1:]}, "≠", "="))
    other = inputs.copy()
    other[1] = (other[1] + 1) % 10 if inputs.dtype.kind == "i" else -2 * other[1]
    if not equal(subject(other)[0], out[0], 1e-5):
        voice.say("batch-mixed", Example({}, out[0, :2, :4], subject(other)[0, :2, :4]))
    judge_layers(suspect, subject, voice, inputs)
    judge_padding(subject, voice, inputs, changed)
    judge_device(subject, voice, inputs)


def judge_padding(subject: Subject, voice: Voice, inputs: np.ndarray, changed: np.ndarray) -> None:
    voice.at("padding")
    masks = [n for n in subject.names if re.search("mask", n.lower())]
    if not masks:
        return
    allowed = np.broadcast_to(np.arange(5) < 4, (2, 1, 5, 5)).copy()
    ran: Example | None = None
    for form in mask_forms():
        fixed = {masks[0]: form(allowed)}
        try:
            one, two = subject(inputs, **fixed), subject(changed, **fixed)
        except Exception:
            continue
        if ran is None and not np.isnan(one).any():
            ran = Example({"allowed": [1, 1, 1, 1, 0]}, one[0, :2, :4], two[0, :2, :4])
        if equal(one[:, :4], two[:, :4], 1e-5):
            voice.assume(form.sense)
            return
    if ran is not None:
        voice.say("mask-ignored", ran)
