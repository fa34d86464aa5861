"""Adapt an attention function to our convention: how to call it, test inputs, and the expected result."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.reference import causal_mask

from ..candidate import Caller, Candidate, ProbeSizes, find_forward
from ..engine import NumPy
from ..mask_forms import MaskForm
from . import attention_steps as steps
from . import common
from .attention_steps import AttentionSteps
from .common import Inputs, Runner

ROLES = ("q", "k", "v", "mask", "causal", "weights_too", "dropout", "training")
PROBE_WIDTH = 4  # of the keys, if a check does not say otherwise
LEADS = {2: (), 3: (2,), 4: (2, 3)}


@dataclass
class AttentionAdapter:
    """The learner's attention function, and how to call it."""

    candidate: Candidate
    caller: Caller
    thing: Any
    rank: int = 4
    layout: str = "heads_first"
    form: MaskForm | None = None
    causal: bool = False
    first: int = 0  # which item of the returned tuple is the output
    neutral: float | None = None  # for a required mask: the value that hides nothing
    scale: tuple[str, float] | None = None  # name of the scale argument, and the power of d_k to pass

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        given: dict[str, Any] = {}
        if inputs.get("mask") is not None:
            given["mask"] = inputs["mask"]
        elif inputs.get("allowed") is not None and self.form is not None:
            given["mask"] = self.form(np.asarray(inputs["allowed"]))
        elif self.neutral is not None:
            given["mask"] = np.full((inputs["q"].shape[-2], inputs["k"].shape[-2]), self.neutral)
        if inputs.get("causal"):
            given["causal"] = True
        thing = common.cast_module(self.thing_for(inputs["q"].shape[-1]), engine)
        caller = replace(self.caller, engine=engine, function=find_forward(thing))
        if self.scale is not None:
            caller = caller.with_fixed(**{self.scale[0]: inputs["q"].shape[-1] ** self.scale[1]})
        qkv = [self.to_layout(inputs[name]) for name in "qkv"]
        named = {"q", "k", "v"} <= caller.argument_roles
        result = caller(q=qkv[0], k=qkv[1], v=qkv[2], **given) if named else caller(*qkv, **given)
        return result[self.first :] + result[: self.first] if self.first else result

    def thing_for(self, width: int) -> Any:
        """Return the object for keys of this width: a class that takes the width is constructed again."""
        if width == PROBE_WIDTH or not self.candidate.is_class:
            return self.thing
        return construct_for(self.candidate, width)

    def find_output(self, engine: NumPy) -> int:
        """Return the index of the output in a returned tuple, on an input whose output and weights differ in shape."""
        case = inputs(LEADS[self.rank], 3, 3, 4, 4)
        result = self.native(case, engine)
        shapes = [getattr(item, "shape", None) for item in result] if isinstance(result, tuple) else []
        return shapes.index(self.shape(case)) if self.shape(case) in shapes else 0

    def to_layout(self, x: Any) -> Any:
        if self.layout == "heads_first" or x.ndim < 4:
            return x
        return x.transpose(0, 2, 1, 3) if isinstance(x, np.ndarray) else x.permute(0, 2, 1, 3)

    def from_layout(self, x: np.ndarray) -> np.ndarray:
        return x.transpose(0, 2, 1, 3) if self.layout != "heads_first" and x.ndim == 4 else x

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        shape = (*inputs["q"].shape[:-1], inputs["v"].shape[-1])
        return tuple(np.empty(shape).transpose(0, 2, 1, 3).shape) if self.layout != "heads_first" else shape

    def runner(self, engine: NumPy) -> Runner:
        return Runner(self.native, engine, self.shape, self.from_layout)


def construct_for(candidate: Candidate, width: int) -> Any:
    """Construct an attention class for keys of this width, which it may call `d_k` or `dim`."""
    takes_both = candidate.constructor_takes("K") or candidate.constructor_takes("H")
    sizes = ProbeSizes(D=3 * width, H=3) if takes_both else ProbeSizes(D=width, H=1)
    return candidate.engine().eval_mode(candidate.instantiate(sizes))


def inputs(lead: tuple[int, ...], T: int, S: int, K: int, U: int, seed: int = 0, whole: bool = False) -> dict[str, Any]:
    generator = common.rng(seed)
    draw = common.small_integers if whole else (lambda g, *shape: g.normal(size=shape))
    return {"q": draw(generator, *lead, T, K), "k": draw(generator, *lead, S, K), "v": draw(generator, *lead, S, U)}


def ladder(lead: tuple[int, ...], same_length: bool = False) -> Iterator[dict[str, Any]]:
    """Yield inputs, the smallest first."""
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


def expected_output(case: Inputs, how: AttentionSteps = steps.RIGHT, causal: bool = False) -> np.ndarray:
    q, k = case["q"], case["k"]
    allowed = np.ones((q.shape[-2], k.shape[-2]), bool)
    if causal or case.get("causal"):
        allowed = causal_mask(*allowed.shape)
    if case.get("allowed") is not None:
        allowed = allowed & fit_rank(np.asarray(case["allowed"]), q.ndim)
    heads = q.shape[1] if q.ndim == 4 else 1
    return steps.attend(q, k, case["v"], allowed, how, D=heads * q.shape[-1], H=heads)[0]


def fit_rank(allowed: np.ndarray, rank: int) -> np.ndarray:
    """Reshape a mask [B, 1, T, S] for arrays of this rank."""
    return {2: lambda: allowed[0, 0], 3: lambda: allowed[:, 0], 4: lambda: allowed}[rank]()
