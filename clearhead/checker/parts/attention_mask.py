"""Check the mask of an attention function: its convention, mistakes, empty rows and leaks."""

from __future__ import annotations

from collections.abc import Iterator
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
from .attention_adapter import LEADS, AttentionAdapter, expected_output, inputs, ladder
from .attention_steps import AttentionSteps
from .common import Recorder, Runner

RANKS = {2: (("T S", "shared"),), 3: (("B T S", "any"), ("T S", "shared"), ("1 T S", "shared"))}


def check_mask(
    candidate: Candidate,
    adapter: AttentionAdapter,
    recorder: Recorder,
    engine: NumPy,
    how: AttentionSteps,
) -> None:
    """Find the convention under which the mask works, or else the mistake under the likeliest one."""
    recorder.start("mask")
    forms = list(mask_forms(RANKS[adapter.rank]) if adapter.rank in RANKS else mask_forms())
    forms = [f for f in forms if f.shape != "B S" and not (adapter.rank == 4 and f.shape in ("B T S", "1 T S"))]
    lead, trials, errors = LEADS[adapter.rank], [], []
    for form in forms:
        case = inputs(lead, 3, 5, 4, 6)
        case["allowed"] = mask_pattern(form.kind, 2, 3, 5)
        if adapter.causal or "cross-length" in [f.key for f in recorder.diagnostics]:
            case = inputs(lead, 4, 4, 4, 4)
            case["allowed"] = mask_pattern(form.kind, 2, 4, 4)
        if "value-width" in [f.key for f in recorder.diagnostics] or "mixes-keys" in [
            f.key for f in recorder.diagnostics
        ]:
            case["v"] = case["v"][..., :4]
        trial = replace(adapter, form=form)
        got, error = trial.runner(engine).attempt(case)
        if equal(got, expected_output(case, how, adapter.causal), engine.tolerance):
            adapter.form = form
            break
        errors.append(error)
        if got is not None:
            trials.append((trial, case, got))
    if adapter.form is not None:
        check_whole_mask(adapter, recorder, trials, how)
        check_sense(candidate, adapter, recorder, how)
        return
    trials.sort(key=lambda trial: likely_senses(candidate).index(trial[0].form.sense if trial[0].form else ""))
    for key, change in steps.MASKS.items():
        for trial, case, got in trials:
            if equal(got, expected_output(case, replace(how, **change), adapter.causal), engine.tolerance):
                add_mask_mistake(trial, recorder, engine, key, how)
                return
    if not trials:
        recorder.add("mask-raises", error=errors[0] if errors else "")
        return
    add_mask_mistake(trials[0][0], recorder, engine, "mask-value", how)


def check_whole_mask(adapter: AttentionAdapter, recorder: Recorder, trials: list[Any], how: AttentionSteps) -> None:
    """A mask with a row for each query or batch item that runs, but with wrong numbers, is read only in part."""
    assert adapter.form is not None
    for trial, case, got in trials:
        is_richer = trial.form.sense == adapter.form.sense and trial.form.kind == "any" != adapter.form.kind
        want = expected_output(case, how, adapter.causal)
        if is_richer and got.shape == want.shape and np.isfinite(got).all():
            recorder.add("mask-partly-read", Example({"allowed": case["allowed"][:, 0].astype(int)}, want, got))
            return


def likely_senses(candidate: Candidate) -> list[str]:
    """Return the conventions in the order in which to look for mistakes, the documented one first."""
    senses = ["true_allows", "true_blocks", "additive", "additive_finite", "one_allows", "one_blocks"]
    return [senses[1], senses[0], *senses[2:]] if documented_sense(candidate.source) == "blocks" else senses


def add_mask_mistake(trial: AttentionAdapter, recorder: Recorder, engine: NumPy, key: str, how: AttentionSteps) -> None:
    assert trial.form is not None
    recorder.assume(trial.form.sense)
    example = common.smallest_failure(
        masked_ladder(trial), trial.runner(engine), lambda c: expected_output(c, how, trial.causal)
    )
    recorder.add(key, example)


def masked_ladder(adapter: AttentionAdapter) -> Iterator[dict[str, Any]]:
    assert adapter.form is not None
    lead = LEADS[adapter.rank]
    B = lead[0] if lead else 1
    for case in ladder((1,) * len(lead)):
        T, S = case["q"].shape[-2], case["k"].shape[-2]
        allowed = np.ones((1, 1, T, S), bool)
        allowed[..., -1] = False
        yield {**case, "allowed": allowed}
    for T, S in ((2, 2), (3, 3), (3, 5)):
        yield {**inputs(lead, T, S, 2, 2, whole=True), "allowed": mask_pattern(adapter.form.kind, B, T, S)}


