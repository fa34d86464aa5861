"""Scaled dot-product attention: a function of q, k, v and perhaps a mask."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np

from clearhead.reference import causal_mask

from ..engine import NumPy, equal
from ..finding import Example
from ..suspect import Caller, Sizes, Suspect, arrays, forward_of
from . import common, steps
from .attention_cases import LEADS, ROLES, Subject, expected, inputs, ladder
from .attention_mask import judge_mask, mask_properties, masked_ladder
from .common import Inputs, Runner, Voice


def check(suspect: Suspect, voice: Voice) -> None:
    engine = suspect.engine()
    thing = engine.quiet(suspect.made(Sizes()))
    caller = Caller(forward_of(thing), engine, ROLES, Sizes())
    subject = place(Subject(caller, thing), voice, engine)
    if subject is None:
        return
    run = subject.runner(engine)
    lead = LEADS[subject.rank]
    if not common.repeats(voice, run, inputs(lead, 3, 3, 4, 4)):
        return
    how = judge_value(suspect, subject, voice, run)
    if "causal" in caller.known:
        judge_flag(subject, voice, run, how)
    if "mask" in caller.known:
        judge_mask(suspect, subject, voice, engine, how)
    properties(subject, voice, run, how)
    if subject.form is not None:
        mask_properties(subject, voice, run, how)


def place(subject: Subject, voice: Voice, engine: NumPy) -> Subject | None:
    """Which ranks it takes; an error on all of them is the first finding."""
    voice.at("shapes")
    error, fits = "", ranks(subject, engine)
    for neutral in (0.0, 1.0, True, False):  # a mask that cannot be left out
        trial = replace(subject, neutral=neutral)
        if "mask" in subject.caller.known and not any(is_right(replace(subject, rank=rank), engine) for rank in fits):
            also = ranks(trial, engine)
            if any(is_right(replace(trial, rank=rank), engine) for rank in also) or (also and not fits):
                subject, fits = trial, also
    if not fits:
        case = inputs((2,), 3, 3, 4, 4)
        got, text = replace(subject, rank=3).runner(engine).attempt(case)
        want = expected(case)
        voice.say(
            "raises" if text else "wrong-shape",
            Example({"q, k, v": "[2, 3, 4]"}, list(want.shape), text or (None if got is None else list(got.shape))),
            error=text or error,
        )
        return None
    good = [rank for rank in fits if is_right(replace(subject, rank=rank), engine)]
    subject = replace(subject, rank=(good or fits)[0])
    if good and max(fits) > max(good):
        case = inputs(LEADS[max(good)], 3, 3, 4, 4)
        causal = not equal(subject.runner(engine)(case), expected(case), engine.tolerance)
        cases = ladder(LEADS[max(fits)], same_length=True)
        example = common.smallest(cases, subject.runner(engine), lambda c: expected(c, causal=causal))
        voice.say("wrong-in-batch", example, rank=max(fits))
    voice.assume({2: "unbatched", 3: "batched", 4: "batched_heads"}[subject.rank])
    if len(fits) == 1 and fits[0] == 4 and not good:
        other = replace(subject, layout="heads_third")
        if is_right(other, engine):
            voice.assume("heads_third")
            return other
    return subject


def ranks(subject: Subject, engine: NumPy) -> list[int]:
    """The numbers of axes that it runs on."""
    found = []
    for rank in (4, 3, 2):
        trial, case = replace(subject, rank=rank), inputs(LEADS[rank], 3, 3, 4, 4)
        got, _ = trial.runner(engine).attempt(case)
        if got is not None and got.shape == trial.shape(case):
            found.append(rank)
    return found


def is_right(subject: Subject, engine: NumPy) -> bool:
    case = inputs(LEADS[subject.rank], 3, 3, 4, 4)
    got, _ = subject.runner(engine).attempt(case)
    return any(equal(got, expected(case, causal=causal), engine.tolerance) for causal in (False, True))


def judge_value(suspect: Suspect, subject: Subject, voice: Voice, run: Runner) -> steps.Steps:
    """Right, or a known mistake, or wrong in a way of its own. Returns the steps that it seems to take."""
    voice.at("value")
    lead, says_causal = LEADS[subject.rank], bool(re.search(r"causal|masked", suspect.name.lower()))
    square = inputs(lead, 4, 4, 4, 4)
    got, _ = run.attempt(square)
    takes_mask = bool({"mask", "causal"} & subject.caller.known)
    for causal in (True, False):
        if equal(got, expected(square, causal=causal), run.engine.tolerance):
            subject.causal = causal
            if says_causal and not causal and not takes_mask:
                voice.say("causal-missing", Example(square, expected(square, causal=True), got))
            judge_sizes(subject, voice, run)
            return steps.RIGHT
    uneven = inputs(lead, 4, 4, 4, 6)
    also, _ = run.attempt(uneven)
    for causal, banks in (
        (False, (steps.SCALES, steps.WEIGHTS, steps.MIXES)),
        (True, (steps.CAUSAL, steps.SCALES, steps.WEIGHTS, steps.MIXES)),
    ):
        for keys, how in steps.mistakes(*banks):
            agrees = equal(got, expected(square, how, causal), run.engine.tolerance)
            if agrees and also is not None and uneven_matters(keys):
                agrees = equal(also, expected(uneven, how, causal), run.engine.tolerance)
            if agrees and "causal-missing" not in keys:
                subject.causal = causal
                example = common.smallest(ladder(lead, same_length=causal), run, lambda c: expected(c, causal=causal))  # noqa: B023
                for key in keys:
                    voice.say(key, example)
                return how
    subject.causal = says_causal and not takes_mask
    example = common.smallest(ladder(lead, subject.causal), run, lambda c: expected(c, causal=subject.causal))
    voice.say("value", example)
    return steps.RIGHT


def uneven_matters(keys: tuple[str, ...]) -> bool:
    return not {"mixes-keys", "scores-from-values"} & set(keys)


def judge_sizes(subject: Subject, voice: Voice, run: Runner) -> None:
    """Other lengths for keys than for queries, another width for values, odd sizes."""
    lead = LEADS[subject.rank]
    for key, sizes in {"cross-length": (3, 5, 4, 4), "value-width": (3, 3, 4, 6), "odd-sizes": (3, 3, 5, 5)}.items():
        voice.at(key)
        case = inputs(lead, *sizes)
        got, error = run.attempt(case)
        wants = [expected(case)] if not subject.causal else [expected(case, causal=True), causal_from_left(case)]
        if any(equal(got, want, run.engine.tolerance) for want in wants):
            continue
        if key == "cross-length" and subject.causal:
            continue  # a causal self-attention need not have two lengths
        if key == "value-width" and got is not None:
            for name in ("scale-dv", "mixes-keys"):
                bank = {**steps.SCALES, **steps.MIXES}
                if equal(got, expected(case, replace(steps.RIGHT, **bank[name])), run.engine.tolerance):
                    key = name
        if key == "odd-sizes" and got is not None:
            for name, change in steps.SCALES.items():
                if equal(got, expected(case, replace(steps.RIGHT, **change)), run.engine.tolerance):
                    key = name.split(".")[0]
        small = [inputs((1,) * len(lead), *sizes, 0, whole=True), case]
        voice.say(key, common.smallest(small, run, lambda c: expected(c, causal=subject.causal)), error=error)


def causal_from_left(case: Inputs) -> np.ndarray:
    """The triangle anchored at the top left, which is right as long as T = S."""
    T, S = case["q"].shape[-2], case["k"].shape[-2]
    return steps.attend(case["q"], case["k"], case["v"], np.tril(np.ones((T, S), bool)), steps.RIGHT)[0]


def judge_flag(subject: Subject, voice: Voice, run: Runner, how: steps.Steps) -> None:
    """causal=True hides the future."""
    voice.at("causal")
    lead = LEADS[subject.rank]
    case = {**inputs(lead, 4, 4, 4, 4), "causal": True}
    got, error = run.attempt(case)
    if equal(got, expected(case, how), run.engine.tolerance):
        return
    small = ({**c, "causal": True} for c in ladder(lead, same_length=True))
    example = common.smallest(small, run, lambda c: expected(c, how))
    for key, change in {**steps.CAUSAL, **steps.MASKS}.items():
        if equal(got, expected(case, replace(how, **change)), run.engine.tolerance):
            voice.say("causal-inverted" if key == "mask-inverted" else key, example)
            return
    voice.say("raises" if error else "causal-value", example, error=error)


def properties(subject: Subject, voice: Voice, run: Runner, how: steps.Steps) -> None:
    lead = LEADS[subject.rank]
    case = inputs(lead, 3, 3, 4, 4)
    if not voice.is_wrong:
        stable(subject, voice, run, how)
        weights_are_weights(subject, voice, run, case, how)
    common.keeps_inputs(voice, run, [case, *([] if subject.form is None else list(masked_ladder(subject))[-1:])])
    if any(finding.key == "inputs-changed" for finding in voice.findings):
        return
    common.takes_views(voice, run, case)
    common.keeps_dtype(voice, run, case)
    for flag in (False, True) if "causal" in subject.caller.known else (False,):
        common.keeps_device(voice, run, {**case, "causal": flag}, subject.thing)
    common.has_gradient(voice, run, case)
    if not voice.is_wrong:
        small = inputs((1,) * len(lead), 3, 3, 4, 4, 1, whole=True)
        common.works_in_half(voice, run, small, expected(small, how, subject.causal))


def stable(subject: Subject, voice: Voice, run: Runner, how: steps.Steps) -> None:
    """Scores of ±1e4, and rows of very different size."""
    voice.at("stability")
    ones = (1,) * len(LEADS[subject.rank])
    for key, tops in {"softmax-unstable": (1e4,), "softmax-global-max": (-1e4, 1e4)}.items():
        q = np.reshape([[top] for top in tops], (*ones, len(tops), 1)).astype(float)
        k = np.reshape([[1.0], [0.5]][: max(2, len(tops))], (*ones, 2, 1))
        if key == "softmax-unstable" and subject.causal:
            q = np.full((*ones, 2, 1), 1e4)
        if key == "softmax-global-max":
            q, k = np.reshape([[1.0], [1e-4]], (*ones, 2, 1)) * 1e4, np.reshape([[-1.0], [-1.0001]], (*ones, 2, 1))
        case = {"q": q, "k": k, "v": np.reshape([[1.0], [2.0]], (*ones, 2, 1))}
        want = expected(case, how, subject.causal)
        got, error = run.attempt(case)
        if not equal(got, want, 1e-4):
            naive = got is not None and bool(np.isnan(got).any())
            voice.say(key if naive else "value-at-extremes", Example(case, want, error or got))
            return


def weights_are_weights(subject: Subject, voice: Voice, run: Runner, case: Inputs, how: steps.Steps) -> None:
    """If weights come back as well, they are the ones that were used."""
    voice.at("weights")
    case = inputs(LEADS[subject.rank], 3, 5, 4, 6) if not subject.causal else case
    try:
        found = arrays(run.native(case, run.engine), run.engine)
    except Exception:
        return
    lead = case["q"].shape[:-2]
    wanted = [a for a in found if a.shape == (*lead, case["q"].shape[-2], case["k"].shape[-2])]
    if len(found) < 2 or not wanted or subject.layout != "heads_first":
        return
    T, S = wanted[0].shape[-2:]
    allowed = causal_mask(T, S) if subject.causal else np.ones((T, S), bool)
    weights = steps.attend(case["q"], case["k"], case["v"], allowed, how)[1]
    weights = np.broadcast_to(weights, wanted[0].shape)
    if not equal(wanted[0], weights, run.engine.tolerance):
        voice.say("weights-returned", Example({}, weights[(0,) * len(lead)], wanted[0][(0,) * len(lead)]))
