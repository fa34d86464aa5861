"""Scaled dot-product attention: a function of q, k, v and perhaps a mask."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.reference import causal_mask

from ..adapt import MaskForm, mask_forms, promised
from ..adapt import pattern as mask_pattern
from ..engine import NumPy, equal
from ..finding import Example
from ..suspect import Caller, NotWritten, Sizes, Suspect, arrays, forward_of
from . import common, steps
from .common import Inputs, Runner, Voice

ROLES = ("q", "k", "v", "mask", "causal", "weights_too", "dropout", "training")
LAYOUTS = {"heads_first": (0, 1, 2, 3), "heads_third": (0, 2, 1, 3)}
RANKS = {2: (("T S", "shared"),), 3: (("B T S", "any"), ("T S", "shared"), ("1 T S", "shared"))}
LEADS = {2: (), 3: (2,), 4: (2, 3)}


@dataclass
class Subject:
    """The learner's function in our convention."""

    caller: Caller
    thing: Any
    rank: int = 4
    layout: str = "heads_first"
    form: MaskForm | None = None
    causal: bool = False
    neutral: float | None = None  # what a mask that must be given is filled with where nothing is to be hidden

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        given: dict[str, Any] = {}
        if inputs.get("allowed") is not None and self.form is not None:
            given["mask"] = self.form(np.asarray(inputs["allowed"]))
        elif self.neutral is not None:
            given["mask"] = np.full((inputs["q"].shape[-2], inputs["k"].shape[-2]), self.neutral)
        if inputs.get("causal"):
            given["causal"] = True
        thing = common.halved(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=forward_of(thing))
        qkv = [self.laid(inputs[name]) for name in "qkv"]
        if {"q", "k", "v"} <= caller.known:
            return caller(q=qkv[0], k=qkv[1], v=qkv[2], **given)
        return caller(*qkv, **given)

    def laid(self, x: Any) -> Any:
        if self.layout == "heads_first" or x.ndim < 4:
            return x
        return x.transpose(0, 2, 1, 3) if isinstance(x, np.ndarray) else x.permute(0, 2, 1, 3)

    def back(self, x: np.ndarray) -> np.ndarray:
        return x.transpose(0, 2, 1, 3) if self.layout != "heads_first" and x.ndim == 4 else x

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        shape = (*inputs["q"].shape[:-1], inputs["v"].shape[-1])
        return tuple(np.empty(shape).transpose(0, 2, 1, 3).shape) if self.layout != "heads_first" else shape

    def runner(self, engine: NumPy) -> Runner:
        return Runner(self.native, engine, self.shape, self.back)


def inputs(lead: tuple[int, ...], T: int, S: int, K: int, U: int, seed: int = 0, whole: bool = False) -> dict[str, Any]:
    generator = common.rng(seed)
    draw = common.whole if whole else (lambda g, *shape: g.normal(size=shape))
    return {"q": draw(generator, *lead, T, K), "k": draw(generator, *lead, S, K), "v": draw(generator, *lead, S, U)}


def ladder(lead: tuple[int, ...], same_length: bool = False) -> Iterator[dict[str, Any]]:
    """Inputs from the smallest up."""
    ones = (1,) * len(lead)
    for T, S, K, U in (
        (1, 2, 1, 1),
        (2, 2, 1, 1),
        (1, 2, 2, 1),
        (2, 2, 2, 1),
        (2, 2, 2, 2),
        (2, 3, 2, 2),
        (3, 3, 4, 4),
    ):
        for seed in range(6):
            if T == S or not same_length:
                yield inputs(ones, T, S, K, U, seed, whole=True)
    yield inputs(lead, 3, 3, 4, 4, 0, whole=True)
    yield inputs(lead, 3, 3 if same_length else 5, 4, 4 if same_length else 6)