def check_sense(candidate: Candidate, adapter: AttentionAdapter, recorder: Recorder, how: AttentionSteps) -> None:
    """Check that the convention agrees with the docstring and with the file's own mask function."""
    assert adapter.form is not None
    sense = adapter.form.sense
    recorder.assume(sense)
    documented = documented_sense(candidate.source)
    companion = companion_sense(candidate)
    does = "allows" if sense.endswith("allows") else "blocks" if sense.endswith("blocks") else None
    for promise in (documented, companion):
        if promise is not None and does is not None and promise != does:
            meant = replace(adapter, form=replace(adapter.form, sense=sense.replace(does, promise)))
            example = common.smallest_failure(
                masked_ladder(meant),
                meant.runner(adapter.caller.engine),
                lambda c: expected_output(c, how, adapter.causal),
            )
            key = "mask-inverted" if promise == documented else "mask-inverted-beside"
            recorder.add(key, example)
            return


def companion_sense(candidate: Candidate) -> str | None:
    """Return what 1 means in the file's own causal mask: "allows", "blocks" or None."""
    from .masks import sense_of

    for name, thing in candidate.neighbours.items():
        if makes_causal_mask(name) and callable(thing) and not isinstance(thing, type):
            try:
                found = sense_of(thing, candidate.engine())
            except Exception:
                continue
            if found is not None:
                return found
    return None


def makes_causal_mask(name: str) -> bool:
    from ..names import part_of

    return part_of(name) == "causal_mask"


def mask_properties(adapter: AttentionAdapter, recorder: Recorder, run: Runner, how: AttentionSteps) -> None:
    """Check empty rows, NaN in hidden places, and scores below the fill value."""
    assert adapter.form is not None
    run = adapter.runner(run.engine)
    ones = (1,) * len(LEADS[adapter.rank])
    if recorder.is_wrong:
        return
    lead = LEADS[adapter.rank]
    allowed = mask_pattern(adapter.form.kind, lead[0] if lead else 1, 3, 3)
    common.check_inputs_unchanged(recorder, run, [{**inputs(lead, 3, 3, 4, 4), "mask": adapter.form(allowed)}])
    recorder.start("fill")
    case = {
        "q": np.full((*ones, 1, 1), 100.0),
        "k": np.reshape([[-200.0], [-200.0]], (*ones, 2, 1)),
        "v": np.reshape([[1.0], [5.0]], (*ones, 2, 1)),
        "allowed": np.array([[[[True, False]]]]),
    }
    if adapter.causal:
        return
    want = expected_output(case, how)
    got, error = run.attempt(case)
    if not equal(got, want, 1e-3):
        recorder.add("fill-too-small", Example(case, want, error or got))
    recorder.start("leak")
    loud = {**case, "q": np.full((*ones, 1, 1), 1.0), "k": np.reshape([[1.0], [1e4]], (*ones, 2, 1))}
    got, error = run.attempt(loud)
    if not equal(got, expected_output(loud, how), 1e-3) and not error:
        recorder.add("fill-too-small", Example(loud, expected_output(loud, how), got))
    recorder.start("nan")
    ill = {**loud, "k": np.reshape([[1.0], [np.nan]], (*ones, 2, 1)), "v": np.reshape([[1.0], [np.nan]], (*ones, 2, 1))}
    got, _ = run.attempt(ill)
    if got is not None and np.isnan(got).any():
        recorder.add("nan-leaks", Example(ill, loud["v"][..., :1, :], got))
    recorder.start("empty_row")
    empty = {**loud, "k": np.reshape([[1.0], [2.0]], (*ones, 2, 1)), "allowed": np.zeros((1, 1, 1, 2), bool)}
    got, error = replace(adapter, form=adapter.form.finite).runner(run.engine).attempt(empty)
    if error:
        recorder.add("empty-row-raises", Example(empty, expected_output(empty, how), error), error=error)
    elif got is not None and np.isnan(got).any():
        recorder.add("empty-row-nan", Example(empty, expected_output(empty, how), got))
    elif not equal(got, expected_output(empty, how)):
        recorder.add("empty-row-mean", Example(empty, expected_output(empty, how), got))
    recorder.start("float16_mask")
    half = type(run.engine)("float16")
    soft = {**empty, "allowed": np.array([[[[True, False]]]])}
    if run.engine.name == "torch":
        try:
            got = run(soft, half)
        except Exception as problem:
            recorder.add("half-mask", Example(soft, expected_output(soft, how), common.one_line(problem)))
            return
        if not equal(got, expected_output(soft, how), 3e-2):
            recorder.add("half-mask", Example(soft, expected_output(soft, how), got))
