"""Multi-head attention: self, cross, causal and grouped, against the reference with the learner's own weights."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import numpy as np

from ..adapt import mask_forms
from ..engine import equal
from ..finding import Example
from ..names import size_of
from ..suspect import Caller, CannotCall, Sizes, Suspect, forward_of, parameters_of
from ..weights import Projections
from . import common, steps
from .attention_mask import likeliest
from .common import Inputs, Runner, Voice
from .multihead_layer import ROLES, Subject, big, build, small
from .multihead_mask import judge_mask, masked


def check(suspect: Suspect, voice: Voice) -> None:
    voice.at("shapes")
    grouped = suspect.is_class and any(size_of(p.name) == "G" for p in parameters_of(suspect.thing.__init__))
    sizes = Sizes(D=16, H=4, G=2) if grouped else Sizes()
    try:
        subject = build(suspect, sizes)
    except CannotCall as unknown:
        if str(unknown) == "weights" and not suspect.is_function:
            by_properties(suspect, voice)
            return
        raise
    engine = suspect.engine()
    run = subject.runner(engine)
    got, error = run.attempt(big(subject))
    if got is None or got.shape != big(subject)["x"].shape[:2] + got.shape[-1:] or got.ndim != 3:
        trial = replace(subject, unbatched=True)
        alone, _ = trial.runner(engine).attempt(big(trial))
        if alone is not None and alone.shape == (1, 4, trial.shape(big(trial))[-1]):
            subject, run, got = trial, trial.runner(engine), alone
            voice.assume("unbatched")
    if got is None and "mask" in subject.caller.known:
        subject = with_mask(suspect, subject)
        run = subject.runner(engine)
        got, error = run.attempt(big(subject))
    if got is None:
        key = transposed_error(error)
        voice.say(key, Example({"x": f"[2, 4, {subject.D}]"}, None, error), error=error)
        return
    common.all_registered(voice, subject.thing)
    if not common.repeats(voice, run, big(subject)):
        return
    judge_value(suspect, subject, voice, run)
    judge_lengths(subject, voice, run)
    if "causal" in subject.caller.known:
        judge_flag(suspect, subject, voice, run)
    if "mask" in subject.caller.known:
        judge_mask(suspect, subject, voice, engine)
    properties(suspect, subject, voice, run)


def with_mask(suspect: Suspect, subject: Subject) -> Subject:
    """A mask that cannot be left out: the form in which one that hides nothing is right, else the first that runs."""
    runs = subject
    for form in sorted(mask_forms(), key=lambda form: likeliest(suspect).index(form.sense)):
        trial = replace(subject, neutral=form)
        case, run = big(trial), trial.runner(suspect.engine())
        got, _ = run.attempt(case)
        if got is None or np.isnan(got).any():
            continue
        if any(agrees(trial, got, case, steps.RIGHT, reading, run) for reading in trial.readings):
            return trial
        runs = trial if runs is subject else runs
    return runs


def transposed_error(error: str) -> str:
    return (
        "four-as-three"
        if re.search("axes don't match|axes|repeated axis|number of dims|dimensions in the tensor", error)
        else "raises"
    )


def judge_value(suspect: Suspect, subject: Subject, voice: Voice, run: Runner) -> None:
    """Right under some reading of the weights, or a known mistake, or wrong in its own way."""
    voice.at("value")
    case = big(subject)
    got, _ = run.attempt(case)
    wants_causal = says_causal(suspect, subject)
    for causal in (False, True):
        subject.causal = causal
        for name, change in steps.TURNS.items():
            for reading in subject.readings:
                if agrees(subject, got, case, replace(steps.RIGHT, **change), reading, run):
                    subject.reading, subject.how = reading, replace(steps.RIGHT, **change)
                    for key in (*reading.assumed, *([name] if name != "plain" else [])):
                        voice.assume(key)
                    if causal:
                        voice.assume("always_causal")
                    elif wants_causal:
                        subject.causal = True
                        voice.say("causal-missing", small(suspect, subject, voice))
                    return
    for causal in (False, True) if not wants_causal else (True, False):
        subject.causal = causal
        banks: tuple[Any, ...] = (steps.HEADS, steps.SCALES, steps.WEIGHTS, steps.MIXES)
        banks = (
            (
                steps.CAUSAL,
                {
                    "mask-after-softmax": steps.MASKS["mask-after-softmax"],
                    "mask-to-zero": steps.MASKS["mask-to-zero"],
                    "mask-to-one": steps.MASKS["mask-to-one"],
                    "mask-positive": steps.MASKS["mask-positive"],
                },
                *banks,
            )
            if causal
            else banks
        )
        for keys, how in steps.mistakes(*banks):
            if "causal-missing" in keys and not wants_causal:
                continue
            for reading in subject.readings if len(keys) == 1 else subject.readings[:1]:
                if agrees(subject, got, case, how, reading, run):
                    subject.reading = reading
                    example = small(suspect, subject, voice)
                    subject.how = how
                    for key in keys:
                        voice.say(key, example)
                    return
    subject.causal = wants_causal
    voice.say(
        over_batch(suspect, subject, got, case, run) or mixing(subject, run) or "value", small(suspect, subject, voice)
    )


def says_causal(suspect: Suspect, subject: Subject) -> bool:
    """The name, a triangle in the source, or the house style of a decoder says that the future is hidden."""
    named = bool(re.search(r"causal|masked", suspect.name.lower()))
    builds = bool(re.search(r"tril|triu", suspect.source))
    return (named or builds) and not {"mask", "causal"} & subject.caller.known


def agrees(
    subject: Subject, got: np.ndarray | None, case: Inputs, how: steps.Steps, reading: Projections, run: Runner
) -> bool:
    try:
        return equal(got, subject.expected(case, how, reading), max(run.engine.tolerance, 1e-6))
    except ValueError:
        return False


def over_batch(suspect: Suspect, subject: Subject, got: np.ndarray | None, case: Inputs, run: Runner) -> str | None:
    """Attention over the first axis: [T, B, D] was expected."""
    flipped = {name: value.swapaxes(0, 1) for name, value in case.items()}
    for reading in subject.readings:
        for causal in (False, True):
            subject.causal = causal
            if agrees(subject, None if got is None else got.swapaxes(0, 1), flipped, steps.RIGHT, reading, run):
                return "attends-over-batch"
    return None


def mixing(subject: Subject, run: Runner) -> str | None:
    """One row of the batch must not change another."""
    case = big(subject)
    if subject.unbatched:
        return None
    other = {**case, "x": case["x"].copy()}
    other["x"][1] *= -2
    one, two = run.attempt(case)[0], run.attempt(other)[0]
    return "batch-mixed" if one is not None and two is not None and not equal(one[0], two[0], 1e-5) else None


def judge_lengths(subject: Subject, voice: Voice, run: Runner) -> None:
    """Keys and values from a sequence of another length."""
    voice.at("cross-length")
    if subject.mode == "self" or subject.causal or voice.is_wrong:
        return
    case = big(subject, 3, 5)
    got, error = run.attempt(case)
    if not equal(got, subject.expected(case), max(run.engine.tolerance, 1e-6)):
        even = big(subject, 4, 4)
        also, _ = run.attempt(even)
        key = "cross-length" if equal(also, subject.expected(even), 1e-5) else "cross-value"
        voice.say(
            key,
            Example(
                {"x": f"[2, 3, {subject.D}]", "source": f"[2, 5, {subject.D}]"},
                list(subject.shape(case)),
                error or (None if got is None else list(got.shape) if got.shape != subject.shape(case) else got),
            ),
            error=error,
        )


def judge_flag(suspect: Suspect, subject: Subject, voice: Voice, run: Runner) -> None:
    voice.at("causal")
    case = {**big(subject), "causal": True}
    got, error = run.attempt(case)
    if equal(got, subject.expected(case), max(run.engine.tolerance, 1e-6)):
        return
    for key, change in {**steps.CAUSAL, **steps.MASKS}.items():
        if equal(got, subject.expected(case, replace(subject.how, **change)), max(run.engine.tolerance, 1e-6)):
            voice.say(key, small(suspect, subject, voice, causal=True))
            return
    voice.say("raises" if error else "causal-value", small(suspect, subject, voice, causal=True), error=error)


def properties(suspect: Suspect, subject: Subject, voice: Voice, run: Runner) -> None:
    case = big(subject)
    common.keeps_inputs(voice, run, [case])
    if any(finding.key == "inputs-changed" for finding in voice.findings):
        return
    common.takes_views(voice, run, case)
    common.keeps_dtype(voice, run, case)
    for flag in (False, True) if "causal" in subject.caller.known else (False,):
        common.keeps_device(voice, run, {**case, "causal": flag}, subject.thing)
    common.has_gradient(voice, run, case)
    if voice.is_wrong:
        return
    stable(subject, voice, run)
    masked(subject, voice, run)
    fills = subject.causal and run.engine.name == "numpy"  # its mask may be -1e9, as in NumPy it may
    if voice.is_clean and subject.D <= 64 and not fills:
        mild = {"x": common.whole(common.rng(1), 1, 3, subject.D, top=1)}
        common.works_in_half(voice, run, mild, subject.expected(mild), tolerance=5e-2)
    judge_cache(subject, voice, run)

    def value(module: Any, batch: np.ndarray) -> Any:
        return replace(subject, thing=module, caller=replace(subject.caller, function=forward_of(module))).native(
            {"x": batch}, run.engine
        )

    if not subject.unbatched:
        common.dropout_scales(voice, subject.caller.sizes, value, case["x"][:1, :2])


def stable(subject: Subject, voice: Voice, run: Runner) -> None:
    """Large scores: a large x."""
    voice.at("stability")
    case = big(subject)
    case["x"] = case["x"] * 300
    got, error = run.attempt(case)
    want = subject.expected(case)
    if not equal(got, want, 1e-3):
        key = "softmax-unstable" if got is not None and np.isnan(got).any() else "value-at-extremes"
        voice.say(
            key,
            Example({"x": case["x"][0, :2, :4]}, want[0, :2, :4], error or (None if got is None else got[0, :2, :4])),
        )


def judge_cache(subject: Subject, voice: Voice, run: Runner) -> None:
    """One token at a time with the cache equals all at once."""
    voice.at("cache")
    if "cache" not in subject.caller.known or subject.mode != "self":
        return
    case = big(subject)
    full = subject.expected({**case, "causal": True})
    x, cache = case["x"], None
    outs: list[Any] = []
    try:
        for t in range(x.shape[1]):
            result = subject.caller(x=x[:, t : t + 1], cache=cache)
            outs.append(run.engine.take(result[0]))
            cache = result[1]
    except Exception:
        voice.assume("cache_not_tried")
        return
    got = np.concatenate(outs, 1)
    if not equal(got, full, 1e-5):
        t = int(np.abs(got - full).max((0, 2)).argmax())
        voice.say("cache-differs", Example({"step": t}, full[0, t], got[0, t]), step=t)


def by_properties(suspect: Suspect, voice: Voice) -> None:
    """Weights of unknown arrangement: only what holds for every attention."""
    voice.assume("weights_not_found")
    engine, sizes = suspect.engine(), Sizes()
    thing = engine.quiet(suspect.made(sizes))
    caller = Caller(forward_of(thing), engine, ROLES, sizes)
    eye = np.eye(sizes.D)
    subject = Subject(thing, caller, sizes.D, sizes.H, sizes.H, [Projections(eye, eye, eye, eye)])
    run = subject.runner(engine)
    case = big(subject)
    got, error = run.attempt(case)
    if got is None:
        voice.say(transposed_error(error), Example({"x": f"[2, 4, {sizes.D}]"}, None, error), error=error)
        return
    common.all_registered(voice, thing)
    common.repeats(voice, run, case)
    key = mixing(subject, run)
    if key:
        voice.say(key)
    shuffled = {"x": case["x"][:, ::-1].copy()}
    other, _ = run.attempt(shuffled)
    is_equivariant = other is not None and equal(other[:, ::-1], got, 1e-5)
    later = {"x": case["x"].copy()}
    later["x"][:, -1] *= -2
    changed, _ = run.attempt(later)
    is_causal = changed is not None and equal(changed[:, :-1], got[:, :-1], 1e-6)
    if not is_equivariant and not is_causal:
        turned = None if other is None else other[0, ::-1, :4]
        voice.say("positions-mixed", Example({}, got[0, :, :4], turned))
    if says_causal(suspect, subject) and not is_causal:
        voice.say("causal-missing", Example({}, got[0, 0, :4], None if changed is None else changed[0, 0, :4]))
    common.keeps_inputs(voice, run, [case])
    common.has_gradient(voice, run, case)
