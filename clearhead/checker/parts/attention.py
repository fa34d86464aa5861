"""Scaled dot-product attention: a function of q, k, v and perhaps a mask."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np

from clearhead.reference import causal_mask

from ..candidate import Candidate, ProbeSizes, all_arrays
from ..diagnostic import Example
from ..engine import NumPy, equal
from . import attention_steps as steps
from . import common
from .attention_adapter import (
    LEADS,
    PROBE_WIDTH,
    ROLES,
    AttentionAdapter,
    construct_for,
    expected_output,
    inputs,
    ladder,
)
from .attention_mask import check_mask, mask_properties, masked_ladder
from .attention_steps import AttentionSteps
from .common import UNKNOWN_PARTS, Inputs, Recorder, Runner


def check(candidate: Candidate, recorder: Recorder) -> None:
    engine = candidate.engine()
    thing = construct_for(candidate, PROBE_WIDTH)
    caller = candidate.caller(thing, ROLES, ProbeSizes())
    adapter = find_rank(AttentionAdapter(candidate, caller, thing), recorder, engine)
    if adapter is None:
        return
    run = adapter.runner(engine)
    lead = LEADS[adapter.rank]
    if not common.check_deterministic(recorder, run, inputs(lead, 3, 3, 4, 4)):
        return
    how = check_value(candidate, adapter, recorder, run)
    if "causal" in caller.argument_roles:
        check_flag(adapter, recorder, run, how)
    if "mask" in caller.argument_roles:
        check_mask(candidate, adapter, recorder, engine, how)
    properties(adapter, recorder, run, how)
    if adapter.form is not None:
        mask_properties(adapter, recorder, run, how)


def find_rank(adapter: AttentionAdapter, recorder: Recorder, engine: NumPy) -> AttentionAdapter | None:
    """Find out how many axes its inputs have; if none works, record the error."""
    recorder.start("shapes")
    adapter = with_scale(adapter, recorder, engine)
    fits = ranks_that_run(adapter, engine)
    for neutral in (0.0, 1.0, True, False):  # for a required mask
        trial = replace(adapter, neutral=neutral)
        if "mask" in adapter.caller.argument_roles and not any(
            is_right(replace(adapter, rank=rank), engine) for rank in fits
        ):
            also = [rank for rank in ranks_that_run(trial, engine) if not hides_all(replace(trial, rank=rank), engine)]
            if any(is_right(replace(trial, rank=rank), engine) for rank in also) or (also and not fits):
                adapter, fits = trial, also
    if not fits:
        case = inputs((2,), 3, 3, 4, 4)
        got, text = replace(adapter, rank=3).runner(engine).attempt(case)
        want = expected_output(case)
        if text or got is None:
            recorder.cannot_run(text or "the result is not an array", {"q, k, v": [2, 3, 4]})
        else:
            recorder.add("wrong-shape", Example({"q, k, v": [2, 3, 4]}, list(want.shape), list(got.shape)))
        return None
    good = [rank for rank in fits if is_right(replace(adapter, rank=rank), engine)]
    adapter = replace(adapter, rank=(good or fits)[0])
    adapter.first = adapter.find_output(engine)
    if good and max(fits) > max(good):
        case = inputs(LEADS[max(good)], 3, 3, 4, 4)
        causal = not equal(adapter.runner(engine)(case), expected_output(case), engine.tolerance)
        cases = ladder(LEADS[max(fits)], same_length=True)
        example = common.smallest_failure(cases, adapter.runner(engine), lambda c: expected_output(c, causal=causal))
        recorder.add("wrong-in-batch", example, rank=max(fits))
    recorder.assume({2: "unbatched", 3: "batched", 4: "batched_heads"}[adapter.rank])
    if len(fits) == 1 and fits[0] == 4 and not good:
        other = replace(adapter, layout="heads_third")
        if is_right(other, engine):
            recorder.assume("heads_third")
            return other
    return adapter


def with_scale(adapter: AttentionAdapter, recorder: Recorder, engine: NumPy) -> AttentionAdapter:
    """If the caller chooses the scale, find out what to pass: 1/√d_k, √d_k or d_k."""
    names = [p.name for p in adapter.caller.parameters if re.search(r"scal|temperature|factor", p.name.lower())]
    trials = [replace(adapter, scale=(name, power)) for name in names for power in (-0.5, 0.5, 1.0)]
    for trial, rank in product(trials, LEADS):
        if not is_right(replace(adapter, rank=rank), engine) and is_right(replace(trial, rank=rank), engine):
            recorder.assume("scale_given")
            return trial
    return adapter


def ranks_that_run(adapter: AttentionAdapter, engine: NumPy) -> list[int]:
    """Return the input ranks on which it runs."""
    found = []
    for rank in (4, 3, 2):
        trial, case = replace(adapter, rank=rank), inputs(LEADS[rank], 3, 3, 4, 4)
        got, _ = trial.runner(engine).attempt(case)
        if got is not None and got.shape == trial.shape(case):
            found.append(rank)
    return found


def hides_all(adapter: AttentionAdapter, engine: NumPy) -> bool:
    """Return True if the mask hides every key: the result is NaN, or the mean of the values."""
    case = inputs(LEADS[adapter.rank], 3, 3, 4, 4)
    got, _ = adapter.runner(engine).attempt(case)
    return (
        got is None or bool(np.isnan(got).all()) or equal(got, expected_output(case, steps.HIDES_ALL), engine.tolerance)
    )


def is_right(adapter: AttentionAdapter, engine: NumPy) -> bool:
    case = inputs(LEADS[adapter.rank], 3, 3, 4, 4)
    got, _ = adapter.runner(engine).attempt(case)
    return any(equal(got, expected_output(case, causal=causal), engine.tolerance) for causal in (False, True))


def check_value(candidate: Candidate, adapter: AttentionAdapter, recorder: Recorder, run: Runner) -> AttentionSteps:
    """Compare with the definition and with known mistakes. Return the steps that it seems to take."""
    recorder.start("value")
    lead, says_causal = LEADS[adapter.rank], bool(re.search(r"causal|masked", candidate.name.lower()))
    square = inputs(lead, 4, 4, 4, 4)
    got, _ = run.attempt(square)
    takes_mask = bool({"mask", "causal"} & adapter.caller.argument_roles)
    for causal in (True, False):
        if equal(got, expected_output(square, causal=causal), run.engine.tolerance):
            adapter.causal = causal
            if says_causal and not causal and not takes_mask:
                recorder.add("causal-missing", Example(square, expected_output(square, causal=True), got))
            check_sizes(adapter, recorder, run)
            return steps.RIGHT
    uneven = inputs(lead, 4, 4, 4, 6)
    also, _ = run.attempt(uneven)
    for causal, banks in (
        (False, (steps.SCALES, steps.WEIGHTS, steps.MIXES)),
        (True, (steps.CAUSAL, steps.SCALES, steps.WEIGHTS, steps.MIXES)),
    ):
        for keys, how in steps.mistakes(*banks):
            agrees = equal(got, expected_output(square, how, causal), run.engine.tolerance)
            if agrees and also is not None and uneven_matters(keys):
                agrees = equal(also, expected_output(uneven, how, causal), run.engine.tolerance)
            if agrees and "causal-missing" not in keys:
                adapter.causal = causal
                example = common.smallest_failure(
                    ladder(lead, same_length=causal), run, partial(expected_output, causal=causal)
                )
                for key in keys:
                    recorder.add(key, example)
                return how
    adapter.causal = says_causal and not takes_mask
    example = common.smallest_failure(
        ladder(lead, adapter.causal), run, lambda c: expected_output(c, causal=adapter.causal)
    )
    beyond = re.search(UNKNOWN_PARTS, candidate.name + " " + candidate.source, re.IGNORECASE)
    if beyond:
        recorder.add("beyond-definition", word=beyond.group(0), name=candidate.name)
    else:
        recorder.add("value", example)
    return steps.RIGHT


def uneven_matters(keys: tuple[str, ...]) -> bool:
    return not {"mixes-keys", "scores-from-values"} & set(keys)


def check_sizes(adapter: AttentionAdapter, recorder: Recorder, run: Runner) -> None:
    """Check keys longer than queries, values wider than keys, and odd sizes."""
    lead = LEADS[adapter.rank]
    for key, sizes in {"cross-length": (3, 5, 4, 4), "value-width": (3, 3, 4, 6), "odd-sizes": (3, 3, 5, 5)}.items():
        recorder.start(key)
        case = inputs(lead, *sizes)
        got, error = run.attempt(case)
        wants = [expected_output(case, causal=adapter.causal), *([causal_from_left(case)] if adapter.causal else [])]
        if any(equal(got, want, run.engine.tolerance) for want in wants):
            continue
        if key == "cross-length" and adapter.causal:
            continue  # causal self-attention has one length
        if key == "value-width" and got is not None:
            for name in ("scale-dv", "mixes-keys"):
                bank = {**steps.SCALES, **steps.MIXES}
                if equal(got, expected_output(case, replace(steps.RIGHT, **bank[name])), run.engine.tolerance):
                    key = name
        if key == "odd-sizes" and got is not None:
            for name, change in steps.SCALES.items():
                if equal(got, expected_output(case, replace(steps.RIGHT, **change)), run.engine.tolerance):
                    key = name.split(".")[0]
        small = [inputs((1,) * len(lead), *sizes, 0, whole=True), case]
        recorder.add(
            key, common.smallest_failure(small, run, lambda c: expected_output(c, causal=adapter.causal)), error=error
        )


def causal_from_left(case: Inputs) -> np.ndarray:
    """Expected result for a causal mask aligned at the top left."""
    T, S = case["q"].shape[-2], case["k"].shape[-2]
    return steps.attend(case["q"], case["k"], case["v"], np.tril(np.ones((T, S), bool)), steps.RIGHT)[0]


def check_flag(adapter: AttentionAdapter, recorder: Recorder, run: Runner, how: AttentionSteps) -> None:
    """Check that causal=True hides the future."""
    recorder.start("causal")
    lead = LEADS[adapter.rank]
    case = {**inputs(lead, 4, 4, 4, 4), "causal": True}
    got, error = run.attempt(case)
    if equal(got, expected_output(case, how), run.engine.tolerance):
        return
    small = ({**c, "causal": True} for c in ladder(lead, same_length=True))
    example = common.smallest_failure(small, run, lambda c: expected_output(c, how))
    for key, change in {**steps.CAUSAL, **steps.MASKS}.items():
        if equal(got, expected_output(case, replace(how, **change)), run.engine.tolerance):
            recorder.add("causal-inverted" if key == "mask-inverted" else key, example)
            return
    recorder.add("raises" if error else "causal-value", example, error=error)


def properties(adapter: AttentionAdapter, recorder: Recorder, run: Runner, how: AttentionSteps) -> None:
    lead = LEADS[adapter.rank]
    case = inputs(lead, 3, 3, 4, 4)
    if not recorder.is_wrong:
        check_stability(adapter, recorder, run, how)
        check_returned_weights(adapter, recorder, run, case, how)
    common.check_inputs_unchanged(
        recorder, run, [case, *([] if adapter.form is None else list(masked_ladder(adapter))[-1:])]
    )
    if any(diagnostic.key == "inputs-changed" for diagnostic in recorder.diagnostics):
        return
    common.check_views(recorder, run, case)
    common.check_dtype(recorder, run, case)
    for flag in (False, True) if "causal" in adapter.caller.argument_roles else (False,):
        common.check_device(recorder, run, {**case, "causal": flag}, adapter.thing)
    common.check_gradient(recorder, run, case)
    if not recorder.is_wrong:
        small = inputs((1,) * len(lead), 3, 3, 4, 4, 1, whole=True)
        common.check_float16(recorder, run, small, expected_output(small, how, adapter.causal))


def check_stability(adapter: AttentionAdapter, recorder: Recorder, run: Runner, how: AttentionSteps) -> None:
    """Check scores of ±1e4, and rows of very different magnitude."""
    recorder.start("stability")
    ones = (1,) * len(LEADS[adapter.rank])
    for key, tops in {"softmax-unstable": (1e4,), "softmax-global-max": (-1e4, 1e4)}.items():
        q = np.reshape([[top] for top in tops], (*ones, len(tops), 1)).astype(float)
        k = np.reshape([[1.0], [0.5]][: max(2, len(tops))], (*ones, 2, 1))
        if key == "softmax-unstable" and adapter.causal:
            q = np.full((*ones, 2, 1), 1e4)
        if key == "softmax-global-max":
            q, k = np.reshape([[1.0], [1e-4]], (*ones, 2, 1)) * 1e4, np.reshape([[-1.0], [-1.0001]], (*ones, 2, 1))
        case = {"q": q, "k": k, "v": np.reshape([[1.0], [2.0]], (*ones, 2, 1))}
        want = expected_output(case, how, adapter.causal)
        got, error = run.attempt(case)
        if not equal(got, want, 1e-4):
            naive = got is not None and bool(np.isnan(got).any())
            recorder.add(key if naive else "value-at-extremes", Example(case, want, error or got))
            return


def check_returned_weights(
    adapter: AttentionAdapter, recorder: Recorder, run: Runner, case: Inputs, how: AttentionSteps
) -> None:
    """If it also returns weights, check that they are the ones it used."""
    recorder.start("weights")
    case = inputs(LEADS[adapter.rank], 3, 5, 4, 6) if not adapter.causal else case
    try:
        found = all_arrays(run.native(case, run.engine), run.engine)
    except Exception:
        return
    lead = case["q"].shape[:-2]
    wanted = [a for a in found if a.shape == (*lead, case["q"].shape[-2], case["k"].shape[-2])]
    if len(found) < 2 or not wanted or adapter.layout != "heads_first":
        return
    T, S = wanted[0].shape[-2:]
    allowed = causal_mask(T, S) if adapter.causal else np.ones((T, S), bool)
    weights = steps.attend(case["q"], case["k"], case["v"], allowed, how)[1]
    weights = np.broadcast_to(weights, wanted[0].shape)
    if not equal(wanted[0], weights, run.engine.tolerance):
        recorder.add("weights-returned", Example({}, weights[(0,) * len(lead)], wanted[0][(0,) * len(lead)]))
