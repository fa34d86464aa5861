"""Checks of whole models: encoders and language models."""

from __future__ import annotations

import re
from copy import copy
from typing import Any

import numpy as np

from clearhead.reference import cross_entropy

from ..candidate import Caller, Candidate, CannotCall, NotWritten, ProbeSizes, all_arrays
from ..diagnostic import Example
from ..engine import NumPy, equal
from ..mask_forms import mask_forms
from ..names import normalize_name
from ..weights import iter_weights
from . import common
from .common import Inputs, Recorder, Runner
from .multihead_adapter import use_batch_first
from .sublayer_calls import record_calls

SOURCE = ("src", "source", "srcids", "encinput", "srctokens", "inputs")
TARGETS = ("targets", "labels", "y", "target")
TOKENS = np.array([[1, 4, 2, 7, 5], [3, 6, 8, 2, 9]])


class ModelAdapter:
    """The learner's model, from tokens to logits or from vectors to vectors."""

    def __init__(self, candidate: Candidate, sizes: ProbeSizes) -> None:
        self.engine, self.sizes, self.candidate = candidate.engine(), sizes, candidate
        self.thing = self.engine.eval_mode(candidate.instantiate(sizes))
        use_batch_first(self.thing)
        self.names = [p.name for p in self.caller.parameters]
        if not self.names:
            raise NotWritten
        self.wants_targets = False

    @property
    def caller(self) -> Caller:
        return self.candidate.caller(self.thing, ("mask", "cache", "training", "tokens"), self.sizes, self.engine)

    def targets(self) -> str | None:
        return next((n for n in self.names[1:] if normalize_name(n) in TARGETS), None)

    def source(self) -> str | None:
        """Return the argument for the source tokens of an encoder-decoder."""
        sources = [n for n in self.names if normalize_name(n) in SOURCE]
        targets = [n for n in self.names if normalize_name(n) in ("tgt", "trg", "target", "dec", "decinput")]
        return sources[0] if sources and len(sources) + len(targets) > 1 else None

    def raw(self, tokens: np.ndarray, **fixed: Any) -> Any:
        given: dict[str, Any] = {}
        source = self.source()
        names = [n for n in self.names if n != source]
        if source is not None:
            given[source] = TOKENS[: len(tokens)]
        given[names[0]] = tokens
        if self.wants_targets and self.targets() and self.targets() != names[0]:
            given[str(self.targets())] = tokens
        return self.caller.with_fixed(**given, **fixed)()

    def run_on(self, inputs: Inputs, engine: NumPy) -> Any:
        moved = copy(self)
        moved.engine, moved.thing = engine, common.cast_module(self.thing, engine)
        return moved.raw(inputs["x"])

    def __call__(self, tokens: np.ndarray, **fixed: Any) -> np.ndarray:
        with self.engine.no_grad():
            found = all_arrays(self.raw(tokens, **fixed), self.engine)
        big = [a for a in found if a.ndim >= 2]
        if not big:
            raise CannotCall(self.names[0])
        value = big[0]
        return value.reshape(*tokens.shape, -1) if value.ndim == 2 and value.shape[0] == tokens.size else value


def check_lm(candidate: Candidate, recorder: Recorder) -> None:
    recorder.start("shapes")
    adapter = ModelAdapter(candidate, ProbeSizes())
    try:
        logits = adapter(TOKENS)
        if logits.shape[:2] != TOKENS.shape and adapter.targets():
            adapter.wants_targets = True
            logits = adapter(TOKENS)
    except (CannotCall, NotImplementedError):
        raise
    except Exception as error:
        recorder.cannot_run(error, {"tokens": list(TOKENS.shape)})
        return
    if logits.shape[:2] != TOKENS.shape:
        recorder.cannot_run(f"the result has the shape {list(logits.shape)}", {"tokens": list(TOKENS.shape)})
        return
    again = adapter(TOKENS)
    if not np.array_equal(logits, again, equal_nan=True):
        recorder.add("dropout-in-eval", Example({"tokens": TOKENS[0]}, logits[0, 0, :3], again[0, 0, :3]))
        return
    common.check_registered(recorder, adapter.thing)
    check_future(adapter, recorder, logits)
    check_rows(adapter, recorder, logits)
    check_order(candidate, adapter, recorder)
    check_layers(candidate, adapter, recorder)
    check_loss(adapter, recorder, logits)
    check_length(adapter, recorder)
    check_cache(adapter, recorder, logits)
    check_device(adapter, recorder, TOKENS)


