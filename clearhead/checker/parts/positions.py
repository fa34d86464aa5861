"""Checks of position embeddings: sinusoidal and learned."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from clearhead.reference import sinusoidal_positions

from ..candidate import Caller, Candidate, CannotCall, NotWritten, ProbeSizes, all_arrays, find_forward
from ..diagnostic import Example
from ..engine import NumPy, equal
from ..names import size_of
from ..weights import iter_weights
from . import common
from .common import Inputs, Recorder, Runner

Array = np.ndarray


def table(
    T: int,
    D: int,
    *,
    start: int = 0,
    base: float = 10000.0,
    power: Callable[[Array, int], Array] | None = None,
    even: Callable[[Array], Array] = np.sin,
    odd: Callable[[Array], Array] = np.cos,
    layout: str = "interleaved",
) -> Array:
    """The sinusoidal table with one thing changed; `power` is the exponent of pair i."""
    pairs = np.arange((D + 1) // 2)
    exponent = 2 * pairs / D if power is None else power(pairs, D)
    angles = (np.arange(T) + start)[:, None] * base**-exponent
    out = np.empty((T, D))
    first, second = (
        (slice(0, None, 2), slice(1, None, 2))
        if layout == "interleaved"
        else (slice(0, (D + 1) // 2), slice((D + 1) // 2, None))
    )
    out[:, first], out[:, second] = even(angles), odd(angles[:, : D // 2])
    return out


RIGHT = {
    "pe_interleaved": sinusoidal_positions,
    "pe_halves": lambda T, D: sinusoidal_positions(T, D, layout="halves"),
    "pe_tensor2tensor": lambda T, D: table(T, D, layout="halves", power=lambda i, d: i / max(d // 2 - 1, 1)),
}
MISTAKES: dict[str, Callable[[int, int], Array]] = {
    "pe-off-by-one": lambda T, D: table(T, D, start=1),
    "pe-exponent": lambda T, D: table(T, D, power=lambda i, d: i / d),
    "pe-exponent.four": lambda T, D: table(T, D, power=lambda i, d: 4 * i / d),
    "pe-exponent.no_d": lambda T, D: table(T, D, power=lambda i, d: 2.0 * i),
    "pe-exponent.columns": lambda T, D: column_exponents(T, D),
    "pe-exponent.double_columns": lambda T, D: column_exponents(T, D, 2),
    "pe-exponent.sign": lambda T, D: table(T, D, power=lambda i, d: -2 * i / d),
    "pe-swapped": lambda T, D: table(T, D, even=np.cos, odd=np.sin),
    "pe-only-sine": lambda T, D: table(T, D, odd=np.sin),
    "pe-only-cosine": lambda T, D: table(T, D, even=np.cos),
    "pe-base": lambda T, D: table(T, D, base=1000.0),
    "pe-base.100": lambda T, D: table(T, D, base=100.0),
    "pe-base.100000": lambda T, D: table(T, D, base=100000.0),
    "pe-degrees": lambda T, D: table(T, D, even=lambda a: np.sin(np.deg2rad(a)), odd=lambda a: np.cos(np.deg2rad(a))),
}


def column_exponents(T: int, D: int, times: float = 1.0) -> Array:
    """The mistake pos / 10000^(column/d): sine and cosine of a pair get different angles."""
    columns = np.arange(D)
    angles = np.arange(T)[:, None] * 10000.0 ** (-times * columns / D)
    return np.where(columns % 2, np.cos(angles), np.sin(angles))


class PositionsAdapter:
    """Extracts the position table, whether the code returns it or adds it to its input."""

    def __init__(self, candidate: Candidate, D: int, L: int = 16) -> None:
        self.candidate, self.engine = candidate, candidate.engine()
        self.sizes = ProbeSizes(D=D, H=1, L=L)
        self.thing = self.engine.eval_mode(candidate.instantiate(self.sizes))
        self.D, self.added, self.first_axis = D, False, False
        self.covers = False  # the result has the shape of the input

    def __call__(self, T: int) -> Array | None:
        caller = self.candidate.caller(self.thing, ("positions", "x", "length"), self.sizes)
        parameters = [p for p in caller.parameters if p.default is p.empty]
        if parameters and {size_of(p.name) for p in parameters} - {"L", None, "N"} and len(parameters) >= 2:
            return self.as_table(self.by_numbers(caller, T), T)
        x = np.zeros((2, T, self.D))
        for arguments in ((x,), (T,), (np.arange(T),), (np.tile(np.arange(T), (2, 1)),)):
            try:
                found = all_arrays(self.call_with(caller, arguments[0]), self.engine)
            except (NotWritten, NotImplementedError):
                raise
            except Exception:
                continue
            if found and found[0].dtype.kind == "f" and found[0].size % (T * self.D) == 0:
                self.added = isinstance(arguments[0], np.ndarray) and arguments[0].ndim == 3 and self.adds(caller, x)
                self.covers = isinstance(arguments[0], np.ndarray) and found[0].shape == x.shape == arguments[0].shape
                result = self.as_table(found[0], T)
                if result is None and found[0].shape == x.shape:
                    return self.over_rows(caller, T)
                return result
        raise CannotCall("x")

    def call_with(self, caller: Caller, argument: Any) -> Any:
        first = caller.parameters[0].name if caller.parameters else ""
        return caller.with_fixed(**{first: argument})()

    def adds(self, caller: Caller, x: Array) -> bool:
        found = all_arrays(self.call_with(caller, x + 1), self.engine)
        return bool(found) and not equal(found[0], all_arrays(self.call_with(caller, x), self.engine)[0])

    def by_numbers(self, caller: Caller, T: int) -> Array | None:
        given = {}
        for index, parameter in enumerate(p for p in caller.parameters if p.default is p.empty):
            size = size_of(parameter.name)
            given[parameter.name] = self.D if size == "D" or (index == 1 and size is None) else T
        found = all_arrays(caller.with_fixed(**given)(), self.engine)
        return found[0] if found else None

    def as_table(self, result: Array | None, T: int) -> Array | None:
        """Reduce a result to [T, D] if all rows of the batch agree."""
        if result is None or result.shape[-1] != self.D:
            return result
        if result.ndim == 3 and result.shape[1] == 1 and result.shape[0] >= T:
            return result[:T, 0]
        while result.ndim > 2 and (result == result[:1]).all():
            result = result[0]
        return result if result.ndim == 2 else None

    def over_rows(self, caller: Caller, T: int) -> Array | None:
        """Call a module whose first axis is the position: [T, B, D]."""
        found = all_arrays(self.call_with(caller, np.zeros((T, 2, self.D))), self.engine)[0]
        self.first_axis = True
        return found[:, 0] if (found == found[:, :1]).all() else None


def check_sinusoidal(candidate: Candidate, recorder: Recorder) -> None:
    recorder.start("value")
    adapter = PositionsAdapter(candidate, 8)
    got = adapter(5)
    tolerance = max(adapter.engine.tolerance, 1e-5)
    if got is None or got.shape != (5, 8):
        recorder.cannot_run(f"the result has the shape {None if got is None else list(got.shape)}", {"T": 5, "D": 8})
        return
    layout = next((name for name, right in RIGHT.items() if equal(got, right(5, 8), tolerance)), None)
    if layout is None:
        key = next((k for k, wrong in MISTAKES.items() if equal(got, wrong(5, 8), tolerance)), "value").split(".")[0]
        beyond = re.search(r"normali[sz]e|alpha|learn|relative|height|2d|time_step|freq_scale", candidate.source, re.I)
        has_waves = re.search(r"sin|cos|exp|polar", candidate.source)
        if key == "value" and candidate.source and (beyond or not has_waves):
            recorder.add("beyond-definition", word=beyond.group(0) if beyond else candidate.name, name=candidate.name)
            return
        scaled = [f for f in (8**0.5, 8**-0.5) if equal(got, sinusoidal_positions(5, 8) * f, tolerance)]
        recorder.add("pe-scaled" if scaled else key, smallest_table(candidate))
        return
    recorder.assume(layout)
    if adapter.first_axis:
        recorder.assume("positions_first")
    check_addition(candidate, recorder, adapter, tolerance, layout)
    recorder.start("odd-sizes")
    try:
        odd = PositionsAdapter(candidate, 5)(4)
    except (CannotCall, NotWritten):
        raise
    except Exception as error:
        recorder.add(
            "odd-sizes", Example({"T": 4, "D": 5}, [4, 5], common.one_line(error)), error=common.one_line(error)
        )
        return
    wants = [right(4, 5) for right in RIGHT.values()] + [table(4, 6)[:, :5], table(4, 5, power=lambda i, d: 2 * i / 6)]
    if odd is None or odd.shape != (4, 5):
        recorder.add("odd-sizes", Example({"T": 4, "D": 5}, [4, 5], None if odd is None else list(odd.shape)), error="")
    elif not any(equal(odd, want, tolerance) for want in wants) and layout == "pe_interleaved":
        recorder.add("odd-sizes", Example({"T": 4, "D": 5}, wants[0][1], odd[1]), error="")


def smallest_table(candidate: Candidate) -> Example | None:
    for T, D in ((1, 2), (2, 2), (2, 4), (3, 4), (5, 8)):
        try:
            got = PositionsAdapter(candidate, D)(T)
        except Exception:
            continue
        want = sinusoidal_positions(T, D)
        if not equal(got, want, 1e-5):
            return Example({"T": T, "D": D}, want, got)
    return None


def check_addition(
    candidate: Candidate, recorder: Recorder, adapter: PositionsAdapter, tolerance: float, layout: str
) -> None:
    """Check that a module returns x + PE, with or without the factor √D on x, and does not train its table."""
    recorder.start("adds")
    if not adapter.added:
        if adapter.covers:
            pe = RIGHT[layout](2, 4)
            recorder.add("pe-replaces", Example({"x": np.ones((2, 4))}, 1 + pe, pe))
        return
    run_on = candidate.caller(adapter.thing, ("positions", "x"), adapter.sizes)
    x = common.rng(0).normal(size=(5, 2, 8) if adapter.first_axis else (2, 5, 8))
    got = all_arrays(adapter.call_with(run_on, x), adapter.engine)[0]
    pe = RIGHT[layout](5, 8)
    pe = pe[:, None] if adapter.first_axis else pe
    if equal(got, x + pe, tolerance):
        pass
    elif equal(got, x * 8**0.5 + pe, tolerance):
        recorder.assume("scaled_embedding")
    elif equal(got, np.broadcast_to(pe, x.shape), tolerance):
        recorder.add("pe-replaces", Example({"x": x[:1, :1]}, (x + pe)[:1, :1], got[:1, :1]))
    else:
        recorder.add("pe-not-added", Example({"x": x[:1, :1]}, (x + pe)[:1, :1], got[:1, :1]))
    loose = [w for w in iter_weights(adapter.thing) if w.value is not None and getattr(w.value, "requires_grad", False)]
    if loose:
        recorder.add("pe-trained", weights=loose[0].path)
    check_device(recorder, run_on, adapter.thing, x)


def check_device(recorder: Recorder, caller: Caller, thing: Any, argument: Any) -> None:
    """Check that the table moves with the module to another device."""

    def native(inputs: Inputs, engine: NumPy) -> Any:
        function = find_forward(common.cast_module(thing, engine))
        first = caller.parameters[0].name if caller.parameters else ""
        return replace(caller, engine=engine, function=function).with_fixed(**{first: inputs["x"]})()

    common.check_device(recorder, Runner(native, caller.engine, lambda inputs: ()), {"x": argument}, thing)


def check_learned(candidate: Candidate, recorder: Recorder) -> None:
    """Check x + E[0 … T−1], with the learner's own table E."""
    recorder.start("value")
    engine, sizes = candidate.engine(), ProbeSizes(D=4, H=1, L=7)
    thing = engine.eval_mode(candidate.instantiate(sizes))
    tables = [w for w in iter_weights(thing) if w.array.ndim >= 2 and w.array.shape[-1] == 4]
    if not tables:
        recorder.add("unregistered", weights="position table")
        return
    if not all(w.registered for w in tables):
        recorder.add("unregistered", weights=tables[0].path)
    E = common.rng(1).normal(size=(tables[0].array.size // 4, 4))
    tables[0].set(E.reshape(tables[0].array.shape))
    caller = candidate.caller(thing, ("positions", "x", "tokens", "length"), sizes)
    x = common.rng(0).normal(size=(2, 5, 4))
    first = caller.parameters[0].name if caller.parameters else ""
    ids = np.tile(np.arange(5), (2, 1))
    whole = common.rng(0).normal(size=(2, sizes.L, 4))  # for code that adds the whole table
    results: list[tuple[Any, Array]] = []
    error = ""
    for argument in (x, ids, np.arange(5), whole, 5):
        try:
            found = all_arrays(caller.with_fixed(**{first: argument})(), engine)
        except Exception as problem:
            error = error or common.one_line(problem)
            continue
        if found and found[0].shape[-1] == 4:
            results.append((argument, found[0]))
            if is_lookup(argument, found[0], E):
                if argument is whole:
                    recorder.assume("fixed_length")
                check_longest(candidate, recorder, thing, engine, sizes, first)
                check_device(recorder, caller, thing, argument)
                return
    if not results:
        recorder.cannot_run(error, {"x": [2, 5, 4]})
        return
    argument, got = results[0]
    base, T = input_vectors(argument), length_given(argument)
    key = "value"
    if len(E) > T and equal(got, base + E[1 : T + 1], 1e-5):
        key = "pe-off-by-one"
    elif equal(got, base + E[:1], 1e-5):
        key = "pe-same-everywhere"
    elif equal(got, base + E[: got.shape[0], None], 1e-5):
        key = "pe-over-batch"
    if key == "value" and len(tables) > 1:
        recorder.add("beyond-definition", word=tables[1].path, name=candidate.name)  # token embeddings beside positions
        return
    recorder.add(key, Example({"x": base[:1, :2], "E": E[:3]}, (base + E[:T])[:1, :2], got[:1, :2]))


def input_vectors(argument: Any) -> Array:
    """Return the vectors to which positions are added: zeros if the argument holds token ids or a length."""
    return argument if isinstance(argument, np.ndarray) and argument.ndim == 3 else np.zeros((1, 1, 4))


def length_given(argument: Any) -> int:
    if isinstance(argument, int):
        return argument
    return int(argument.shape[-2] if argument.ndim == 3 else argument.shape[-1])


def is_lookup(argument: Any, got: Array, E: Array) -> bool:
    """Return True if the result is x + E[0 … T−1], or the rows of the table alone."""
    base, rows = input_vectors(argument), E[: length_given(argument)]
    wants = [(base + rows).reshape(-1, 4), (rows + 0 * base).reshape(-1, 4)]
    return any(equal(got.reshape(-1, 4)[: len(want)], want, 1e-5) for want in wants)


def check_longest(
    candidate: Candidate, recorder: Recorder, thing: Any, engine: NumPy, sizes: ProbeSizes, first: str
) -> None:
    """Check that a sequence as long as the table works."""
    recorder.start("longest")
    caller = candidate.caller(thing, ("positions", "x", "tokens", "length"), sizes)
    try:
        caller.with_fixed(**{first: np.zeros((1, sizes.L, 4))})()
    except Exception as error:
        if "index" in str(error).lower() or "size" in str(error).lower():
            recorder.add("pe-too-short", error=common.one_line(error))
