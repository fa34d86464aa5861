"""Check of softmax: rows of positive numbers that sum to 1, for inputs of any magnitude."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.reference import softmax

from ..candidate import Caller, Candidate, ProbeSizes
from ..diagnostic import Example
from ..engine import NumPy, equal
from . import common
from .common import Inputs, Recorder, Runner


def softmax_over(axis: Any) -> Callable[[np.ndarray], np.ndarray]:
    def wrong(x: np.ndarray) -> np.ndarray:
        powers = np.exp(x - x.max())
        return powers / powers.sum(axis, keepdims=True)

    return wrong


def row_max(x: np.ndarray) -> np.ndarray:
    return x.max(-1, keepdims=True)


MISTAKES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax-axis": softmax_over(0),
    "softmax-axis.second": lambda x: softmax_over(1)(x) if x.ndim > 2 else softmax_over(0)(x),
    "softmax-axis.shifted": lambda x: np.exp(x - row_max(x)) / np.exp(x - row_max(x)).sum(0, keepdims=True),
    "softmax-everything": softmax_over(None),
    "not-normalised": np.exp,
    "not-normalised.shifted": lambda x: np.exp(x - x.max(-1, keepdims=True)),
    "log-softmax": lambda x: np.log(softmax(x)),
    "sigmoid": lambda x: 1 / (1 + np.exp(-x)),
    "normalised-by-sum": lambda x: x / x.sum(-1, keepdims=True),
    "normalised-by-sum.shifted": lambda x: (
        (x - x.max(-1, keepdims=True)) / (x - x.max(-1, keepdims=True)).sum(-1, keepdims=True)
    ),
    "softmax-negative": lambda x: softmax(-x),
    "divided-by-max": lambda x: softmax(x / x.max(-1, keepdims=True)),
    "divided-by-exp-max": lambda x: np.exp(x) / np.exp(x).max(-1, keepdims=True),
}


def ladder(rank: int) -> Iterator[dict[str, Any]]:
    for shape in ((1, 2), (2, 2), (2, 3)):
        for seed in range(4):
            x = common.small_integers(common.rng(seed), *shape)
            yield {"x": x[0] if rank == 1 else x if rank == 2 else x[None]}
    yield {"x": common.rng(0).normal(size=(2, 3, 5)[-rank:])}


def check(candidate: Candidate, recorder: Recorder) -> None:
    engine = candidate.engine()
    thing = engine.eval_mode(candidate.instantiate(ProbeSizes()))
    caller = candidate.caller(thing, ("x", "axis"), ProbeSizes())

    def native(inputs: Inputs, engine: NumPy) -> Any:
        here = replace(caller, engine=engine)
        given = {"axis": -1} if "axis" in here.argument_roles else {}
        return here(x=inputs["x"], **given) if "x" in here.argument_roles else here(inputs["x"], **given)

    run = Runner(native, engine, lambda inputs: inputs["x"].shape)
    recorder.start("shapes")
    rank, got = find_rank(run, recorder)
    if rank == 0:
        return
    case = {"x": common.rng(0).normal(size=(2, 3, 5)[-rank:])}
    recorder.start("value")
    if not equal(got, softmax(case["x"]), engine.tolerance):
        key = name_mistake(case["x"], got, engine)
        if (key == "value" and is_variant(candidate)) or (key == "softmax-axis" and is_of_columns(candidate)):
            recorder.add("beyond-definition", word=candidate.name, name=candidate.name)
            return
        recorder.add(key, common.smallest_failure(ladder(rank), run, lambda c: softmax(c["x"])))
    else:
        check_stability(recorder, run, rank)
        if "axis" in caller.argument_roles and rank > 1:
            check_other_axis(recorder, caller)
    common.check_inputs_unchanged(recorder, run, [case])
    common.check_gradient(recorder, run, case)
    common.check_device(recorder, run, case)
    if recorder.is_clean:
        whole = {"x": np.reshape([1.0, 2.0, 4.0], (1,) * (rank - 1) + (3,))}
        common.check_float16(recorder, run, whole, softmax(whole["x"]))


def is_variant(candidate: Candidate) -> bool:
    """Return True for another function with softmax in its name, such as `sparse_softmax`."""
    words = set(re.split(r"_+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", candidate.name).lower()))
    return bool(words & {"sparse", "local", "selu", "gumbel", "hierarchical", "adaptive", "log", "taylor", "mixture"})


def is_of_columns(candidate: Candidate) -> bool:
    """Return True in a library of dense networks, whose arrays may be [features, examples]."""
    names = " ".join([*map(str, candidate.neighbours), candidate.file_source])
    is_dense = re.search(r"(?i)derivative|backward|backprop|_prime", names)
    return bool(is_dense) and not re.search(r"(?i)attention|transformer|scores|heads", names)


def find_rank(run: Runner, recorder: Recorder) -> tuple[int, np.ndarray | None]:
    """Return the highest rank on which it runs, and its result there."""
    tried, error = {}, ""
    for rank in (3, 2, 1):
        x = common.rng(0).normal(size=(2, 3, 5)[-rank:])
        got, text = run.attempt({"x": x})
        error = error or text
        if got is not None:
            tried[rank] = got
    if not tried:
        recorder.cannot_run(error, {"x": [2, 3]})
        return 0, None
    rank = max(tried)
    if rank == 1:
        check_vectors_only(run, recorder, error)
    return rank, tried[rank]


def check_vectors_only(run: Runner, recorder: Recorder, error: str) -> None:
    """It fails on [3, 5]: is it for vectors only, or does it lack keepdims, which a square array hides?"""
    x = common.rng(0).normal(size=(3, 3))
    got, _ = run.attempt({"x": x})
    if got is not None and not equal(got, softmax(x), run.engine.tolerance):
        square = np.array([[0.0, 1.0], [2.0, 0.0]])
        recorder.add("keepdims-missing", Example({"x": square}, softmax(square), run.attempt({"x": square})[0]))
    elif recorder.candidate.documented:
        recorder.add("shape-limited", Example({"x": [2, 3]}, [2, 3], error), error=error)
    else:
        recorder.assume("vectors_only")


def name_mistake(x: np.ndarray, got: np.ndarray | None, engine: NumPy) -> str:
    if got is not None and got.shape != x.shape:
        return "wrong-shape"
    with np.errstate(all="ignore"):
        for key, mistake in MISTAKES.items():
            if equal(got, mistake(x), engine.tolerance):
                return key.split(".")[0]
    return "value"


def check_stability(recorder: Recorder, run: Runner, rank: int) -> None:
    recorder.start("stability")
    lead = (1,) * (rank - 1)
    for key, rows in {
        "softmax-unstable": [[1e4, 1e4 - 1]],
        "softmax-unstable.low": [[-1e4, -1e4 - 1]],
        "softmax-global-max": [[0.0, 1.0], [1e4, 1e4 + 1]],
    }.items():
        if rank == 1 and len(rows) > 1:
            continue
        x = np.array(rows[0] if rank == 1 else rows).reshape(*lead[1:], *np.shape(rows)[-min(rank, 2) :])
        got, error = run.attempt({"x": x})
        if not equal(got, softmax(x), 1e-5):
            recorder.add(key.split(".")[0], Example({"x": x}, softmax(x), error or got))
            return


def check_other_axis(recorder: Recorder, caller: Caller) -> None:
    """Check that the axis argument is used."""
    recorder.start("axis")
    x = common.rng(1).normal(size=(3, 4))
    got = caller.engine.to_numpy(caller(x=x, axis=0) if "x" in caller.argument_roles else caller(x, axis=0))
    if not equal(got, softmax(x, 0), caller.engine.tolerance):
        small = np.array([[0.0, 1.0], [2.0, 4.0]])
        recorder.add(
            "axis-ignored",
            Example(
                {"x": small, "axis": 0},
                softmax(small, 0),
                caller.engine.to_numpy(
                    caller(small, axis=0) if "x" not in caller.argument_roles else caller(x=small, axis=0)
                ),
            ),
        )
