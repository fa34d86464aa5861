"""Check of rotary positions: pairs of coordinates rotated by position · θ^(−2i/K)."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any

import numpy as np

from clearhead.reference import rotate

from ..candidate import Candidate, CannotCall, NotWritten, ProbeSizes, all_arrays, find_forward, parameters_of
from ..diagnostic import Example
from ..engine import NumPy, equal
from ..names import normalize_name
from ..rotary_tables import STYLES, angles, is_table, make_angles, make_table, takes_angles
from . import common
from .common import Inputs, Recorder, Runner

Array = np.ndarray
LAYOUTS = ("halves", "interleaved")
POSITIONS = ("positions", "pos", "positionids", "tokenpositions", "inputpos")
# `B, H, T, d = x.shape` in the source shows that heads come second
HEADS_SECOND = r"(?i)b\w*,\s*(h|n_?h|num_h|heads)\w*,\s*[tnlsq]\w*,\s*\w+\s*=\s*\w+\.(shape|size)"


def pairs(x: Array, layout: str) -> tuple[Array, Array]:
    K = x.shape[-1]
    return (x[..., : K // 2], x[..., K // 2 :]) if layout == "halves" else (x[..., ::2], x[..., 1::2])


def join_pairs(a: Array, b: Array, layout: str) -> Array:
    if layout == "halves":
        return np.concatenate((a, b), -1)
    return np.stack((a, b), -1).reshape(*a.shape[:-1], -1)


def rotate_pairs(x: Array, phi: Array, layout: str, sign: int = 1) -> Array:
    a, b = pairs(x, layout)
    cos, sin = np.cos(phi), sign * np.sin(phi)
    return join_pairs(a * cos - b * sin, a * sin + b * cos, layout)


def mixed_layout(x: Array, angle_layout: str) -> Array:
    """cos and sin laid out for one layout, pairs for the other: not a rotation."""
    T, K = x.shape[-2:]
    phi = angles(T, K)
    wide = join_pairs(phi, phi, angle_layout)
    a, b = pairs(x, "halves" if angle_layout == "interleaved" else "interleaved")
    swapped = join_pairs(-b, a, "halves" if angle_layout == "interleaved" else "interleaved")
    return x * np.cos(wide) + swapped * np.sin(wide)


def by_layout(make: Callable[[Array, str], Array]) -> dict[str, Callable[[Array], Array]]:
    return {layout: partial(call_with, make, layout) for layout in LAYOUTS}


def call_with(make: Callable[[Array, str], Array], layout: str, x: Array) -> Array:
    return make(x, layout)


def by_angles(layout: str, x: Array, sign: int = 1, **changed: Any) -> Array:
    """Rotate by angles with one parameter changed."""
    return rotate_pairs(x, angles(x.shape[-2], x.shape[-1], **changed), layout, sign)


def wrong_angles(**changed: Any) -> dict[str, Callable[[Array], Array]]:
    return {layout: partial(by_angles, layout, **changed) for layout in LAYOUTS}


BANK: dict[str, dict[str, Callable[[Array], Array]]] = {
    "rope-direction": wrong_angles(sign=-1),
    "rope-off-by-one": wrong_angles(start=1),
    "rope-exponent": wrong_angles(power=1.0),
    "rope-exponent.four": wrong_angles(power=4.0),
    "rope-base": wrong_angles(base=1000.0),
    "rope-mixed-layout": by_layout(lambda x, layout: mixed_layout(x, layout)),
    "rope-no-minus": by_layout(lambda x, layout: no_minus(x, layout)),
    "rope-cat-for-stack": by_layout(lambda x, layout: cat_for_stack(x, layout)),
    "rope-not-turned": {"": lambda x: x * 1.0},
    "rope-only-cosine": by_layout(lambda x, layout: only_cosine(x, layout)),
}


def cat_for_stack(x: Array, layout: str) -> Array:
    """Pairs of one layout rotated, then joined as the other layout."""
    a, b = pairs(x, layout)
    phi = angles(*x.shape[-2:])
    other = "interleaved" if layout == "halves" else "halves"
    return join_pairs(a * np.cos(phi) - b * np.sin(phi), a * np.sin(phi) + b * np.cos(phi), other)


def only_cosine(x: Array, layout: str) -> Array:
    phi = angles(x.shape[-2], x.shape[-1])
    return x * np.cos(join_pairs(phi, phi, layout))


def no_minus(x: Array, layout: str) -> Array:
    """The rotation without its minus sign: a cos + b sin, a sin + b cos."""
    phi = angles(*x.shape[-2:])
    a, b = pairs(x, layout)
    return join_pairs(a * np.cos(phi) + b * np.sin(phi), a * np.sin(phi) + b * np.cos(phi), layout)


class RotaryAdapter:
    """Calls the learner's rotary function on x [B, H, T, K]."""

    def __init__(self, candidate: Candidate, K: int) -> None:
        self.candidate, self.engine, self.K = candidate, candidate.engine(), K
        self.sizes = ProbeSizes(D=K, H=1, L=16)
        self.thing = self.engine.eval_mode(candidate.instantiate(self.sizes))
        self.function = find_forward(self.thing)
        self.heads_third = False

    def __call__(self, x: Array) -> Array:
        found = all_arrays(self.raw(x), self.engine)
        if not found:
            raise CannotCall("x")
        self.all = [a.transpose(0, 2, 1, 3) if self.heads_third and a.ndim == 4 else a for a in found]
        return self.all[0]

    def raw(self, x: Array) -> Any:
        given = x.transpose(0, 2, 1, 3) if self.heads_third else x
        caller = self.candidate.caller(self.function, ("q", "k", "v", "x", "positions"), self.sizes, self.engine)
        fixed: dict[str, Any] = {}
        T = x.shape[-2]
        has_x = bool({"q", "k", "x"} & caller.argument_roles)
        for parameter in caller.parameters:
            name, required = normalize_name(parameter.name), parameter.default is inspect.Parameter.empty
            if takes_angles(self.function, parameter.name):
                fixed[parameter.name] = make_angles(T, self.K, self.candidate.neighbours, self.style)
            elif is_table(parameter.name):
                fixed[parameter.name] = make_table(parameter.name, T, self.K, self.candidate.neighbours, self.style)
            elif name in POSITIONS and (required or self.positions is not None):
                fixed[parameter.name] = np.arange(T) if self.positions is None else self.positions
            elif name in ("seqlen", "length", "t", "n") and required and has_x:
                fixed[parameter.name] = T
        caller = caller.with_fixed(**fixed)
        if {"q", "k"} <= caller.argument_roles:
            values = {"v": given} if "v" in caller.argument_roles else {}
            return caller(q=given, k=given, **values)
        return caller(x=given) if "x" in caller.argument_roles else caller(given)

    def run_on(self, inputs: Inputs, engine: NumPy) -> Any:
        moved = copy(self)
        moved.engine, moved.function = engine, find_forward(common.cast_module(self.thing, engine))
        return moved.raw(inputs["x"])

    style = "wide"
    positions: Array | None = None  # None: 0 … T − 1


