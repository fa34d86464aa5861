"""Find, read and set the weights of a learner's object."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from inspect import isfunction, signature
from textwrap import dedent
from typing import Any

import numpy as np

from .candidate import Candidate
from .names import weight_role


@dataclass
class Weight:
    """One weight array inside an object."""

    path: str
    owner: Any
    name: Any  # attribute, key or index in its owner
    value: Any
    registered: bool = True  # torch: a parameter that the optimizer sees, or a buffer
    linear: bool = False  # belongs to an nn.Linear: [out, in]

    @property
    def array(self) -> np.ndarray:
        if isinstance(self.value, np.ndarray):
            return self.value.astype(float)
        return self.value.detach().double().numpy().copy()

    def set(self, array: np.ndarray) -> None:
        """Overwrite the weight in place."""
        if isinstance(self.value, np.ndarray):
            self.value = array.astype(float)
            if isinstance(self.owner, dict | list):
                self.owner[self.name] = self.value
            else:
                setattr(self.owner, self.name, self.value)
            return
        import torch

        with torch.no_grad():
            self.value.copy_(torch.from_numpy(np.ascontiguousarray(array)))


def is_array(value: Any) -> bool:
    kind = type(value)
    return isinstance(value, np.ndarray) or (hasattr(value, "detach") and kind.__module__.startswith("torch"))


# names of arrays in a NumPy object that are not weights: gradients, caches, optimizer state
TRAINING_STATE = r"^(cache|d_?[A-Z]\w*|d[wb]\d*|grads?|gradients?|grad_\w+|momentum|velocity)$"


def iter_weights(thing: Any, path: str = "", seen: set[int] | None = None, depth: int = 0) -> Iterator[Weight]:
    """Yield every floating-point array in the object and everything it holds."""
    seen = set() if seen is None else seen
    if id(thing) in seen or depth > 6:
        return
    seen.add(id(thing))
    registered = set()
    if isinstance(thing, dict):
        items = [(name, value) for name, value in thing.items() if not re.match(TRAINING_STATE, str(name))]
    elif isinstance(thing, list | tuple):
        items = list(enumerate(thing))
    elif hasattr(thing, "_parameters") and hasattr(thing, "_modules"):  # torch
        registered = {*thing._parameters, *thing._buffers, *thing._modules}
        items = [*thing._parameters.items(), *thing._modules.items(), *thing._buffers.items()]
        items += [(n, v) for n, v in vars(thing).items() if not n.startswith("_") and n != "training"]
    elif hasattr(thing, "__dict__") and not isinstance(thing, type) and not callable_only(thing):
        items = [(name, value) for name, value in vars(thing).items() if not re.match(TRAINING_STATE, name)]
    else:
        return
    for name, value in items:
        inner = f"{path}.{name}" if path else str(name)
        if is_array(value):
            if value.dtype.__str__().endswith(("bool", "int64", "int32")) or id(value) in seen:
                continue
            seen.add(id(value))
            linear = type(thing).__name__ == "Linear" and type(thing).__module__.startswith("torch")
            is_module = hasattr(thing, "_modules")
            yield Weight(inner, thing, name, value, registered=not is_module or name in registered, linear=linear)
        elif value is not None:
            inside_list = hasattr(thing, "_modules") and isinstance(value, list | tuple | dict)
            for weight in iter_weights(value, inner, seen, depth + 1):
                weight.registered = weight.registered and not inside_list
                yield weight


def fill_zero_biases(biases: list[Weight]) -> None:
    """Replace zero biases by random ones, so that a bias that is never used is noticed."""
    generator = np.random.default_rng(3)
    for bias in biases:
        if not bias.array.any():
            bias.set(generator.normal(size=bias.array.shape))


def callable_only(thing: Any) -> bool:
    return type(thing).__name__ in ("function", "builtin_function_or_method", "method", "module")


def dict_keys(name: str, candidate: Candidate) -> tuple[str, str] | None:
    """Return the keys of matrix and bias if a weight is passed as a dict: `linear(x, **c_fc)` or `c_fc["w"]`."""
    try:
        nodes = list(ast.walk(ast.parse(dedent(candidate.source))))
    except SyntaxError:
        return None
    read = re.findall(rf"\b{name}\[[\"'](\w+)[\"']\]", candidate.source)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    for call in calls:
        if any(k.arg is None and isinstance(k.value, ast.Name) and k.value.id == name for k in call.keywords):
            function = candidate.neighbours.get(getattr(call.func, "id", ""))
            read += list(signature(function).parameters)[1:] if isfunction(function) else ["w", "b"]
    biases = [key for key in read if is_bias(key)]
    matrices = [key for key in read if not is_bias(key)]
    return (matrices[0], biases[0]) if matrices and biases else None


@dataclass
class Projections:
    """The four matrices of multi-head attention as [out, in], with their biases."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    o: np.ndarray | None
    q_bias: np.ndarray | float = 0.0
    k_bias: np.ndarray | float = 0.0
    v_bias: np.ndarray | float = 0.0
    o_bias: np.ndarray | float = 0.0
    assumed: tuple[str, ...] = ()