def expected(case: Inputs, how: steps.Steps = steps.RIGHT, causal: bool = False) -> np.ndarray:
    q, k = case["q"], case["k"]
    allowed = np.ones((q.shape[-2], k.shape[-2]), bool)
    if causal or case.get("causal"):
        allowed = causal_mask(*allowed.shape)
    if case.get("allowed") is not None:
        allowed = allowed & fitted(np.asarray(case["allowed"]), q.ndim)
    heads = q.shape[1] if q.ndim == 4 else 1
    return steps.attend(q, k, case["v"], allowed, how, D=heads * q.shape[-1], H=heads)[0]


def fitted(allowed: np.ndarray, rank: int) -> np.ndarray:
    """[B, 1, T, S] for arrays of this rank."""
    return {2: lambda: allowed[0, 0], 3: lambda: allowed[:, 0], 4: lambda: allowed}[rank]()


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
    for neutral in (0.0, 1.0):  # a mask that cannot be left out
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
        voice.say("wrong-in-batch", Example({}, None, None), rank=max(fits))
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


def judge_mask(suspect: Suspect, subject: Subject, voice: Voice, engine: NumPy, how: steps.Steps) -> None:
    """The sense and shape of mask under which it is right; else the mistake under the likeliest sense."""
    voice.at("mask")
    forms = list(mask_forms(RANKS[subject.rank]) if subject.rank in RANKS else mask_forms())
    forms = [f for f in forms if f.shape != "B S" and not (subject.rank == 4 and f.shape in ("B T S", "1 T S"))]
    lead, trials, errors = LEADS[subject.rank], [], []
    for form in forms:
        case = inputs(lead, 3, 5, 4, 6)
        case["allowed"] = mask_pattern(form.kind, 2, 3, 5)
        if subject.causal or "cross-length" in [f.key for f in voice.findings]:
            case = inputs(lead, 4, 4, 4, 4)
            case["allowed"] = mask_pattern(form.kind, 2, 4, 4)
        if "value-width" in [f.key for f in voice.findings] or "mixes-keys" in [f.key for f in voice.findings]:
            case["v"] = case["v"][..., :4]
        trial = replace(subject, form=form)
        got, error = trial.runner(engine).attempt(case)
        if equal(got, expected(case, how, subject.causal), engine.tolerance):
            subject.form = form
            break
        errors.append(error)
        if got is not None:
            trials.append((trial, case, got))
    if subject.form is not None:
        confirm_sense(suspect, subject, voice, how)
        return
    trials.sort(key=lambda trial: likeliest(suspect).index(trial[0].form.sense if trial[0].form else ""))
    for key, change in steps.MASKS.items():
        for trial, case, got in trials:
            if equal(got, expected(case, replace(how, **change), subject.causal), engine.tolerance):
                report_mask(trial, voice, engine, key, how)
                return
    if not trials:
        voice.say("mask-raises", error=errors[0] if errors else "")
        return
    report_mask(trials[0][0], voice, engine, "mask-value", how)


def likeliest(suspect: Suspect) -> list[str]:
    """The senses in the order in which to read a mistake: what the words promise first."""
    senses = ["true_allows", "true_blocks", "additive", "additive_finite", "one_allows", "one_blocks"]
    return [senses[1], senses[0], *senses[2:]] if promised(suspect.source) == "blocks" else senses


def report_mask(trial: Subject, voice: Voice, engine: NumPy, key: str, how: steps.Steps) -> None:
    assert trial.form is not None
    voice.assume(trial.form.sense)
    example = common.smallest(masked_ladder(trial), trial.runner(engine), lambda c: expected(c, how, trial.causal))
    voice.say(key, example)


def masked_ladder(subject: Subject) -> Iterator[dict[str, Any]]:
    assert subject.form is not None
    lead = LEADS[subject.rank]
    B = lead[0] if lead else 1
    for case in ladder((1,) * len(lead)):
        T, S = case["q"].shape[-2], case["k"].shape[-2]
        allowed = np.ones((1, 1, T, S), bool)
        allowed[..., -1] = False
        yield {**case, "allowed": allowed}
    for T, S in ((2, 2), (3, 3), (3, 5)):
        yield {**inputs(lead, T, S, 2, 2, whole=True), "allowed": mask_pattern(subject.form.kind, B, T, S)}


