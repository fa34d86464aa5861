"""Scaled dot-product attention in our convention: how it is called, on what, and what should come out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from clearhead.reference import causal_mask

from ..adapt import MaskForm
from ..engine import NumPy
from ..suspect import Caller, forward_of
from . import common, steps
from .common import Inputs, Runner

ROLES = ("q", "k", "v", "mask", "causal", "weights_too", "dropout", "training")
LEADS = {2: (), 3: (2,), 4: (2, 3)}


@dataclass
class Subject:
    """The learner's function in our convention."""

    caller: Caller
    thing: Any
    rank: int = 4
    layout: str = "heads_first"
    form: MaskForm | None = None
    causal: bool = False
    neutral: float | None = None  # what a mask that must be given is filled with where nothing is to be hidden

    def native(self, inputs: Inputs, engine: NumPy) -> Any:
        given: dict[str, Any] = {}
        if inputs.get("allowed") is not None and self.form is not None:
            given["mask"] = self.form(np.asarray(inputs["allowed"]))
        elif self.neutral is not None:
            given["mask"] = np.full((inputs["q"].shape[-2], inputs["k"].shape[-2]), self.neutral)
        if inputs.get("causal"):
            given["causal"] = True
        thing = common.halved(self.thing, engine)
        caller = replace(self.caller, engine=engine, function=forward_of(thing))
        qkv = [self.laid(inputs[name]) for name in "qkv"]
        if {"q", "k", "v"} <= caller.known:
            return caller(q=qkv[0], k=qkv[1], v=qkv[2], **given)
        return caller(*qkv, **given)

    def laid(self, x: Any) -> Any:
        if self.layout == "heads_first" or x.ndim < 4:
            return x
        return x.transpose(0, 2, 1, 3) if isinstance(x, np.ndarray) else x.permute(0, 2, 1, 3)

    def back(self, x: np.ndarray) -> np.ndarray:
        return x.transpose(0, 2, 1, 3) if self.layout != "heads_first" and x.ndim == 4 else x

    def shape(self, inputs: Inputs) -> tuple[int, ...]:
        shape = (*inputs["q"].shape[:-1], inputs["v"].shape[-1])
        return tuple(np.empty(shape).transpose(0, 2, 1, 3).shape) if self.layout != "heads_first" else shape

    def runner(self, engine: NumPy) -> Runner:
        return Runner(self.native, engine, self.shape, self.back)


def inputs(lead: tuple[int, ...], T: int, S: int, K: int, U: int, seed: int = 0, whole: bool = False) -> dict[str, Any]:
    generator = common.rng(seed)
    draw = common.whole if whole else (lambda g, *shape: g.normal(size=shape))
    return {"q": draw(generator, *lead, T, K), "k": draw(generator, *lead, S, K), "v": draw(generator, *lead, S, U)}


def ladder(lead: tuple[int, ...], same_length: bool = False) -> Iterator[dict[str, Any]]:
    """Inputs from the smallest up."""
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


def expected(case: Inputs, how: steps.Steps = steps.RIGHT, causal: bool = False) -> np.ndarray:
    q, k = case["q"], case["k"]
    allowed = np.ones((q.shape[-2], k.shape[-2]), bool)
    if causal or case.get("causal"):
        allowed = causal_mask(*allowed.shape)
    if case.get("allowed") is not None:
        allowed = allowed & fitted(np.asarray(case["allowed"]), q.ndim)
    heads = q.shape[1] if q.ndim == 4 else 1
    return steps.attend(q, k, case["v"], allowed, how, D=heads * q.shape[-1], H=heads)[0]


def fitted(allowed: np.ndarray, rank: int) -> np.ndarray:
    """[B, 1, T, S] for arrays of this rank."""
    return {2: lambda: allowed[0, 0], 3: lambda: allowed[:, 0], 4: lambda: allowed}[rank]()
