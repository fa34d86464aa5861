"""Check the mask of a multi-head layer: its convention, mistakes, empty rows and leaks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from ..candidate import Candidate
from ..diagnostic import Example
from ..engine import NumPy, equal
from ..mask_forms import documented_sense, mask_forms
from ..mask_forms import pattern as mask_pattern
from . import attention_steps as steps
from . import common
from .attention_mask import companion_sense, likely_senses
from .common import Recorder, Runner
from .multihead_adapter import LENGTH, MultiHeadAdapter, random_case, smallest_example


def check_mask(candidate: Candidate, adapter: MultiHeadAdapter, recorder: Recorder, engine: NumPy) -> None:
    """Find the convention under which the mask works, or else the mistake."""
    recorder.start("mask")
    trials: list[Any] = []
    errors, not_causal = [], replace(adapter, causal=False)
    for form in mask_forms():
        if adapter.unbatched and form.shape != "T S":
            continue
        trial = replace(adapter, form=form)
        case = random_case(adapter)
        case["allowed"] = mask_pattern(form.kind, case["x"].shape[0], LENGTH, LENGTH)
        got, error = trial.runner(engine).attempt(case)
        if equal(got, adapter.expected_output(case), max(engine.tolerance, 1e-6)):
            adapter.form = form
            check_whole_mask(adapter, recorder, trials)
            check_sense(candidate, adapter, recorder)
            return
        if adapter.causal and equal(got, not_causal.expected_output(case), max(engine.tolerance, 1e-6)):
            recorder.assume("causal_without_mask")
            recorder.assume(form.sense)
            return
        errors.append(error)
        if got is not None:
            trials.append((trial, case, got))
    if hides_queries_too(adapter, recorder, trials, engine):
        return
    trials.sort(key=lambda trial: likely_senses(candidate).index(trial[0].form.sense if trial[0].form else ""))
    banks = {**steps.MASKS, **steps.CAUSAL} if adapter.causal else steps.MASKS
    for key, change in banks.items():
        for trial, case, got in trials:
            if equal(got, adapter.expected_output(case, replace(adapter.how, **change)), max(engine.tolerance, 1e-6)):
                recorder.assume(trial.form.sense)
                recorder.add(key, smallest_example(candidate, trial, recorder, mask=True))
                return
    if not trials:
        recorder.add("mask-raises", error=errors[0] if errors else "")
    else:
        recorder.add("mask-value", smallest_example(candidate, trials[0][0], recorder, mask=True))


def hides_queries_too(adapter: MultiHeadAdapter, recorder: Recorder, trials: list[Any], engine: NumPy) -> bool:
    """Recognize a mask [B, T] that hides queries as well as keys: what hidden queries get does not matter."""
    for trial, case, got in trials:
        readable, want = case["allowed"][:, 0, 0], adapter.expected_output(case)
        is_of_tokens = trial.form.shape == "B S" and got.shape == want.shape
        if is_of_tokens and equal(got[readable], want[readable], max(engine.tolerance, 1e-6)):
            recorder.assume(trial.form.sense)
            recorder.assume("mask_of_tokens")
            return True
    return False


def check_whole_mask(adapter: MultiHeadAdapter, recorder: Recorder, trials: list[Any]) -> None:
    """A mask with a row for each query or batch item that runs, but with wrong numbers, is read only in part."""
    assert adapter.form is not None
    for trial, case, got in trials:
        is_richer = trial.form.sense == adapter.form.sense and trial.form.kind == "any" != adapter.form.kind
        want = adapter.expected_output(case)
        if is_richer and got.shape == want.shape and np.isfinite(got).all():
            shown = {"allowed": case["allowed"][:, 0].astype(int)}
            recorder.add("mask-partly-read", Example(shown, want[0, 0, :4], got[0, 0, :4]))
            return


def check_sense(candidate: Candidate, adapter: MultiHeadAdapter, recorder: Recorder) -> None:
    assert adapter.form is not None
    sense = adapter.form.sense
    recorder.assume(sense)
    does = "allows" if sense.endswith("allows") else "blocks" if sense.endswith("blocks") else None
    for key, promise in (
        ("mask-inverted", documented_sense(candidate.source)),
        ("mask-inverted-beside", companion_sense(candidate)),
    ):
        if promise is not None and does is not None and promise != does:
            meant = replace(adapter, form=replace(adapter.form, sense=sense.replace(does, promise)))
            recorder.add(key, smallest_example(candidate, meant, recorder, mask=True))
            return


def check_hidden(adapter: MultiHeadAdapter, recorder: Recorder, run: Runner) -> None:
    """Check rows that may read nothing, and hidden tokens with values of 1e4."""
    if adapter.form is None or adapter.causal:
        return
    run = adapter.runner(run.engine)
    case = random_case(adapter)
    allowed = mask_pattern(adapter.form.kind, case["x"].shape[0], LENGTH, LENGTH)
    common.check_inputs_unchanged(recorder, run, [{**case, "mask": adapter.form(allowed)}])
    recorder.start("leak")
    case = random_case(adapter)
    case["allowed"] = mask_pattern("keys", case["x"].shape[0], LENGTH, LENGTH)
    if adapter.form.kind == "shared":
        case["allowed"] = np.broadcast_to(case["allowed"][:1], case["allowed"].shape)
    hidden = ~case["allowed"][:, 0, 0]
    if adapter.mode != "self":
        case["source"] = np.where(hidden[..., None], 1e4, case["x"])
        got, error = run.attempt(case)
        if not equal(got, adapter.expected_output(case), 1e-3) and not error:
            recorder.add(
                "fill-too-small",
                Example(
                    {"allowed": case["allowed"][0, 0, :1]},
                    adapter.expected_output(case)[0, :1],
                    None if got is None else got[0, :1],
                ),
            )
    recorder.start("nan")
    ill = {**random_case(adapter), "allowed": case["allowed"]}
    want = adapter.expected_output(ill)[~hidden]
    ill["x"] = np.where(hidden[..., None], np.nan, ill["x"])
    got, _ = run.attempt(ill)
    if got is not None and not np.isnan(want).any() and np.isnan(got[~hidden]).any():
        recorder.add("nan-leaks", Example({"allowed": case["allowed"][0, 0, :1]}, want[0, :4], got[~hidden][0, :4]))
    recorder.start("empty_row")
    empty = {**random_case(adapter), "allowed": np.zeros_like(case["allowed"])}
    got, error = replace(adapter, form=adapter.form.finite).runner(run.engine).attempt(empty)
    want = adapter.expected_output(empty)
    if error:
        recorder.add("empty-row-raises", Example({"allowed": "none"}, want[0, 0, :4], error), error=error)
    elif got is not None and np.isnan(got).any():
        recorder.add("empty-row-nan", Example({"allowed": "none"}, want[0, 0, :4], got[0, 0, :4]))
    elif not equal(got, want, 1e-5):
        recorder.add(
            "empty-row-mean", Example({"allowed": "none"}, want[0, 0, :4], None if got is None else got[0, 0, :4])
        )
    recorder.start("float16_mask")
    if run.engine.name == "torch" and adapter.D <= 64:
        mild = {"x": common.small_integers(common.rng(1), *case["x"].shape, top=1), "allowed": case["allowed"]}
        want, shown_inputs = adapter.expected_output(mild), {"allowed": case["allowed"][0, 0, :1]}
        try:
            got = run(mild, type(run.engine)("float16"))
        except Exception as problem:
            recorder.add("half-mask", Example(shown_inputs, want[0, 0, :4], common.one_line(problem)))
            return
        if not equal(got, want, 5e-2):
            recorder.add("half-mask", Example(shown_inputs, want[0, 0, :4], None if got is None else got[0, 0, :4]))