def check_device(adapter: ModelAdapter, recorder: Recorder, inputs: np.ndarray) -> None:
    run = Runner(adapter.run_on, adapter.engine, lambda inputs: ())
    common.check_device(recorder, run, {"x": inputs}, adapter.thing)


def check_future(adapter: ModelAdapter, recorder: Recorder, logits: np.ndarray) -> None:
    """Check that a later token does not change earlier logits, if the model is a causal one."""
    recorder.start("future")
    if not leaks(adapter, logits):
        check_prefix(adapter, recorder, logits)
        return
    masks = [n for n in adapter.names if "mask" in n.lower()]
    if masks:
        recorder.assume("mask_by_caller")  # the caller of the model hides the future
    elif not is_causal_model(adapter.candidate):
        recorder.assume("bidirectional")
    else:
        small, other = np.array([[1, 2]]), np.array([[1, 3]])
        values = adapter(small)[0, 0, :4], adapter(other)[0, 0, :4]
        recorder.add("future-leak", Example({"tokens": small, "and": other}, *values))


def check_prefix(adapter: ModelAdapter, recorder: Recorder, logits: np.ndarray) -> None:
    """Check that the first tokens get the same logits alone and at the start of a longer sequence."""
    try:
        short = adapter(TOKENS[:, :3])
    except Exception:
        return
    if short.shape == logits[:, :3].shape and not equal(short, logits[:, :3], 1e-5):
        values = logits[0, 0, :4], short[0, 0, :4]
        recorder.add("prefix-changes", Example({"tokens": TOKENS[0], "and": TOKENS[0, :3]}, *values))


def leaks(adapter: ModelAdapter, logits: np.ndarray) -> bool:
    for t in (4, 1):
        changed = TOKENS.copy()
        changed[:, t:] = (changed[:, t:] + 1) % 10
        if not equal(adapter(changed)[:, :t], logits[:, :t], 1e-5):
            return True
    return False


def is_causal_model(candidate: Candidate) -> bool:
    """Return True if the name or the source says that the model predicts the next token."""
    names = " ".join([candidate.name, *map(str, candidate.neighbours)])
    return bool(
        re.search(r"gpt|llama|causal|decoder|tril|triu|language_?model|\blm\b|generate", names + candidate.source, re.I)
    )


def has_attention(candidate: Candidate, thing: Any) -> bool:
    """Return True if the model holds attention or blocks, or its file speaks of them: a bigram model need not."""
    if hasattr(thing, "named_modules"):
        inside = [f"{name} {type(module).__name__}" for name, module in thing.named_modules() if name]
        text = " ".join(inside) + candidate.source
    else:
        text = candidate.source + " ".join(map(str, candidate.neighbours))
    return bool(re.search(r"att(entio)?n|block|transformer|softmax|heads", text, re.I))


def check_rows(adapter: ModelAdapter, recorder: Recorder, logits: np.ndarray) -> None:
    recorder.start("batch")
    changed = TOKENS.copy()
    changed[1] = (changed[1] + 1) % 10
    other = adapter(changed)
    if not equal(other[0], logits[0], 1e-5):
        t = int(np.abs(other[0] - logits[0]).max(-1).argmax())
        recorder.add("batch-mixed", Example({"tokens": TOKENS, "and": changed}, logits[0, t, :4], other[0, t, :4]))


def check_order(candidate: Candidate, adapter: ModelAdapter, recorder: Recorder) -> None:
    """Check that the order of the tokens matters: with one layer and no positions it would not."""
    recorder.start("order")
    if not has_attention(candidate, adapter.thing):
        recorder.assume("without_attention")
        return
    try:
        shallow = ModelAdapter(candidate, ProbeSizes(N=1))
        shallow.wants_targets = adapter.wants_targets
        fill_zero_tables(shallow.thing)
        one, two = shallow(TOKENS), shallow(TOKENS[:, [1, 0, 2, 3, 4]])
    except Exception:
        return
    if equal(one[:, -1], two[:, -1], 1e-6):
        ignores = equal(one[:, -1], shallow((TOKENS + np.eye(1, 5, dtype=int)) % 10)[:, -1], 1e-9)
        recorder.add(
            "no-attention" if ignores else "no-positions", Example({"tokens": [1, 4, 2], "and": [4, 1, 2]}, "≠", "=")
        )


