"""Rotary tables for code that takes them as arguments: cosines and sines, or complex numbers."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from .names import size_of

# arguments that take a table; STYLES are the ways in which people lay out cosines and sines
TABLE = (
    r"^(cos|sin|cosines?|sines?|(cos|sin)_?(cached?|table|emb)?|freqs?(_?(cis|complex|cos|sin))?"
    r"|rope_?(cos|sin|freqs|cache)|angles|rotary_?pos(_?emb)?|pos_?cis)$"
)
BUILDER = (
    r"freq|precompute|(rope|rotary)_?(param|table|cache|cos|angle)|(build|make|get|compute|create)_?(rope|rotary|cos)"
)
STYLES = ("wide", "half", "repeated")


def is_table(name: str) -> bool:
    return bool(re.match(TABLE, name.lower()))


def angles(T: int, K: int, start: int = 0, power: float = 2.0, base: float = 10000.0) -> np.ndarray:
    """Return position · base^(−power·i/K), [T, K/2]."""
    return (np.arange(T) + start)[:, None] * base ** (-power * np.arange(K // 2) / K)


def takes_angles(function: Callable[..., Any], name: str) -> bool:
    """Return True if the function itself takes the cosine of this argument."""
    try:
        source = inspect.getsource(function)
    except (OSError, TypeError):
        return False
    return bool(re.search(rf"\b{name}\b(\[[^\n]*\])?\.cos\(\)|cos\(\s*{name}\b", source))


def make_angles(T: int, K: int, neighbours: Mapping[str, Any], style: str = "wide") -> Any:
    """Return the angles that the file itself builds, or else ours."""
    built = build_table(T, K, neighbours)
    if hasattr(built, "shape") and not np.iscomplexobj(np.asarray(built)):
        return built
    phi = angles(T, K)
    return {"wide": np.concatenate((phi, phi), -1), "half": phi, "repeated": np.repeat(phi, 2, -1)}[style]


def make_table(name: str, T: int, K: int, neighbours: Mapping[str, Any], style: str = "wide") -> Any:
    """Return the table that the file's own function builds, or else ours."""
    is_trig = re.search(r"cos|sin", name.lower()) and "cis" not in name.lower()
    built = build_table(T, K, neighbours)
    if is_trig and isinstance(built, tuple | list) and len(built) == 2:
        is_cosine = [bool((first_row(table) == 1).all()) for table in built]
        return built[is_cosine.index("cos" in name.lower())] if len(set(is_cosine)) == 2 else built[0]
    if not is_trig:
        return built if built is not None else np.exp(1j * angles(T, K))
    phi = angles(T, K)
    wide = {"wide": np.concatenate((phi, phi), -1), "half": phi, "repeated": np.repeat(phi, 2, -1)}[style]
    return np.cos(wide) if "cos" in name.lower() else np.sin(wide)


def first_row(table: Any) -> np.ndarray:
    """Return the row of position 0 of a table [.., T, width]."""
    array = np.asarray(table)
    return np.asarray(array.reshape(-1, array.shape[-1])[0])


def build_table(T: int, K: int, neighbours: Mapping[str, Any]) -> Any:
    """Call the file's own function that builds the table for T positions and head width K; None if there is none."""
    for name, function in neighbours.items():
        if inspect.isclass(function) and re.search("rotary|rope", name.lower()):
            with suppress(Exception):
                module: Any = function
                return module(K)(T)
        if not inspect.isfunction(function) or not re.search(BUILDER, name.lower()) or "apply" in name.lower():
            continue
        parameters = inspect.signature(function).parameters.values()
        lengths = r"len|end|ctx|context|max|seq|pos|^t$|^n$"
        given = {p.name: T if re.search(lengths, p.name.lower()) else K for p in parameters if is_size(p)}
        try:
            return function(**given)
        except Exception:
            continue
    return None


def is_size(parameter: inspect.Parameter) -> bool:
    """Return True if the builder needs this argument to know the length or the width."""
    if parameter.default is inspect.Parameter.empty:
        return True
    return size_of(parameter.name) in ("L", "K") and isinstance(parameter.default, int)
