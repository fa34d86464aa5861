"""Check of other layers that mix positions, such as linear attention, Mamba or an LSTM, by properties only."""

from __future__ import annotations

import numpy as np

from ..candidate import Candidate, ProbeSizes
from ..diagnostic import Example
from ..engine import equal
from . import common
from .blocks import BlockAdapter
from .common import Recorder


def check(candidate: Candidate, recorder: Recorder) -> None:
    """Check that rows of the batch do not mix, and that a layer named causal hides the future."""
    recorder.start("shapes")
    engine = candidate.engine()
    thing = engine.eval_mode(candidate.instantiate(ProbeSizes()))
    shown = {} if candidate.example is None else candidate.example.call
    adapter = BlockAdapter(thing, engine, ProbeSizes().D, example=shown, neighbours=candidate.neighbours)
    run, x = adapter.runner(), common.rng(0).normal(size=(2, 4, adapter.D))
    got, error = run.attempt({"x": x})
    if got is None or got.shape != x.shape:
        shape = None if got is None else list(got.shape)
        recorder.cannot_run(error or f"the result has the shape {shape}", {"x": list(x.shape)})
        return
    recorder.assume("by_properties")
    common.check_registered(recorder, thing)
    if not common.check_deterministic(recorder, run, {"x": x}):
        return
    if common.mixes_rows(lambda value: run.attempt({"x": value})[0], x, axis=0):
        recorder.add("batch-mixed", Example({"x": list(x.shape)}))
    later = x.copy()
    later[:, -1] *= -2
    changed, _ = run.attempt({"x": later})
    if "causal" in candidate.name.lower() and changed is not None and not equal(changed[:, :-1], got[:, :-1], 1e-5):
        recorder.add("causal-missing", Example({"x": list(x.shape)}, got[0, 0, :4], changed[0, 0, :4]))
    if np.isfinite(got).all():
        common.check_inputs_unchanged(recorder, run, [{"x": x}])
        common.check_gradient(recorder, run, {"x": x})