def fill_zero_tables(thing: Any) -> None:
    """Give tables that start at zero, such as learned positions, values that differ."""
    for weight in iter_weights(thing):
        if weight.array.ndim >= 2 and not weight.array.any():
            weight.set(common.rng(3).normal(size=weight.array.shape))


def check_layers(candidate: Candidate, adapter: ModelAdapter, recorder: Recorder, inputs: np.ndarray = TOKENS) -> None:
    """Check that layers do not share weights, that every weight is used, and that pre-norm stacks end in a norm."""
    recorder.start("layers")
    if adapter.engine.name != "torch":
        return
    import torch

    for module in adapter.thing.modules():
        if isinstance(module, torch.nn.ModuleList | torch.nn.Sequential):
            items = [m for m in module if any(True for _ in m.parameters())]
            if len({id(m) for m in items}) < len(items):
                recorder.add("layers-shared", count=len(items))
                return
    adapter.thing.zero_grad()
    result = adapter.raw(inputs)
    results: list[Any] = list(result) if isinstance(result, tuple | list) else [result]
    value = next(t for t in results if isinstance(t, torch.Tensor) and t.ndim >= 2)
    if value.requires_grad:
        (value * torch.randn_like(value)).sum().backward()
        unused = [name for name, p in adapter.thing.named_parameters() if p.grad is None]
        if unused:
            recorder.add("weight-unused", weights=", ".join(unused[:3]))
    check_final_norm(candidate, adapter, recorder, inputs)


def check_final_norm(candidate: Candidate, adapter: ModelAdapter, recorder: Recorder, inputs: np.ndarray) -> None:
    """Check that a stack whose output is not normalized ends in a norm, and that this norm comes last."""
    recorder.start("final_norm")
    with adapter.engine.no_grad(), record_calls(adapter.thing, adapter.engine, candidate.neighbours) as calls:
        adapter(inputs)
    blocks = [c for c in calls if c.kind == "block"]
    if not blocks or any(c.kind == "norm" for c in calls[calls.index(blocks[-1]) :]):
        return
    result = blocks[-1].result
    out = adapter.engine.to_numpy(result[0] if isinstance(result, tuple) else result)
    if out is None or is_normalized(out):
        return
    early = [c for c in calls[: calls.index(blocks[0])] if c.kind == "norm"]
    names = [name for name, module in adapter.thing.named_modules() for c in early if c.owner is module]
    is_final = any(re.search(r"final|ln_?f|norm_?f|out|last|^norm$", name) for name in names)
    recorder.add("final-norm-early" if is_final else "final-norm-missing")


def is_normalized(x: np.ndarray) -> bool:
    return np.allclose(x.var(-1), 1, atol=0.05) or np.allclose((x**2).mean(-1), 1, atol=0.05)


def check_loss(adapter: ModelAdapter, recorder: Recorder, logits: np.ndarray) -> None:
    """Check that the loss is the mean cross-entropy of the logits."""
    recorder.start("loss")
    name = adapter.targets()
    if name is None or adapter.source() is not None:
        return
    targets = np.roll(TOKENS, -1, 1)
    with adapter.engine.no_grad():
        result = adapter.raw(TOKENS, **{name: targets}) if not adapter.wants_targets else None
        if result is None:
            adapter.wants_targets = False
            result = adapter.raw(TOKENS, **{name: targets})
            adapter.wants_targets = True
    scalars = [a for a in all_arrays(result, adapter.engine) if a.size == 1]
    if not scalars:
        return
    loss = float(scalars[0].ravel()[0])
    want = float(cross_entropy(logits, targets))
    inside = float(cross_entropy(logits[:, :-1], targets[:, 1:]))
    if not np.isclose(loss, want, rtol=1e-4) and not np.isclose(loss, inside, rtol=1e-4):
        total = np.isclose(loss, want * TOKENS.size, rtol=1e-4)
        recorder.add("loss-summed" if total else "loss-value", Example({}, round(want, 5), round(loss, 5)))


def check_length(adapter: ModelAdapter, recorder: Recorder) -> None:
    recorder.start("longest")
    for T in (1, adapter.sizes.L):
        try:
            adapter(np.ones((1, T), np.int64))
        except Exception as error:
            recorder.add(
                "length-fails",
                Example({"T": T}, None, common.one_line(error)),
                length=T,
                error=common.one_line(error),
            )
            return