def check(candidate: Candidate, recorder: Recorder) -> None:
    recorder.start("value")
    x = common.rng(0).normal(size=(2, 3, 5, 8))
    error, got, adapter = "", None, RotaryAdapter(candidate, 8)
    results: list[tuple[Array, RotaryAdapter]] = []
    for style in STYLES:
        for heads_third in (False, True):
            for rank in (4, 3, 2):
                adapter = RotaryAdapter(candidate, 8)
                adapter.style, adapter.heads_third = style, heads_third
                if heads_third and (rank < 4 or re.search(HEADS_SECOND, candidate.source)):
                    continue
                value = x if rank == 4 else x[0] if rank == 3 else x[0, 0]
                try:
                    got = adapter(value)
                except (NotWritten, NotImplementedError):
                    raise
                except Exception as problem:
                    error = error or common.one_line(problem)
                    continue
                if got.shape == value.shape:
                    results.append((got, adapter))
                    if matches_right(recorder, adapter, value, got):
                        check_keys_and_values(candidate, recorder, adapter, value)
                        check_positions(recorder, adapter, value, recorder.assumed[0].removeprefix("rope_"))
                        run = Runner(adapter.run_on, adapter.engine, lambda inputs: ())
                        common.check_device(recorder, run, {"x": value}, adapter.thing)
                        return
    if not results:
        recorder.cannot_run(error or "the result has another shape", {"x": [2, 3, 5, 8]})
        return
    if all(ignores_values(adapter, x, got) for got, adapter in results):
        recorder.add("beyond-definition", word="cos, sin", name=candidate.name)  # it builds the table
        return
    for got, adapter in results:
        value = x if got.ndim == 4 else x[0] if got.ndim == 3 else x[0, 0]
        for key, forms in BANK.items():
            for wrong in forms.values():
                if equal(got, wrong(value), 1e-5):
                    recorder.add(key.split(".")[0], smallest_example(candidate, adapter))
                    return
        if got.ndim == 4 and any(equal(got, over_axis(value, 0, layout), 1e-5) for layout in LAYOUTS):
            recorder.assume("positions_first")
            return
        axes = (1,) if got.ndim == 4 else (0,) if got.ndim == 3 else ()
        if any(equal(got, over_axis(value, axis, layout), 1e-5) for axis in axes for layout in LAYOUTS):
            recorder.add("rope-wrong-axis", smallest_example(candidate, adapter))
            return
    got, adapter = results[0]
    value = x if got.ndim == 4 else x[0] if got.ndim == 3 else x[0, 0]
    lengths = np.allclose(np.linalg.norm(got, axis=-1), np.linalg.norm(value, axis=-1), atol=1e-5)
    recorder.add("value" if lengths else "rope-changes-length", smallest_example(candidate, adapter))


