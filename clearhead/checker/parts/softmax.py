"""Softmax: rows of positive numbers that sum to 1, whatever the size of what went in."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.reference import softmax

from ..engine import NumPy, equal
from ..finding import Example
from ..suspect import Caller, Sizes, Suspect, forward_of
from . import common
from .common import Inputs, Runner, Voice


def over(axis: Any) -> Callable[[np.ndarray], np.ndarray]:
    def wrong(x: np.ndarray) -> np.ndarray:
        powers = np.exp(x - x.max())
        return powers / powers.sum(axis, keepdims=True)

    return wrong


MISTAKES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "softmax-axis": over(0),
    "softmax-axis.second": lambda x: over(1)(x) if x.ndim > 2 else over(0)(x),
    "softmax-everything": over(None),
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
            x = common.whole(common.rng(seed), *shape)
            yield {"x": x[0] if rank == 1 else x if rank == 2 else x[None]}
    yield {"x": common.rng(0).normal(size=(2, 3, 5)[-rank:])}


def check(suspect: Suspect, voice: Voice) -> None:
    engine = suspect.engine()
    thing = engine.quiet(suspect.made(Sizes()))
    caller = Caller(forward_of(thing), engine, ("x", "axis"), Sizes())

    def native(inputs: Inputs, engine: NumPy) -> Any:
        here = replace(caller, engine=engine)
        given = {"axis": -1} if "axis" in here.known else {}
        return here(x=inputs["x"], **given) if "x" in here.known else here(inputs["x"], **given)

    run = Runner(native, engine, lambda inputs: inputs["x"].shape)
    voice.at("shapes")
    rank, got = shape_it_takes(run, voice)
    if rank == 0:
        return
    case = {"x": common.rng(0).normal(size=(2, 3, 5)[-rank:])}
    voice.at("value")
    if not equal(got, softmax(case["x"]), engine.tolerance):
        example = common.smallest(ladder(rank), run, lambda c: softmax(c["x"]))
        voice.say(named(case["x"], got, engine), example)
    else:
        stable(voice, run, rank)
        if "axis" in caller.known and rank > 1:
            other_axis(voice, caller)
    common.keeps_inputs(voice, run, [case])
    common.has_gradient(voice, run, case)
    common.keeps_device(voice, run, case)
    if voice.is_clean:
        whole = {"x": np.reshape([1.0, 2.0, 4.0], (1,) * (rank - 1) + (3,))}
        common.works_in_half(voice, run, whole, softmax(whole["x"]))


def shape_it_takes(run: Runner, voice: Voice) -> tuple[int, np.ndarray | None]:
    """The highest rank on which it is right, else the lowest on which it runs."""
    tried, error = {}, ""
    for rank in (3, 2, 1):
        x = common.rng(0).normal(size=(2, 3, 5)[-rank:])
        got, text = run.attempt({"x": x})
        error = error or text
        if got is not None:
            tried[rank] = got
            if equal(got, softmax(x), run.engine.tolerance):
                if rank < 3 and any(r > rank and a.shape == (2, 3, 5)[-r:] for r, a in tried.items()):
                    continue_to = max(tried)
                    return continue_to, tried[continue_to]
                if rank == 1:
                    voice.assume("vectors_only")
                return rank, got
    if not tried:
        voice.say("raises", Example({"x": "[2, 3]"}, None, error), error=error)
        return 0, None
    rank = max(tried)
    return rank, tried[rank]


def named(x: np.ndarray, got: np.ndarray | None, engine: NumPy) -> str:
    if got is not None and got.shape != x.shape:
        return "wrong-shape"
    with np.errstate(all="ignore"):
        for key, mistake in MISTAKES.items():
            if equal(got, mistake(x), engine.tolerance):
                return key.split(".")[0]
    return "value"


def stable(voice: Voice, run: Runner, rank: int) -> None:
    voice.at("stability")
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
            voice.say(key.split(".")[0], Example({"x": x}, softmax(x), error or got))
            return


def other_axis(voice: Voice, caller: Caller) -> None:
    """An axis that is asked for is the axis that is summed."""
    voice.at("axis")
    x = common.rng(1).normal(size=(3, 4))
    got = caller.engine.take(caller(x=x, axis=0) if "x" in caller.known else caller(x, axis=0))
    if not equal(got, softmax(x, 0), caller.engine.tolerance):
        small = np.array([[0.0, 1.0], [2.0, 4.0]])
        voice.say(
            "axis-ignored",
            Example(
                {"x": small, "axis": 0},
                softmax(small, 0),
                caller.engine.take(caller(small, axis=0) if "x" not in caller.known else caller(x=small, axis=0)),
            ),
        )