def stack_heads(all_arrays: list[np.ndarray], is_out_in: bool, role: str) -> np.ndarray:
    """Stack per-head matrices into one [out, in] matrix."""
    parts = []
    for a in all_arrays:
        if a.ndim == 3:  # [H, D, K], or [H, K, D] for the output
            a = a.transpose(0, 2, 1).reshape(-1, a.shape[1]) if role != "o" else a.reshape(-1, a.shape[-1]).T
            parts.append(a)
        else:
            parts.append(a if is_out_in else a.T)
    return np.concatenate(parts, 1 if role == "o" else 0)


def is_bias(path: str) -> bool:
    return bool(re.match(r"(?i)b(ias)?(_|$)", path.split(".")[-1]))


def projections(weights: list[Weight], heads: int, groups: int, width: int | None = None) -> Iterator[Projections]:
    """Yield every way to read these weights as W_Q, W_K, W_V and W_O, the likeliest first."""
    weights = [w for w in weights if getattr(w.value, "grad_fn", None) is None]  # not stored activations
    vectors = [w for w in weights if w.array.ndim == 1 or is_bias(w.path)]
    matrices = [w for w in weights if w.array.ndim in (2, 3) and not is_bias(w.path)]
    if width is not None:
        matrices = [w for w in matrices if width in w.array.shape]
    by_role: dict[str, list[Weight]] = {}
    for weight in matrices:
        role = weight_role(weight.path)
        if role is not None:
            by_role.setdefault(role, []).append(weight)
    biases: dict[str, list[np.ndarray]] = {}
    for weight in vectors:
        role = weight_role(weight.path)
        if role is not None:
            biases.setdefault(role, []).append(weight.array.ravel())
    if not ({"q", "k", "v"} <= set(by_role) or "qkv" in by_role or {"q", "kv"} <= set(by_role)):
        if len(matrices) not in (3, 4):
            return
        by_role = {role: [w] for role, w in zip("qkvo", matrices, strict=False)}
        biases = {role: [w.array] for role, w in zip("qkvo", vectors, strict=False)}
    known = all(w.linear or w.array.ndim == 3 for ws in by_role.values() for w in ws)
    for is_out_in in (True,) if known else (False, True):
        full = {role: stack_heads([w.array for w in ws], is_out_in, role) for role, ws in by_role.items()}
        if "qkv" in full and full["qkv"].shape[0] < full["qkv"].shape[1]:
            continue  # a fused matrix in the wrong orientation
        shift = {role: np.concatenate(b) for role, b in biases.items()}
        if "o" in shift and "o" in full and shift["o"].shape[0] != full["o"].shape[0]:
            del shift["o"]
        yield from split_projections(full, shift, heads, groups, () if known or is_out_in else ("x_at_w",))


def split_projections(
    full: dict[str, np.ndarray], shift: dict[str, np.ndarray], heads: int, groups: int, assumed: tuple[str, ...]
) -> Iterator[Projections]:
    o, o_bias = full.get("o"), shift.get("o", 0.0)
    if {"q", "k", "v"} <= set(full):
        rows = full["q"], full["k"], full["v"]
        q_bias, k_bias, v_bias = (shift.get(role, 0.0) for role in "qkv")
        if o is not None and heads > 1 and rows[0].shape[0] * heads == o.shape[1]:  # one matrix for every head
            q, k, v = (np.kron(np.eye(heads), w) for w in rows)
            rows = q, k, v
            q_bias, k_bias, v_bias = (
                np.tile(b, heads) if isinstance(b, np.ndarray) else b for b in (q_bias, k_bias, v_bias)
            )
        yield Projections(*rows, o, q_bias, k_bias, v_bias, o_bias, assumed)
        return
    if "kv" in full:
        k, v = np.split(full["kv"], 2)
        kb, vb = np.split(shift["kv"], 2) if "kv" in shift else (0.0, 0.0)
        yield Projections(full["q"], k, v, o, shift.get("q", 0.0), kb, vb, o_bias, assumed)
        return
    whole, bias = full["qkv"], shift.get("qkv")
    unit = whole.shape[0] // (heads + 2 * groups)
    at = [heads * unit, (heads + groups) * unit]
    orders = [np.split(np.arange(whole.shape[0]), at)]
    if heads == groups and whole.shape[0] % 3 == 0:
        per_head = np.arange(whole.shape[0]).reshape(heads, 3, -1)
        orders += [[per_head[:, i].ravel() for i in range(3)]]
        interleaved = np.arange(whole.shape[0]).reshape(-1, 3)
        orders += [[interleaved[:, i] for i in range(3)]]
        orders += [[orders[0][i] for i in order] for order in ((1, 0, 2), (2, 1, 0), (0, 2, 1), (1, 2, 0), (2, 0, 1))]
    for index, order in enumerate(orders):
        parts = [whole[rows] for rows in order]
        shifts = [0.0 if bias is None or bias.shape[0] != whole.shape[0] else bias[rows] for rows in order]
        note = () if index == 0 else ("fused_order",)
        q_bias, k_bias, v_bias = shifts
        yield Projections(parts[0], parts[1], parts[2], o, q_bias, k_bias, v_bias, o_bias, (*assumed, *note))
