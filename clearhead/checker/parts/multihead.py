"""Check of multi-head attention (self, cross, causal, grouped) against the reference with the learner's weights."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

from ..candidate import Candidate, CannotCall, ProbeSizes, find_forward
from ..diagnostic import Example
from ..engine import NumPy, equal
from ..mask_forms import mask_forms
from ..weights import Projections
from . import attention_steps as steps
from . import common
from .attention_mask import likely_senses
from .attention_steps import AttentionSteps
from .common import UNKNOWN_PARTS, Inputs, Recorder, Runner
from .multihead_adapter import LENGTH, ROLES, MultiHeadAdapter, build, random_case, smallest_example
from .multihead_mask import check_hidden, check_mask
from .rotary import LAYOUTS


def check(candidate: Candidate, recorder: Recorder) -> None:
    recorder.start("shapes")
    grouped = candidate.constructor_takes("G")
    sizes = ProbeSizes(D=16, H=4, G=2) if grouped else ProbeSizes()
    try:
        adapter = build(candidate, sizes)
    except CannotCall as unknown:
        if str(unknown) == "weights" and not candidate.is_function:
            check_properties_only(candidate, recorder)
            return
        raise
    engine = candidate.engine()
    run = adapter.runner(engine)
    got, error = run.attempt(random_case(adapter))
    if got is None or got.shape != random_case(adapter)["x"].shape[:2] + got.shape[-1:] or got.ndim != 3:
        trial = replace(adapter, unbatched=True)
        alone, _ = trial.runner(engine).attempt(random_case(trial))
        if alone is not None and alone.shape == (1, LENGTH, trial.shape(random_case(trial))[-1]):
            adapter, run, got = trial, trial.runner(engine), alone
            recorder.assume("unbatched")
    if got is None and "mask" in adapter.caller.argument_roles:
        adapter = with_neutral_mask(candidate, adapter)
        run = adapter.runner(engine)
        got, error = run.attempt(random_case(adapter))
    if got is None:
        add_first_error(recorder, error, adapter.D)
        return
    common.check_registered(recorder, adapter.thing)
    if not common.check_deterministic(recorder, run, random_case(adapter)):
        return
    check_value(candidate, adapter, recorder, run)
    if not adapter.is_modeled:
        check_unmodeled(adapter, recorder, run)
        return
    check_lengths(adapter, recorder, run)
    if "causal" in adapter.caller.argument_roles:
        check_flag(candidate, adapter, recorder, run)
    if "mask" in adapter.caller.argument_roles:
        check_mask(candidate, adapter, recorder, engine)
    properties(candidate, adapter, recorder, run)


def check_unmodeled(adapter: MultiHeadAdapter, recorder: Recorder, run: Runner) -> None:
    """Run the checks that need no expected output."""
    case = random_case(adapter)
    common.check_inputs_unchanged(recorder, run, [case])
    common.check_gradient(recorder, run, case)
    common.check_device(recorder, run, case, adapter.thing)


def with_neutral_mask(candidate: Candidate, adapter: MultiHeadAdapter) -> MultiHeadAdapter:
    """If the layer requires a mask, find the form in which a mask that hides nothing works."""
    runs = adapter
    for form in sorted(mask_forms(), key=lambda form: likely_senses(candidate).index(form.sense)):
        trial = replace(adapter, neutral=form)
        case, run = random_case(trial), trial.runner(candidate.engine())
        got, _ = run.attempt(case)
        if got is None or np.isnan(got).any():
            continue
        if any(agrees(trial, got, case, steps.HIDES_ALL, reading, run) for reading in trial.readings):
            continue
        if any(agrees(trial, got, case, steps.RIGHT, reading, run) for reading in trial.readings):
            return trial
        runs = trial if runs is adapter else runs
    return runs


def add_first_error(recorder: Recorder, error: str, D: int) -> None:
    """Record the first call's error: too few axes in a transpose is a known mistake; others may be our call's fault."""
    if re.search("axes don't match|repeated axis|number of dims|dimensions in the tensor", error):
        recorder.add("four-as-three", Example({"x": [2, 4, D]}, None, error), error=error)
    else:
        recorder.cannot_run(error, {"x": [2, 4, D]})


def check_value(candidate: Candidate, adapter: MultiHeadAdapter, recorder: Recorder, run: Runner) -> None:
    """Compare with the definition under every reading of the layer, then with known mistakes."""
    recorder.start("value")
    case = random_case(adapter)
    got, _ = run.attempt(case)
    wants_causal = says_causal(candidate, adapter)
    variants = right_variants(candidate)
    for wrap, causal, (name, how), reading in product(adapter.wraps, (False, True), variants.items(), adapter.readings):
        adapter.wrap, adapter.causal = wrap, causal
        if agrees(adapter, got, case, how, reading, run):
            adapter.reading, adapter.how = reading, how
            for key in (*reading.assumed, wrap, name.split(".")[0]):
                if key not in ("", "plain"):
                    recorder.assume(key)
            if name.startswith("groups_interleaved"):
                recorder.add("groups-interleaved")
            if causal:
                recorder.assume("always_causal")
            elif wants_causal:
                adapter.causal = True
                recorder.add("causal-missing", smallest_example(candidate, adapter, recorder))
            return
    if name_mistakes(candidate, adapter, recorder, run, got, variants):
        return
    adapter.causal, adapter.wrap = wants_causal, adapter.wraps[0]
    if has_unknown_parts(candidate, adapter) or adapter.norm is not None:
        adapter.is_modeled = False
        check_layer_properties(candidate, adapter, recorder, run)
        return
    recorder.add(
        batch_axis_mistake(candidate, adapter, got, case, run) or mixed_rows_mistake(adapter, run) or "value",
        smallest_example(candidate, adapter, recorder),
    )


def right_variants(candidate: Candidate) -> dict[str, AttentionSteps]:
    """Return the right ways to compute the layer: plain, and with rotary positions if the file mentions them."""
    found = {name: replace(steps.RIGHT, **change) for name, change in steps.VARIANTS.items()}
    for layout, base in rotary_options(candidate):
        turn = steps.rotary_variant(layout, base=base)
        found[f"rope_{layout}.{base:g}"] = replace(steps.RIGHT, turn=turn)
        shared = {**steps.VARIANTS["groups_interleaved"], "turn": turn}
        found[f"groups_interleaved.{layout}.{base:g}"] = replace(steps.RIGHT, **shared)
    return found


def rotary_options(candidate: Candidate) -> list[tuple[str, float]]:
    """Return the layouts and bases of rotary positions to try: 10000, and those that the file sets."""
    text = candidate.source + " ".join(map(str, candidate.neighbours))
    if not re.search(r"rope|rotary|rotat|freqs|\bcos\b", text, re.IGNORECASE):
        return []
    given = re.findall(r"(?:theta|base)\w*\s*(?::\s*\w+\s*)?=\s*(\d[\d_]*\.?\d*(?:e\+?\d+)?)", candidate.file_source)
    bases = {float(number.replace("_", "")) for number in given} - {10000.0}
    return [(layout, base) for base in (10000.0, *sorted(bases)[:3]) if base > 1 for layout in LAYOUTS]


def name_mistakes(
    candidate: Candidate,
    adapter: MultiHeadAdapter,
    recorder: Recorder,
    run: Runner,
    got: np.ndarray | None,
    variants: dict[str, AttentionSteps],
) -> bool:
    """Look for known mistakes, alone and in pairs; return True if one explains the numbers."""
    case, wants_causal = random_case(adapter), says_causal(candidate, adapter)
    shares = "groups" if adapter.H != adapter.G else None
    bases = {n: how for n, how in variants.items() if n.partition("_")[0] in ("plain", "rope", shares)}
    senses = (True, False) if wants_causal else (False, True)
    for count, wrap, causal, (name, base) in product((1, 2), adapter.wraps, senses, bases.items()):
        adapter.wrap, adapter.causal = wrap, causal
        for keys, how in steps.mistakes(*banks_for(name, causal), base=base, count=count):
            if {"causal-missing", "mask-ignored"} & set(keys) and not wants_causal:
                continue
            for reading in adapter.readings if count == 1 else adapter.readings[:1]:
                if agrees(adapter, got, case, how, reading, run):
                    adapter.reading, adapter.how = reading, base
                    example = smallest_example(candidate, adapter, recorder)
                    adapter.how = how
                    for key in keys:
                        recorder.add(AS_CAUSAL.get(key, key) if causal else key, example)
                    return True
    return False


def banks_for(variant: str, causal: bool) -> list[Mapping[str, Any]]:
    """Return the mistakes that can happen in this variant of the layer."""
    banks: list[Mapping[str, Any]] = [*([steps.CAUSAL, steps.MASKS] if causal else []), steps.HEADS]
    banks += [steps.SCALES, steps.WEIGHTS, steps.MIXES]
    turned = re.search(r"(halves|interleaved)\.([\d.e+]+)$", variant)
    return [steps.rotary_mistakes(turned.group(1), float(turned.group(2))), *banks] if turned else banks


# names of mask mistakes when the mask is the layer's own causal mask
AS_CAUSAL = {"mask-inverted": "causal-inverted", "mask-ignored": "causal-missing"}


def has_unknown_parts(candidate: Candidate, adapter: MultiHeadAdapter) -> bool:
    """Return True if the layer does more than the definition, so that different numbers are not necessarily wrong."""
    text = candidate.source + " " + " ".join(adapter.extra)
    return bool(re.search(UNKNOWN_PARTS, text, re.IGNORECASE)) or len(adapter.extra) > 0


def says_causal(candidate: Candidate, adapter: MultiHeadAdapter) -> bool:
    """Return True if the name, or a triangle in the source, says that the future is hidden."""
    is_named = bool(re.search(r"causal|masked", candidate.name.lower()))
    builds = bool(re.search(r"tril|triu", candidate.source))
    return (is_named or builds) and not {"mask", "causal"} & adapter.caller.argument_roles


def agrees(
    adapter: MultiHeadAdapter,
    got: np.ndarray | None,
    case: Inputs,
    how: AttentionSteps,
    reading: Projections,
    run: Runner,
) -> bool:
    try:
        want = adapter.expected_output(case, how, reading)
    except ValueError:
        return False
    if got is not None and got.shape == want.shape and np.isnan(got).any():
        got = np.where(adapter.reads_nothing(case, how)[..., None], want, got)  # softmax of a row of -inf is NaN
    return equal(got, want, max(run.engine.tolerance, 1e-6))


def batch_axis_mistake(
    candidate: Candidate, adapter: MultiHeadAdapter, got: np.ndarray | None, case: Inputs, run: Runner
) -> str | None:
    """Recognize attention over the first axis: the layer expects [T, B, D]."""
    flipped = {name: value.swapaxes(0, 1) for name, value in case.items()}
    for reading in adapter.readings:
        for causal in (False, True):
            adapter.causal = causal
            if agrees(adapter, None if got is None else got.swapaxes(0, 1), flipped, steps.RIGHT, reading, run):
                return "attends-over-batch"
    return None


def mixed_rows_mistake(adapter: MultiHeadAdapter, run: Runner) -> str | None:
    """Recognize that one row of the batch changes another."""
    case = random_case(adapter)
    if adapter.unbatched:
        return None
    other = {**case, "x": case["x"].copy()}
    other["x"][1] *= -2
    one, two = run.attempt(case)[0], run.attempt(other)[0]
    return "batch-mixed" if one is not None and two is not None and not equal(one[0], two[0], 1e-5) else None


def check_lengths(adapter: MultiHeadAdapter, recorder: Recorder, run: Runner) -> None:
    """Check keys and values from a sequence of another length."""
    recorder.start("cross-length")
    if adapter.mode == "self" or adapter.causal or recorder.is_wrong:
        return
    case = random_case(adapter, 3, 5)
    got, error = run.attempt(case)
    wants = [adapter.expected_output(case)]
    if adapter.norm is not None:  # the layer may normalize the other sequence too
        wants.append(adapter.expected_output({**case, "source": adapter.norm(case["source"])}))
    if not any(equal(got, want, max(run.engine.tolerance, 1e-6)) for want in wants):
        even = random_case(adapter, 4, 4)
        also, _ = run.attempt(even)
        if got is None and also is None:
            return  # the layer may take no other sequence at all
        key = "cross-length" if equal(also, adapter.expected_output(even), 1e-5) else "cross-value"
        recorder.add(
            key,
            Example(
                {"x": f"[2, 3, {adapter.D}]", "source": f"[2, 5, {adapter.D}]"},
                list(adapter.shape(case)),
                error or (None if got is None else list(got.shape) if got.shape != adapter.shape(case) else got),
            ),
            error=error,
        )


def check_flag(candidate: Candidate, adapter: MultiHeadAdapter, recorder: Recorder, run: Runner) -> None:
    recorder.start("causal")
    case = {**random_case(adapter), "causal": True}
    got, error = run.attempt(case)
    if equal(got, adapter.expected_output(case), max(run.engine.tolerance, 1e-6)):
        return
    if error and "mask" in adapter.caller.argument_roles:
        return  # the flag may need a mask too, as in torch.nn.MultiheadAttention
    for key, change in {**steps.CAUSAL, **steps.MASKS}.items():
        if equal(got, adapter.expected_output(case, replace(adapter.how, **change)), max(run.engine.tolerance, 1e-6)):
            recorder.add(key, smallest_example(candidate, adapter, recorder, causal=True))
            return
    recorder.add(
        "raises" if error else "causal-value", smallest_example(candidate, adapter, recorder, causal=True), error=error
    )


def properties(candidate: Candidate, adapter: MultiHeadAdapter, recorder: Recorder, run: Runner) -> None:
    case = random_case(adapter)
    common.check_inputs_unchanged(recorder, run, [case])
    if any(diagnostic.key == "inputs-changed" for diagnostic in recorder.diagnostics):
        return
    common.check_views(recorder, run, case)
    common.check_dtype(recorder, run, case)
    for flag in (False, True) if "causal" in adapter.caller.argument_roles else (False,):
        common.check_device(recorder, run, {**case, "causal": flag}, adapter.thing)
    common.check_gradient(recorder, run, case)
    if recorder.is_wrong:
        return
    check_stability(adapter, recorder, run)
    check_hidden(adapter, recorder, run)
    fills = adapter.causal and run.engine.name == "numpy"  # in NumPy a fill value of -1e9 is fine
    if recorder.is_clean and adapter.D <= 64 and not fills:
        mild = {"x": common.small_integers(common.rng(1), 1, 3, adapter.D, top=1)}
        common.check_float16(recorder, run, mild, adapter.expected_output(mild), tolerance=5e-2)
    check_cache(adapter, recorder, run)

    def value(module: Any, batch: np.ndarray) -> Any:
        return replace(adapter, thing=module, caller=replace(adapter.caller, function=find_forward(module))).native(
            {"x": batch}, run.engine
        )

    if not adapter.unbatched and adapter.wrap != "residual_post":  # a norm after the sum changes the mean
        common.check_dropout_mean(recorder, adapter.caller.sizes, value, case["x"][:1, :2])


def check_stability(adapter: MultiHeadAdapter, recorder: Recorder, run: Runner) -> None:
    """Check that a large x, and so large scores, gives the right result."""
    recorder.start("stability")
    case = random_case(adapter)
    case["x"] = case["x"] * 300
    got, error = run.attempt(case)
    want = adapter.expected_output(case)
    if not equal(got, want, 1e-3):
        key = "softmax-unstable" if got is not None and np.isnan(got).any() else "value-at-extremes"
        recorder.add(
            key,
            Example({"x": case["x"][0, :2, :4]}, want[0, :2, :4], error or (None if got is None else got[0, :2, :4])),
        )


def check_cache(adapter: MultiHeadAdapter, recorder: Recorder, run: Runner) -> None:
    """Check that one token at a time with the cache gives the same result as one pass."""
    recorder.start("cache")
    if "cache" not in adapter.caller.argument_roles or adapter.mode != "self":
        return
    case = random_case(adapter)
    full = adapter.expected_output({**case, "causal": True})
    steps_taken = {joins: run_steps(adapter, case["x"], run.engine, joins) for joins in (False, True)}
    got = steps_taken[False]
    if got is None:
        recorder.assume("cache_not_tried")
    elif not any(equal(taken, full, 1e-5) for taken in steps_taken.values()):
        t = int(np.abs(got - full).max((0, 2)).argmax())
        recorder.add("cache-differs", Example({"step": t}, full[0, t], got[0, t]), step=t)


def run_steps(adapter: MultiHeadAdapter, x: np.ndarray, engine: NumPy, joins: bool) -> np.ndarray | None:
    """Feed one token at a time; None if that fails. `joins`: the caller appends the keys and values of each step."""
    outs, cache = [], None
    try:
        for t in range(x.shape[1]):
            result = adapter.caller(x=x[:, t : t + 1], cache=cache)
            if not isinstance(result, tuple | list):
                return None
            outs.append(engine.to_numpy(result[0]))
            old, new = engine.to_numpy(cache), engine.to_numpy(result[1])
            cache = result[1]
            if joins and old is not None and new is not None:
                cache = engine.to_native(np.concatenate((old, new), -2))
        return np.concatenate([out for out in outs if out is not None], 1)
    except Exception:
        return None


def check_properties_only(candidate: Candidate, recorder: Recorder) -> None:
    """If the weights are not recognized, check only what holds for every attention."""
    engine, sizes = candidate.engine(), ProbeSizes()
    thing = engine.eval_mode(candidate.instantiate(sizes))
    caller = candidate.caller(thing, ROLES, sizes)
    eye = np.eye(sizes.D)
    adapter = MultiHeadAdapter(thing, caller, sizes.D, sizes.H, sizes.H, [Projections(eye, eye, eye, eye)])
    run = adapter.runner(engine)
    case = random_case(adapter)
    got, error = run.attempt(case)
    if got is None:
        add_first_error(recorder, error, sizes.D)
        return
    common.check_registered(recorder, thing)
    common.check_deterministic(recorder, run, case)
    check_layer_properties(candidate, adapter, recorder, run)
    common.check_inputs_unchanged(recorder, run, [case])
    common.check_gradient(recorder, run, case)


def check_layer_properties(candidate: Candidate, adapter: MultiHeadAdapter, recorder: Recorder, run: Runner) -> None:
    """Check that rows do not mix, that a causal layer hides the future, and that only attention mixes positions."""
    recorder.assume("weights_not_found")
    case = random_case(adapter)
    got, _ = run.attempt(case)
    key = mixed_rows_mistake(adapter, run)
    if key and common.mixes_rows(lambda x: run.attempt({"x": x})[0], case["x"].swapaxes(0, 1), axis=1) is False:
        recorder.assume("positions_first")
        return
    if key:
        recorder.add(key)
    if got is None or got.ndim != 3:
        return
    other, _ = run.attempt({"x": case["x"][:, ::-1].copy()})
    is_equivariant = other is not None and other.shape == got.shape and equal(other[:, ::-1], got, 1e-5)
    later = {"x": case["x"].copy()}
    later["x"][:, -1] *= -2
    changed, _ = run.attempt(later)
    is_causal = changed is not None and equal(changed[:, :-1], got[:, :-1], 1e-6)
    if not is_equivariant and not is_causal and not has_unknown_parts(candidate, adapter):
        recorder.add("positions-mixed", Example({}, got[0, :, :4], None if other is None else other[0, ::-1, :4]))
    if says_causal(candidate, adapter) and not is_causal:
        recorder.add("causal-missing", Example({}, got[0, 0, :4], None if changed is None else changed[0, 0, :4]))