def confirm_sense(suspect: Suspect, subject: Subject, voice: Voice, how: steps.Steps) -> None:
    """It is right under this sense: is it the sense that the learner's words and masks promise?"""
    assert subject.form is not None
    sense = subject.form.sense
    voice.assume(sense)
    said = promised(suspect.source)
    companion = companion_sense(suspect)
    does = "allows" if sense.endswith("allows") else "blocks" if sense.endswith("blocks") else None
    for promise in (said, companion):
        if promise is not None and does is not None and promise != does:
            meant = replace(subject, form=replace(subject.form, sense=sense.replace(does, promise)))
            example = common.smallest(
                masked_ladder(meant), meant.runner(subject.caller.engine), lambda c: expected(c, how, subject.causal)
            )
            key = "mask-inverted" if promise == said else "mask-inverted-beside"
            voice.say(key, example)
            return


def companion_sense(suspect: Suspect) -> str | None:
    """What the file's own causal mask means by 1: "allows", "blocks", or None."""
    from .masks import sense_of

    for name, thing in suspect.neighbours.items():
        if sense_of_name(name) and callable(thing) and not isinstance(thing, type):
            try:
                found = sense_of(thing, suspect.engine())
            except Exception:
                continue
            if found is not None:
                return found
    return None


def sense_of_name(name: str) -> bool:
    from ..names import part_of

    return part_of(name) == "causal_mask"


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


def mask_properties(subject: Subject, voice: Voice, run: Runner, how: steps.Steps) -> None:
    """Empty rows, and readable scores far below the number that hidden ones are filled with."""
    run = replace(subject, form=subject.form).runner(run.engine)
    ones = (1,) * len(LEADS[subject.rank])
    if voice.is_wrong:
        return
    voice.at("fill")
    case = {
        "q": np.full((*ones, 1, 1), 100.0),
        "k": np.reshape([[-200.0], [-200.0]], (*ones, 2, 1)),
        "v": np.reshape([[1.0], [5.0]], (*ones, 2, 1)),
        "allowed": np.array([[[[True, False]]]]),
    }
    if subject.causal:
        return
    want = expected(case, how)
    got, error = run.attempt(case)
    if not equal(got, want, 1e-3):
        voice.say("fill-too-small", Example(case, want, error or got))
    voice.at("leak")
    loud = {**case, "q": np.full((*ones, 1, 1), 1.0), "k": np.reshape([[1.0], [1e4]], (*ones, 2, 1))}
    got, error = run.attempt(loud)
    if not equal(got, expected(loud, how), 1e-3) and not error:
        voice.say("fill-too-small", Example(loud, expected(loud, how), got))
    voice.at("empty_row")
    empty = {**loud, "k": np.reshape([[1.0], [2.0]], (*ones, 2, 1)), "allowed": np.zeros((1, 1, 1, 2), bool)}
    got, error = run.attempt(empty)
    if error:
        voice.say("empty-row-raises", Example(empty, expected(empty, how), error), error=error)
    elif got is not None and np.isnan(got).any():
        voice.say("empty-row-nan", Example(empty, expected(empty, how), got))
    elif not equal(got, expected(empty, how)):
        voice.say("empty-row-mean", Example(empty, expected(empty, how), got))
    voice.at("float16_mask")
    half = type(run.engine)("float16")
    soft = {**empty, "allowed": np.array([[[[True, False]]]])}
    if run.engine.name == "torch":
        try:
            got = run(soft, half)
        except Exception as problem:
            voice.say("half-mask", Example(soft, expected(soft, how), common.error_text(problem)))
            return
        if not equal(got, expected(soft, how), 3e-2):
            voice.say("half-mask", Example(soft, expected(soft, how), got))


__all__ = ["check", "NotWritten"]
