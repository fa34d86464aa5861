"""Checks of functions that build causal and padding masks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from clearhead.reference import causal_mask

from ..candidate import Caller, Candidate, CannotCall, ProbeSizes, all_arrays, find_forward
from ..diagnostic import Example
from ..engine import NumPy, equal
from .common import Recorder

ROLES = ("length", "keys_length", "tokens", "x")


def make_mask(thing: Any, engine: NumPy, n: int, example: Mapping[str, Any] | None = None) -> np.ndarray:
    """Call the mask function for n positions."""
    caller = Caller(find_forward(thing), engine, ROLES, ProbeSizes(L=n), example=example or {})
    rows = np.ones((1, n), np.int64)
    for arguments in ({"length": n}, {"length": n, "keys_length": n}, {"x": rows}, {"tokens": rows}):
        if set(arguments) <= caller.argument_roles:
            try:
                found = all_arrays(caller(**arguments), engine)
            except (TypeError, IndexError, AttributeError):
                continue
            if found:
                return found[0]
    found = all_arrays(caller(n), engine)
    if not found:
        raise CannotCall("n")
    return found[0]


def example_of(candidate: Candidate) -> Mapping[str, Any] | None:
    return None if candidate.example is None else candidate.example.call


def sense_of(thing: Any, engine: NumPy) -> str | None:
    """Return whether 1 means "allows" or "blocks" in a correct causal mask."""
    mask = np.squeeze(make_mask(thing, engine, 4))
    if not is_binary(mask):
        return None
    if np.array_equal(mask.astype(bool), causal_mask(4)):
        return "allows"
    return "blocks" if np.array_equal(mask.astype(bool), ~causal_mask(4)) else None


def is_binary(mask: np.ndarray) -> bool:
    return mask.dtype == bool or bool(np.isin(mask, (0, 1)).all())


def triangle(by: int, flipped: bool = False) -> Callable[[int], np.ndarray]:
    def allowed(n: int) -> np.ndarray:
        i, j = np.arange(n)[:, None], np.arange(n)
        return i <= j + by if flipped else j <= i + by

    return allowed


WRONG = {
    "causal-strict": triangle(-1),
    "causal-one-ahead": triangle(1),
    "causal-transposed": triangle(0, flipped=True),
    "causal-transposed.strict": triangle(-1, flipped=True),
    "causal-allows-all": lambda n: np.ones((n, n), bool),
    "causal-hides-all": lambda n: np.zeros((n, n), bool),
}


def check_causal(candidate: Candidate, recorder: Recorder) -> None:
    engine = candidate.engine()
    recorder.start("value")
    try:
        mask = make_mask(candidate.thing, engine, 4, example_of(candidate))
    except CannotCall:
        raise
    except NotImplementedError:
        raise
    except Exception as error:
        recorder.cannot_run(error, {"n": 4})
        return
    square = mask.reshape(mask.shape[-2:]) if mask.ndim >= 2 and mask.size == 16 else mask
    if square.shape != (4, 4):
        recorder.add("wrong-shape", Example({"n": 4}, [4, 4], list(mask.shape)))
        return
    for sense, read in allowed_by_sense(square).items():
        if read is not None and np.array_equal(read, causal_mask(4)):
            recorder.assume(sense)
            one = make_mask(candidate.thing, engine, 1, example_of(candidate))
            alone = one.reshape(1, 1) == (1 if sense == "true_allows" else 0)
            if not alone.all():
                recorder.add("causal-value", Example({"n": 1}, causal_mask(1), one))
            if sense == "additive" and not np.isinf(square).any() and np.abs(square[~causal_mask(4)]).min() < 1e8:
                recorder.add("fill-too-small", Example({"n": 2}, "-inf", float(square.min())))
            check_documented_sense(candidate, recorder, sense, square)
            return
    key, sense = name_mistake(square, candidate)
    recorder.assume(sense)
    small = make_mask(candidate.thing, engine, 2, example_of(candidate))
    recorder.add(key, Example({"n": 2}, causal_as(sense, 2, small.dtype), small.reshape(2, 2)))


def allowed_by_sense(mask: np.ndarray) -> dict[str, np.ndarray | None]:
    """Return which keys may be read, under each convention that fits the values."""
    if is_binary(mask):
        allowed = mask.astype(bool)
        return {"true_allows": allowed, "true_blocks": ~allowed}
    is_additive = (mask <= 0).all() and (np.isin(mask, 0) | (mask < -100)).all()
    return {"additive": mask == 0 if is_additive else None}


def causal_as(sense: str, n: int, dtype: Any) -> np.ndarray:
    allowed = causal_mask(n)
    if sense == "additive":
        return np.where(allowed, 0.0, -np.inf)
    return (allowed if sense == "true_allows" else ~allowed).astype(dtype)


def check_documented_sense(candidate: Candidate, recorder: Recorder, sense: str, square: np.ndarray) -> None:
    """Check that the mask means what the function's docstring and comments say."""
    from ..mask_forms import documented_sense

    documented = documented_sense(candidate.source)
    if documented is not None and sense in ("true_allows", "true_blocks") and not sense.endswith(documented):
        recorder.add(
            "mask-inverted",
            Example({"n": 2}, causal_as(f"true_{documented}", 2, square.dtype), causal_as(sense, 2, square.dtype)),
        )