def check_cache(adapter: ModelAdapter, recorder: Recorder, logits: np.ndarray) -> None:
    recorder.start("cache")
    from ..names import role_of

    name = next((n for n in adapter.names if role_of(n, ("cache",))), None)
    if name is None or recorder.is_wrong:
        return
    cache, steps = None, []
    try:
        with adapter.engine.no_grad():
            for t in range(TOKENS.shape[1]):
                result = adapter.raw(TOKENS[:, t : t + 1], **{name: cache})
                steps.append(all_arrays(result, adapter.engine)[0])
                cache = result[-1]
    except Exception:
        recorder.assume("cache_not_tried")
        return
    got = np.concatenate(steps, 1)
    if not equal(got, logits, 1e-5):
        t = int(np.abs(got - logits).max((0, 2)).argmax())
        recorder.add("cache-differs", Example({"step": t}, logits[0, t, :4], got[0, t, :4]), step=t)


def takes_tokens(thing: Any) -> bool:
    """Return True if the model has a token embedding."""
    return any(w.array.ndim == 2 and ProbeSizes().V in w.array.shape for w in iter_weights(thing))


def check_encoder(candidate: Candidate, recorder: Recorder) -> None:
    """Check a bidirectional stack of blocks, and that masked padding has no effect."""
    recorder.start("shapes")
    adapter = ModelAdapter(candidate, ProbeSizes())
    x = common.rng(0).normal(size=(2, 5, ProbeSizes().D))
    first, second = (TOKENS, x) if takes_tokens(adapter.thing) else (x, TOKENS)
    try:
        out, inputs = adapter(first), first
    except (CannotCall, NotImplementedError):
        raise
    except Exception:
        try:
            out, inputs = adapter(second), second
        except Exception as error:
            recorder.cannot_run(error, {"x": list(x.shape)})
            return
    common.check_registered(recorder, adapter.thing)
    if not equal(adapter(inputs), out, 1e-9):
        recorder.add("dropout-in-eval", Example({}, out[0, 0, :3], adapter(inputs)[0, 0, :3]))
        return
    changed = inputs.copy()
    changed[:, -1] = (changed[:, -1] + 1) % 10 if inputs.dtype.kind == "i" else -2 * changed[:, -1]
    is_one_way = equal(adapter(changed)[:, 0], out[:, 0], 1e-9)
    other = inputs.copy()
    other[1] = (other[1] + 1) % 10 if inputs.dtype.kind == "i" else -2 * other[1]
    is_mixed = not equal(adapter(other)[0], out[0], 1e-5)
    if is_one_way and is_mixed and inputs.dtype.kind == "f":
        recorder.assume("positions_first")
        return
    if is_one_way and is_bidirectional(candidate):
        recorder.add("encoder-one-way", Example({"x": inputs[0, -1:], "and": changed[0, -1:]}, "≠", "="))
    if is_mixed:
        recorder.add("batch-mixed", Example({}, out[0, :2, :4], adapter(other)[0, :2, :4]))
    check_layers(candidate, adapter, recorder, inputs)
    check_padding(adapter, recorder, inputs, changed)
    check_device(adapter, recorder, inputs)


def is_bidirectional(candidate: Candidate) -> bool:
    """Return True if it is called an encoder, and nothing in it speaks of the future."""
    is_named = "encoder" in candidate.name.lower()
    return is_named and not re.search(r"causal|tril|triu|decoder", candidate.source, re.I)


def check_padding(adapter: ModelAdapter, recorder: Recorder, inputs: np.ndarray, changed: np.ndarray) -> None:
    recorder.start("padding")
    masks = [n for n in adapter.names if re.search("mask", n.lower())]
    if not masks:
        return
    allowed = np.broadcast_to(np.arange(5) < 4, (2, 1, 5, 5)).copy()
    ran: Example | None = None
    for form in mask_forms():
        fixed = {masks[0]: form(allowed)}
        try:
            one, two = adapter(inputs, **fixed), adapter(changed, **fixed)
        except Exception:
            continue
        if ran is None and not np.isnan(one).any():
            ran = Example({"allowed": [1, 1, 1, 1, 0]}, one[0, :2, :4], two[0, :2, :4])
        if equal(one[:, :4], two[:, :4], 1e-5):
            recorder.assume(form.sense)
            return
    if ran is not None:
        recorder.add("mask-ignored", ran)
