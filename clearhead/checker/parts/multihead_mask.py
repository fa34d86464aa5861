"""The mask of a multi-head layer: its sense and shape, the mistakes, empty rows and what leaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..adapt import mask_forms, promised
from ..adapt import pattern as mask_pattern
from ..engine import NumPy, equal
from ..finding import Example
from ..suspect import Suspect
from . import common, steps
from .attention_mask import companion_sense, likeliest
from .common import Runner, Voice
from .multihead_layer import Subject, big, small


def judge_mask(suspect: Suspect, subject: Subject, voice: Voice, engine: NumPy) -> None:
    """The form of mask under which it is right, else the mistake."""
    voice.at("mask")
    trials, errors = [], []
    for form in mask_forms():
        if subject.unbatched and form.shape != "T S":
            continue
        trial = replace(subject, form=form)
        case = big(subject)
        case["allowed"] = mask_pattern(form.kind, case["x"].shape[0], 4, 4)
        got, error = trial.runner(engine).attempt(case)
        if equal(got, subject.expected(case), max(engine.tolerance, 1e-6)):
            subject.form = form
            confirm_sense(suspect, subject, voice)
            return
        errors.append(error)
        if got is not None:
            trials.append((trial, case, got))
    trials.sort(key=lambda trial: likeliest(suspect).index(trial[0].form.sense if trial[0].form else ""))
    banks = {**steps.MASKS, **steps.CAUSAL} if subject.causal else steps.MASKS
    for key, change in banks.items():
        for trial, case, got in trials:
            if equal(got, subject.expected(case, replace(subject.how, **change)), max(engine.tolerance, 1e-6)):
                voice.assume(trial.form.sense)  # type: ignore[union-attr]
                voice.say(key, small(suspect, trial, voice, mask=True))
                return
    if not trials:
        voice.say("mask-raises", error=errors[0] if errors else "")
    else:
        voice.say("mask-value", small(suspect, trials[0][0], voice, mask=True))


def confirm_sense(suspect: Suspect, subject: Subject, voice: Voice) -> None:
    assert subject.form is not None
    sense = subject.form.sense
    voice.assume(sense)
    does = "allows" if sense.endswith("allows") else "blocks" if sense.endswith("blocks") else None
    for key, promise in (
        ("mask-inverted", promised(suspect.source)),
        ("mask-inverted-beside", companion_sense(suspect)),
    ):
        if promise is not None and does is not None and promise != does:
            meant = replace(subject, form=replace(subject.form, sense=sense.replace(does, promise)))
            voice.say(key, small(suspect, meant, voice, mask=True))
            return


def masked(subject: Subject, voice: Voice, run: Runner) -> None:
    """Rows that may read nothing; hidden tokens of size 1e4."""
    if subject.form is None or subject.causal:
        return
    run = subject.runner(run.engine)
    voice.at("leak")
    case = big(subject)
    case["allowed"] = mask_pattern("keys", case["x"].shape[0], 4, 4)
    if subject.form.kind == "shared":
        case["allowed"] = np.broadcast_to(case["allowed"][:1], case["allowed"].shape)
    hidden = ~case["allowed"][:, 0, 0]
    if subject.mode != "self":
        case["source"] = np.where(hidden[..., None], 1e4, case["x"])
        got, error = run.attempt(case)
        if not equal(got, subject.expected(case), 1e-3) and not error:
            voice.say(
                "fill-too-small",
                Example(
                    {"allowed": case["allowed"][0, 0, :1]},
                    subject.expected(case)[0, :1],
                    None if got is None else got[0, :1],
                ),
            )
    voice.at("nan")
    ill = {**big(subject), "allowed": case["allowed"]}
    want = subject.expected(ill)[~hidden]
    ill["x"] = np.where(hidden[..., None], np.nan, ill["x"])
    got, _ = run.attempt(ill)
    if got is not None and not np.isnan(want).any() and np.isnan(got[~hidden]).any():
        voice.say("nan-leaks", Example({"allowed": case["allowed"][0, 0, :1]}, want[0, :4], got[~hidden][0, :4]))
    voice.at("empty_row")
    empty = {**big(subject), "allowed": np.zeros_like(case["allowed"])}
    got, error = replace(subject, form=subject.form.finite).runner(run.engine).attempt(empty)
    want = subject.expected(empty)
    if error:
        voice.say("empty-row-raises", Example({"allowed": "none"}, want[0, 0, :4], error), error=error)
    elif got is not None and np.isnan(got).any():
        voice.say("empty-row-nan", Example({"allowed": "none"}, want[0, 0, :4], got[0, 0, :4]))
    elif not equal(got, want, 1e-5):
        voice.say(
            "empty-row-mean", Example({"allowed": "none"}, want[0, 0, :4], None if got is None else got[0, 0, :4])
        )
    voice.at("float16_mask")
    if run.engine.name == "torch" and subject.D <= 64:
        mild = {"x": common.whole(common.rng(1), *case["x"].shape, top=1), "allowed": case["allowed"]}
        want, shown = subject.expected(mild), {"allowed": case["allowed"][0, 0, :1]}
        try:
            got = run(mild, type(run.engine)("float16"))
        except Exception as problem:
            voice.say("half-mask", Example(shown, want[0, 0, :4], common.error_text(problem)))
            return
        if not equal(got, want, 5e-2):
            voice.say("half-mask", Example(shown, want[0, 0, :4], None if got is None else got[0, 0, :4]))