def ignores_values(adapter: RotaryAdapter, x: Array, got: Array) -> bool:
    """Return True if the result depends on the shape of x only."""
    value = x if got.ndim == 4 else x[0] if got.ndim == 3 else x[0, 0]
    return equal(adapter(2 * value), got, 1e-9)


def over_axis(x: Array, axis: int, layout: str) -> Array:
    """Rotate by the index along another axis in place of the position."""
    return np.swapaxes(rotate(np.swapaxes(x, axis, -2), np.arange(x.shape[axis]), layout=layout), axis, -2)


def matches_right(recorder: Recorder, adapter: RotaryAdapter, x: Array, got: Array) -> bool:
    for layout in LAYOUTS:
        if equal(got, rotate(x, np.arange(x.shape[-2]), layout=layout), 1e-5):
            recorder.assume(f"rope_{layout}")
            if adapter.heads_third:
                recorder.assume("heads_third")
            return True
    return False


def check_keys_and_values(candidate: Candidate, recorder: Recorder, adapter: RotaryAdapter, x: Array) -> None:
    """Check that keys are rotated like queries, and values are not."""
    recorder.start("queries_keys_values")
    same = [equal(a, adapter.all[0], 1e-6) for a in adapter.all if a.shape == adapter.all[0].shape]
    if len(same) >= 2 and not same[1]:
        recorder.add(
            "rope-on-queries-only",
            Example({"x": x[..., :2, :2]}, adapter.all[0][..., :2, :2], adapter.all[1][..., :2, :2]),
        )
    if len(same) >= 3 and same[2]:
        recorder.add("rope-on-values", Example({"v": x[..., :2, :2]}, x[..., :2, :2], adapter.all[2][..., :2, :2]))


def check_positions(recorder: Recorder, adapter: RotaryAdapter, x: Array, layout: str) -> None:
    """Check that positions that are passed in are used."""
    recorder.start("positions")
    given = [p.name for p in parameters_of(adapter.function) if not takes_angles(adapter.function, p.name)]
    names = [normalize_name(name) for name in given]
    if not any(name in POSITIONS for name in names):
        return
    moved = copy(adapter)
    moved.positions = np.array([2, 0, 3, 1, 4])
    try:
        got = moved(x)
    except Exception:
        return
    if equal(got, adapter(x), 1e-9):
        want = rotate(x, moved.positions, layout=layout)
        shown = {"positions": moved.positions, "x": x[..., :2, :2]}
        recorder.add("rope-positions-ignored", Example(shown, want[..., :2, :2], got[..., :2, :2]))


def smallest_example(candidate: Candidate, like: RotaryAdapter) -> Example | None:
    """Return the smallest failing example, starting from one pair of coordinates."""
    for K in (2, 4, 8):
        for T in (1, 2, 3):
            try:
                adapter = RotaryAdapter(candidate, K)
                adapter.style, adapter.heads_third = like.style, like.heads_third
                x = np.zeros((1, 1, T, K))
                x[..., 0], x[..., -1] = 1.0, 2.0
                value = x if like.all[0].ndim == 4 else x[0] if like.all[0].ndim == 3 else x[0, 0]
                got = adapter(value)
            except Exception:
                continue
            wants = [rotate(value, np.arange(T), layout=layout) for layout in LAYOUTS]
            if not any(equal(got, want, 1e-5) for want in wants):
                return Example({"x": value}, wants[0], got)
    return None
