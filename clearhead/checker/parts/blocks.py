"""Checks of encoder and decoder blocks: residuals, norms and masks.

The check records the block's sublayer calls, combines the sublayers in every known way, right and wrong, and looks
for the combination that gives the block's own output.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

import numpy as np

from clearhead.reference import causal_mask

from ..candidate import Caller, Candidate, ProbeSizes, constructor_parameters, find_forward, parameters_of
from ..diagnostic import Example
from ..engine import NumPy, equal
from ..mask_forms import MaskForm, mask_forms
from ..names import normalize_name, role_of
from ..weights import iter_weights
from . import common
from .common import Inputs, Recorder, Runner
from .multihead_adapter import use_batch_first
from .residuals import POST, PRE, Array, match_residuals
from .sublayer_calls import SublayerCall, record_calls

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

# indices into [B, T, D]
FIRST, LAST = (slice(None), 0), (slice(None), -1)


@dataclass
class BlockAdapter:
    thing: Any
    engine: NumPy
    D: int
    form: MaskForm | None = None
    fixed: dict[str, Any] | None = None
    unbatched: bool = False
    neutral: MaskForm | None = None  # for a required mask: the form of one that hides nothing
    example: Mapping[str, Any] = field(default_factory=dict)
    neighbours: Mapping[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> list[inspect.Parameter]:
        return parameters_of(find_forward(self.thing))

    @property
    def memory(self) -> inspect.Parameter | None:
        return next((p for p in self.parameters[1:] if normalize_name(p.name) in MEMORY), None)

    @property
    def masks(self) -> list[str]:
        """The names of the self-attention mask arguments, the likeliest first."""
        found = [p.name for p in self.parameters if "mask" in p.name.lower()]
        if self.memory is None:
            return found
        own = [n for n in found if re.search("tgt|trg|target|self|look|causal|dec", n.lower())]
        return own or [n for n in found if not re.search("src|mem|cross|enc|pad", n.lower())]

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        thing = common.cast_module(self.thing, engine)
        caller = Caller(
            find_forward(thing), engine, ("mask", "cache", "training"), ProbeSizes(D=self.D), example=self.example
        )
        caller = replace(caller, neighbours=self.neighbours)
        x = inputs["x"][0] if self.unbatched else inputs["x"]
        fixed = {self.parameters[0].name: x}
        fixed |= {p.name: x for p in self.parameters if role_of(p.name, ("q", "k", "v")) and p.default is p.empty}
        if self.memory is not None:
            memory = inputs.get("memory", common.rng(9).normal(size=(inputs["x"].shape[0], 5, self.D)))
            fixed[self.memory.name] = memory
        if inputs.get("allowed") is not None and self.form is not None and self.masks:
            fixed[self.masks[0]] = engine.to_native(self.form(np.asarray(inputs["allowed"])))
        elif self.neutral is not None:
            B, T = inputs["x"].shape[:2]
            fixed[self.masks[0]] = engine.to_native(self.neutral(np.ones((B, 1, T, T), bool)))
        for parameter in self.parameters:
            if (
                "mask" in parameter.name.lower()
                and parameter.name not in fixed
                and parameter.default is parameter.empty
            ):
                fixed[parameter.name] = None
        return caller.with_fixed(**fixed)()

    def runner(self) -> Runner:
        def shape(inputs: Inputs) -> tuple[int, ...]:
            return inputs["x"].shape[1:] if self.unbatched else inputs["x"].shape

        return Runner(self.native, self.engine, shape, lambda a: a[None] if self.unbatched else a)


def check(candidate: Candidate, recorder: Recorder) -> None:
    recorder.start("shapes")
    engine = candidate.engine()
    thing = engine.eval_mode(candidate.instantiate(ProbeSizes()))
    use_batch_first(thing)
    shown = {} if candidate.example is None else candidate.example.call
    adapter = BlockAdapter(thing, engine, width_of(thing), example=shown, neighbours=candidate.neighbours)
    x = common.rng(0).normal(size=(2, 4, adapter.D))
    got, error = adapter.runner().attempt({"x": x})
    if got is None and adapter.masks:
        adapter = with_neutral_mask(adapter, x)
        got, error = adapter.runner().attempt({"x": x})
    if got is None or got.shape != x.shape:
        single = replace(adapter, unbatched=True)
        alone, _ = single.runner().attempt({"x": x[:1]})
        if alone is not None and alone.shape == x[:1].shape:
            adapter, got, x = single, alone, x[:1]
            recorder.assume("unbatched")
    if got is None or got.shape != x.shape:
        recorder.cannot_run(
            error or f"the result has the shape {None if got is None else list(got.shape)}", {"x": list(x.shape)}
        )
        return
    common.check_registered(recorder, thing)
    run = adapter.runner()
    if not common.check_deterministic(recorder, run, {"x": x}):
        return
    check_structure(candidate, adapter, recorder, x)
    check_masks(candidate, adapter, recorder)
    check_rows(candidate, adapter, recorder)
    common.check_inputs_unchanged(recorder, run, [{"x": x}])
    common.check_gradient(recorder, run, {"x": x})
    common.check_device(recorder, run, {"x": x}, thing)
    if adapter.memory is not None:
        check_memory(adapter, recorder, x)


def with_neutral_mask(adapter: BlockAdapter, x: Array) -> BlockAdapter:
    """Find the form of a required mask: if nothing is hidden, a change at the last position must reach the first."""
    other = x.copy()
    other[:, -1] *= -2
    for form in mask_forms():
        trial = replace(adapter, neutral=form)
        one, two = trial.runner().attempt({"x": x})[0], trial.runner().attempt({"x": other})[0]
        if one is not None and two is not None and np.isfinite(one).all() and not equal(one[:, 0], two[:, 0], 1e-6):
            return trial
    return adapter


def width_of(thing: Any) -> int:
    """Return the model width, read from the first norm."""
    for weight in iter_weights(thing):
        if re.search("norm|ln", weight.path.lower()) and weight.array.ndim == 1:
            return weight.array.size
    return ProbeSizes().D


def check_structure(candidate: Candidate, adapter: BlockAdapter, recorder: Recorder, x: Array) -> None:
    recorder.start("structure")
    with record_calls(adapter.thing, adapter.engine, candidate.neighbours) as calls:
        adapter.runner()({"x": x})
    with adapter.engine.no_grad():
        got = adapter.runner()({"x": x})
    assert got is not None
    calls = [e for e in calls if e.kind in ("attention", "ffn", "norm")]
    layers = [e for e in calls if e.kind != "norm"]
    if adapter.unbatched:
        x, got = x[0], got[0]
    own = [e for e in layers if e.kind == "attention"][:1]
    for other in (value for event in own for value in event.args[1:3] if is_other_input(value, event.main)):
        main, value = (adapter.engine.to_numpy(a) for a in (own[0].main, other))
        assert main is not None
        assert value is not None
        recorder.add("self-inputs-differ", Example({}, main[0, :1, :4], value[0, :1, :4]))
    wanted = 3 if adapter.memory is not None else 2
    if len(layers) != wanted:
        recorder.assume("sublayers_not_found")
        return
    try:
        inside = [count_norms(layer.owner) > 0 for layer in layers]
        found = match_residuals(calls, layers, x, got, adapter.engine, inside)
    except Exception:
        recorder.assume("sublayers_not_found")
        return
    outside = count_norms(adapter.thing) - sum(count_norms(e.owner) for e in layers)
    if found is not None and not any(c.kind == "norm" for c in calls) and outside > 0:
        found = ("norm-missing",)
    if found is None and has_own_weights(adapter.thing, calls):
        recorder.assume("sublayers_not_found")
        return
    if found is None:
        recorder.add("block-value", smallest_example(calls, layers, adapter, candidate))
        return
    for key in found:
        if key in ("pre", "post", "parallel", "sandwich"):
            recorder.assume(f"norm_{key}")
        elif key == "inside":
            recorder.assume("norms_inside")
        else:
            recorder.add(key, smallest_example(calls, layers, adapter, candidate))
    if "pre" in found:
        check_residual_dropout(adapter, recorder, x)
    norms = [e for e in calls if e.kind == "norm"]
    if len(norms) > 1 and len({id(e.target) for e in norms}) < len(norms) and count_norms(adapter.thing) > 1:
        recorder.add("norm-shared")


def check_residual_dropout(adapter: BlockAdapter, recorder: Recorder, x: Array) -> None:
    """Check that dropout acts on the branches only: if everything is dropped, a pre-norm block returns its input."""
    recorder.start("residual_dropout")
    if adapter.engine.name != "torch":
        return
    import torch

    drops = [m for m in adapter.thing.modules() if isinstance(m, torch.nn.Dropout)]
    before = [m.p for m in drops]
    for module in drops:
        module.p = 1.0
    adapter.thing.train()
    got, _ = adapter.runner().attempt({"x": x if not adapter.unbatched else x[None]})
    adapter.thing.eval()
    for module, p in zip(drops, before, strict=True):
        module.p = p
    if drops and got is not None and not got.any():
        recorder.add("dropout-on-residual", Example({"x": x[0, :1, :4], "p": 1.0}, x[0, :1, :4], got[0, :1, :4]))


def has_own_weights(thing: Any, calls: list[SublayerCall]) -> bool:
    """Return True if the block computes with weights outside its sublayers, such as a gate or a layer scale."""
    if not hasattr(thing, "parameters"):
        return False
    inside = {id(w.value) for call in calls for w in iter_weights(getattr(call.target, "__self__", call.target))}
    return any(id(p) not in inside for p in thing.parameters()) or bool(
        re.search(r"alpha|scale|gamma_?1|drop_?path", " ".join(vars(thing)).lower())
    )


def is_other_input(value: Any, main: Any) -> bool:
    """Return True for another array of the same shape and dtype: not a mask, not the same input."""
    alike = getattr(value, "shape", None) == main.shape and getattr(value, "dtype", None) == main.dtype
    return alike and not bool((value == main).all())


def count_norms(thing: Any) -> int:
    """Return the number of norms that a block or a sublayer holds."""
    from .sublayer_calls import kind_of

    kept = thing.named_modules() if hasattr(thing, "named_modules") else getattr(thing, "__dict__", {}).items()
    return sum(kind_of(name.split(".")[-1], value) == "norm" for name, value in kept if name)


def smallest_example(
    calls: list[SublayerCall], layers: list[SublayerCall], adapter: BlockAdapter, candidate: Candidate
) -> Example | None:
    """Return an example at the smallest width with which the class can be constructed."""
    for D in (2, 4, 12):
        try:
            thing = adapter.engine.eval_mode(candidate.instantiate(ProbeSizes(D=D, H=1 if D == 2 else 2, F=3)))
            tiny = replace(adapter, thing=thing, D=width_of(thing))
            if tiny.D != D:
                continue
            x = common.small_integers(common.rng(1), 1, 1, D)
            with record_calls(thing, adapter.engine, candidate.neighbours) as seen:
                got = tiny.runner()({"x": x})
            seen = [e for e in seen if e.kind in ("attention", "ffn", "norm")]
            inner = [e for e in seen if e.kind != "norm"]
            norms = [e.rerun for e in seen if e.kind == "norm"] or [lambda h: h]
            norms = (norms + norms * 3)[: len(inner)]
            h, p = (x[0], x[0]) if adapter.unbatched else (x, x)
            with adapter.engine.no_grad():
                for layer, norm in zip(inner, norms, strict=True):
                    h, p = PRE(h, layer.rerun, norm), POST(p, layer.rerun, norm)
        except Exception:
            continue
        if got is not None and not equal(got.reshape(h.shape), h, 1e-5) and not equal(got.reshape(p.shape), p, 1e-5):
            return Example(
                {"x": x, "expected for": "pre-norm, post-norm"}, np.stack((h.ravel(), p.ravel())), got.ravel()
            )
    return None


def future_leaks(adapter: BlockAdapter, form: MaskForm | None) -> bool | None:
    """Return whether a change at the last position changes earlier ones; None if it cannot run."""
    B = 1 if adapter.unbatched else 2
    x = common.rng(0).normal(size=(B, 4, adapter.D))
    later = x.copy()
    later[:, -1] *= -2
    allowed = np.broadcast_to(causal_mask(4), (B, 1, 4, 4)).copy() if form is not None else None
    run = replace(adapter, form=form).runner()
    one, _ = run.attempt({"x": x, "allowed": allowed})
    two, _ = run.attempt({"x": later, "allowed": allowed})
    if one is None or two is None or np.isnan(one).any():
        return None
    return not equal(one[:, :-1], two[:, :-1], 1e-5)


def check_masks(candidate: Candidate, adapter: BlockAdapter, recorder: Recorder) -> None:
    """Check that a decoder hides the future, by itself or by its mask, and that a mask argument is used."""
    recorder.start("future")
    if adapter.masks:
        answers = {}
        for form in mask_forms():
            if form.kind == "keys" or (adapter.unbatched and form.shape != "T S"):
                continue
            leaks = future_leaks(adapter, form)
            if leaks is False:
                recorder.assume(form.sense)
                return
            if leaks is not None:
                answers[form.sense] = leaks
        if answers and future_leaks(adapter, None) is not False:
            keys_only = any(keys_leak(adapter, form) is False for form in mask_forms() if form.kind == "keys")
            if not keys_only and mask_has_no_effect(adapter):
                form = next(form for form in mask_forms() if form.sense in answers and form.kind != "keys")
                recorder.add("mask-ignored", leak_example(candidate, replace(adapter, form=form), LAST, FIRST))
            elif not keys_only:
                recorder.assume("mask_not_understood")
        return
    if candidate.part != "decoder_block" or is_encoder(candidate) or not future_leaks(adapter, None):
        return
    if has_causal_switch(candidate):
        recorder.assume("bidirectional")
    else:
        recorder.add("future-leak", leak_example(candidate, adapter, LAST, FIRST))


def has_causal_switch(candidate: Candidate) -> bool:
    """Return True if the constructor has an argument such as `causal`, which the checker left off."""
    cls = candidate.thing if candidate.is_class else type(candidate.thing)
    return any(role_of(p.name, ("causal",)) for p in constructor_parameters(cls))


def leak_example(candidate: Candidate, adapter: BlockAdapter, changed: Any, read: Any) -> Example | None:
    """Return the smallest input on which a change in one place reaches another that it must not reach."""
    B = 1 if adapter.unbatched or changed is LAST else 2
    allowed = np.broadcast_to(causal_mask(2), (B, 1, 2, 2)).copy() if adapter.form is not None else None
    for D, seed in product((2, 4, 12), range(4)):
        x = common.small_integers(common.rng(seed), B, 2, D)
        other = x.copy()
        other[changed] = common.small_integers(common.rng(seed + 10), *x[changed].shape)
        try:
            thing = adapter.engine.eval_mode(candidate.instantiate(ProbeSizes(D=D, H=1 if D == 2 else 2, F=3)))
            tiny = replace(adapter, thing=thing, D=width_of(thing))
            one, two = (tiny.runner()({"x": value, "allowed": allowed}) for value in (x, other))
        except Exception:
            continue
        if one is not None and two is not None and np.isfinite(one).all() and not equal(one[read], two[read], 1e-5):
            mask = {} if allowed is None else {"allowed": allowed[0, 0].astype(int)}
            return Example({"x": x, "and": other, **mask}, one[read], two[read])
    return None


def is_encoder(candidate: Candidate) -> bool:
    """Return True if neither the block nor its file mentions masks or decoders: it may be bidirectional."""
    talk = re.search(
        r"causal|mask|tril|triu|decoder|gpt|llama|future", candidate.source + candidate.name, re.IGNORECASE
    )
    beside = any(
        re.search(r"causal|gpt|llama|decoder|tril|mask", str(name), re.IGNORECASE) for name in candidate.neighbours
    )
    return not talk and not beside


def keys_leak(adapter: BlockAdapter, form: MaskForm) -> bool | None:
    B = 1 if adapter.unbatched else 2
    x = common.rng(0).normal(size=(B, 4, adapter.D))
    other = x.copy()
    other[:, -1] *= -2
    allowed = np.broadcast_to(np.arange(4) < 3, (B, 1, 4, 4)).copy()
    run = replace(adapter, form=form).runner()
    one, two = run.attempt({"x": x, "allowed": allowed})[0], run.attempt({"x": other, "allowed": allowed})[0]
    return None if one is None or two is None else not equal(one[:, :-1], two[:, :-1], 1e-5)


def mask_has_no_effect(adapter: BlockAdapter) -> bool:
    """Return True if no form of mask changes the output."""
    B = 1 if adapter.unbatched else 2
    x = common.rng(0).normal(size=(B, 4, adapter.D))
    plain_out, _ = adapter.runner().attempt({"x": x})
    allowed = np.broadcast_to(causal_mask(4), (B, 1, 4, 4)).copy()
    for form in mask_forms():
        got, _ = replace(adapter, form=form).runner().attempt({"x": x, "allowed": allowed})
        if got is not None and not equal(got, plain_out if plain_out is not None else got, 1e-9):
            return False
    return True


def check_rows(candidate: Candidate, adapter: BlockAdapter, recorder: Recorder) -> None:
    recorder.start("batch")
    if adapter.unbatched:
        return
    x = common.rng(0).normal(size=(2, 4, adapter.D))
    other = x.copy()
    other[1] *= -2
    one, two = adapter.runner().attempt({"x": x})[0], adapter.runner().attempt({"x": other})[0]
    if one is not None and two is not None and not equal(one[0], two[0], 1e-5):
        flipped = common.mixes_rows(lambda x: adapter.runner().attempt({"x": x})[0], x.swapaxes(0, 1), axis=1)
        if flipped is False:
            recorder.assume("positions_first")
            return
        recorder.add("batch-mixed", leak_example(candidate, adapter, 1, 0))


def check_memory(adapter: BlockAdapter, recorder: Recorder, x: Array) -> None:
    recorder.start("memory")
    memory = common.rng(4).normal(size=(x.shape[0], 5, adapter.D))
    one = adapter.runner().attempt({"x": x, "memory": memory})[0]
    two = adapter.runner().attempt({"x": x, "memory": -2 * memory})[0]
    if one is not None and two is not None and equal(one, two, 1e-9):
        recorder.add("memory-ignored", Example({"memory": memory[0, 0, :2], "and": -2 * memory[0, 0, :2]}, "≠", "="))
