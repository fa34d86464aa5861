"""The mask of an attention function: its sense and shape, the mistakes, empty rows and what leaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from ..adapt import mask_forms, promised
from ..adapt import pattern as mask_pattern
from ..engine import NumPy, equal
from ..finding import Example
from ..suspect import Suspect
from . import common, steps
from .attention_cases import LEADS, Subject, expected, inputs, ladder
from .common import Runner, Voice

RANKS = {2: (("T S", "shared"),), 3: (("B T S", "any"), ("T S", "shared"), ("1 T S", "shared"))}


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


def mask_properties(subject: Subject, voice: Voice, run: Runner, how: steps.Steps) -> None:
    """Empty rows, and readable scores far below the number that hidden ones are filled with."""
    assert subject.form is not None
    run = subject.runner(run.engine)
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
    voice.at("nan")
    ill = {**loud, "k": np.reshape([[1.0], [np.nan]], (*ones, 2, 1)), "v": np.reshape([[1.0], [np.nan]], (*ones, 2, 1))}
    got, _ = run.attempt(ill)
    if got is not None and np.isnan(got).any():
        voice.say("nan-leaks", Example(ill, loud["v"][..., :1, :], got))
    voice.at("empty_row")
    empty = {**loud, "k": np.reshape([[1.0], [2.0]], (*ones, 2, 1)), "allowed": np.zeros((1, 1, 1, 2), bool)}
    got, error = replace(subject, form=subject.form.finite).runner(run.engine).attempt(empty)
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