def name_mistake(mask: np.ndarray, candidate: Candidate) -> tuple[str, str]:
    """Return the mistake's key and the mask convention it was found under; the documented convention comes first."""
    from ..mask_forms import documented_sense

    documented = documented_sense(candidate.source)
    found = {}
    for sense, read in allowed_by_sense(mask).items():
        for key, wrong in WRONG.items():
            if read is not None and np.array_equal(read, wrong(len(mask))):
                found[sense] = key.split(".")[0]
    if not found:
        finite = mask[np.isfinite(mask)]
        sign = mask.dtype.kind == "f" and bool((finite >= 0).all() and (np.isposinf(mask).any() or finite.max() > 100))
        return ("mask-additive-sign" if sign else "causal-value"), "additive" if "additive" in allowed_by_sense(
            mask
        ) else "true_allows"
    order = ["true_allows", "true_blocks", "additive"]
    if documented == "blocks" or (documented is None and mask.dtype == bool and "triu" in candidate.source):
        order = ["true_blocks", "true_allows", "additive"]
    sense = next(s for s in order if s in found)
    return found[sense], sense


def check_padding(candidate: Candidate, recorder: Recorder) -> None:
    """Check a mask built from padded tokens or from lengths."""
    engine = candidate.engine()
    caller = candidate.caller(candidate.thing, ("lengths", "tokens", "x", "pad", "length"), ProbeSizes(L=4))
    tokens, lengths = np.array([[5, 6, 7, 8], [5, 6, 0, 0]]), np.array([4, 2])
    if caller.argument_roles & {"pad"}:
        tokens = np.array([[5, 6, 7, 8], [5, 6, 9, 9]])
    real = np.array([[True, True, True, True], [True, True, False, False]])
    recorder.start("value")
    attempts: list[dict[str, Any]] = [{"lengths": lengths, "length": 4}, {"lengths": lengths}]
    by_tokens = {"pad": 9} if "pad" in caller.argument_roles else {}
    attempts += [{"tokens": tokens, **by_tokens}, {"x": tokens, **by_tokens}]
    result = None
    for arguments in attempts:
        if set(arguments) <= caller.argument_roles and result is None:
            found = all_arrays(caller(**arguments), engine)
            result = found[0] if found else None
            used = arguments
    if result is None:
        raise CannotCall("tokens")
    if candidate.documented and result.shape != (2, 1, 1, 4):
        recorder.add("wrong-shape", Example(used, [2, 1, 1, 4], list(result.shape)))
        return
    flat = np.squeeze(result)
    if result.ndim >= 3 and result.shape[-1] == 1 and result.shape[-2] == 4 and flat.shape == real.shape:
        recorder.add("padding-masks-queries", Example(used, [2, 1, 1, 4], list(result.shape)))
        return
    if flat.shape == (2, 4, 4) and all((flat == flat[:, :1]).all() for _ in (0,)):
        flat = flat[:, 0]
    if flat.shape != real.shape:
        recorder.add("wrong-shape", Example(used, [2, 1, 1, 4], list(result.shape)))
        return
    for sense, read in allowed_by_sense(flat).items():
        if read is not None and np.array_equal(read, real):
            recorder.assume(sense)
            check_documented_padding(candidate, recorder, sense, used, real)
            return
    shorter = real & np.array([[True, True, True, False], [True, False, False, False]])
    longer = np.array([[True] * 4, [True, True, True, False]])
    for read in allowed_by_sense(flat).values():
        if read is not None and any(np.array_equal(read, other) for other in (shorter, longer)):
            recorder.add("padding-off-by-one", Example(used, real, read))
            return
    recorder.add("padding-value", Example(used, real, flat))


def check_documented_padding(
    candidate: Candidate, recorder: Recorder, sense: str, used: dict[str, Any], real: np.ndarray
) -> None:
    from ..mask_forms import documented_sense

    documented = documented_sense(candidate.source)
    if documented is not None and sense in ("true_allows", "true_blocks") and not sense.endswith(documented):
        recorder.add(
            "mask-inverted",
            Example(used, real if documented == "allows" else ~real, ~real if documented == "allows" else real),
        )


__all__ = ["check_causal", "check_padding", "equal", "sense_of"]
