"""A function, class or object to check, and how to construct and call it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from .engine import NumPy, engine
from .names import role_of, size_of


class CannotCall(Exception):
    """The checker does not know what to pass for a required argument."""


class NotWritten(Exception):
    """The code raises NotImplementedError or returns None."""


@dataclass(frozen=True)
class Sizes:
    """The sizes that a class is constructed with. All differ, so that no size can stand in for another by chance."""

    D: int = 12
    H: int = 3
    G: int | None = None
    F: int = 20
    V: int = 11
    L: int = 16
    N: int = 2
    dropout: float = 0.0
    expansion: int = 2
    rope_base: float = 10000.0

    def __getitem__(self, size: str) -> Any:
        if size == "K":
            return self.D // self.H
        if size == "G":
            return self.H if self.G is None else self.G
        return getattr(self, size)


class AnyConfig:
    """A config object that answers to every known name of a size."""

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        size = size_of(name)
        if size is not None:
            return self.sizes[size]
        return {"bias": True, "qkv_bias": False, "flash": False}.get(name, False)

    __getitem__ = __getattr__


@dataclass(frozen=True)
class Candidate:
    name: str
    part: str
    thing: Any
    engine_name: str
    source: str = ""
    neighbours: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.thing)

    @property
    def is_function(self) -> bool:
        return inspect.isfunction(self.thing) or inspect.isbuiltin(self.thing)

    def engine(self, dtype: str = "float64") -> NumPy:
        made = engine(self.engine_name, dtype)
        if re.search(r"float32|\.float\(\)", self.source):  # norms and softmax often compute in float32 on purpose
            made.slack = 30.0
        return made

    def instantiate(self, sizes: Sizes, seed: int = 0) -> Any:
        """Return the object, or construct one from the class."""
        seed_all(seed, self.engine_name)
        return construct(self.thing, sizes, self.neighbours) if self.is_class else self.thing


def seed_all(seed: int, engine_name: str) -> None:
    np.random.seed(seed)
    if engine_name == "torch":
        import torch

        torch.manual_seed(seed)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def construct(cls: Any, sizes: Sizes, neighbours: Mapping[str, Any], depth: int = 0) -> Any:
    """Construct a class with these sizes. Configs and sublayers that its constructor needs are constructed too."""
    given: dict[str, Any] = {}
    names = [p.name for p in parameters_of(cls.__init__)[1:]]
    for parameter in parameters_of(cls.__init__)[1:]:
        value = constructor_value(parameter, sizes, neighbours, depth, names)
        if value is not inspect.Parameter.empty:
            given[parameter.name] = value
    return cls(**given)


def constructor_value(
    parameter: inspect.Parameter, sizes: Sizes, neighbours: Mapping[str, Any], depth: int, names: list[str]
) -> Any:
    size = size_of(parameter.name)
    required = parameter.default is inspect.Parameter.empty
    if re.search(r"conf|cfg|args|params|hparams", parameter.name.lower()):
        return config_for(parameter, sizes, neighbours)
    if size is not None and callable(parameter.default) and not required:
        return inspect.Parameter.empty
    if size == "N" and parameter.name == "N" and not any(size_of(n) == "D" for n in names):
        size = "N"
    if size == "G" and not required and sizes.G is None:
        return inspect.Parameter.empty
    if size == "K" and not required and not isinstance(parameter.default, int):
        return inspect.Parameter.empty
    if size == "rope_base" and not required:
        return inspect.Parameter.empty
    if size == "F" and not required and parameter.default is None:
        return sizes.F
    if size is not None:
        wants_text = isinstance(parameter.default, str | bool)
        return inspect.Parameter.empty if wants_text else sizes[size]
    if not required:
        return inspect.Parameter.empty
    if parameter.name in ("device", "dtype", "bias", "qkv_bias"):
        return {"device": "cpu", "dtype": None}.get(parameter.name, True)
    if depth < 3:
        return sublayer_for(parameter.name, sizes, neighbours, depth)
    raise CannotCall(parameter.name)


def config_for(parameter: inspect.Parameter, sizes: Sizes, neighbours: Mapping[str, Any]) -> Any:
    """Return the file's own config with our sizes, or an object that has every size."""
    for cls in neighbours.values():
        if inspect.isclass(cls) and re.search(r"config|args|params", cls.__name__.lower()):
            fields = parameters_of(cls.__init__)[1:]
            given = {p.name: sizes[s] for p in fields if (s := size_of(p.name)) and s != "rope_base"}
            try:
                return cls(**given)
            except Exception:
                break
    for value in neighbours.values():
        if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
            known = {key: sizes[s] for key in value if (s := size_of(key)) and not isinstance(value[key], bool)}
            if known:
                return value | known
    return AnyConfig(sizes)


def sublayer_for(name: str, sizes: Sizes, neighbours: Mapping[str, Any], depth: int) -> Any:
    """Construct a sublayer that the constructor takes, as in EncoderLayer(size, self_attn, feed_forward, dropout)."""
    from .names import part_of

    low = name.lower()
    wanted: tuple[str, ...] = ()
    if "attn" in low or "attention" in low:
        wanted = ("multi_head",)
    elif "ff" in low or "feed" in low or "mlp" in low:
        wanted = ("feed_forward", "swiglu")
    elif "norm" in low:
        wanted = ("layer_norm", "rms_norm")
    elif "layer" in low or "block" in low:
        wanted = ("encoder_block", "decoder_block")
    for cls in neighbours.values():
        if inspect.isclass(cls) and part_of(cls.__name__) in wanted:
            return construct(cls, sizes, neighbours, depth + 1)
    raise CannotCall(name)


@dataclass(frozen=True)
class Caller:
    """Calls a function with arguments by role, whatever they are named and however they are ordered."""

    function: Callable[..., Any]
    engine: NumPy
    roles: tuple[str, ...]
    sizes: Sizes
    fixed: Mapping[str, Any] = field(default_factory=dict)  # parameter -> value, decided once

    def role(self, parameter: inspect.Parameter) -> str | None:
        return role_of(parameter.name, self.roles)

    @property
    def argument_roles(self) -> set[str]:
        """The roles for which this function has an argument."""
        return {role for p in self.parameters if (role := self.role(p))}

    @property
    def parameters(self) -> list[inspect.Parameter]:
        return parameters_of(self.function)

    def with_fixed(self, **fixed: Any) -> Caller:
        return replace(self, fixed={**self.fixed, **fixed})

    def __call__(self, *unnamed: Any, **given: Any) -> Any:
        """Pass arguments by role; `unnamed` fill the first parameters without a known role."""
        rest, arguments, used = list(unnamed), {}, set()
        for parameter in self.parameters:
            role, required = self.role(parameter), parameter.default is inspect.Parameter.empty
            if parameter.name in self.fixed:
                value = self.fixed[parameter.name]
            elif role in given and role not in used:
                value = given[role]
                used.add(role)
            elif rest and (role is None or required):
                value = rest.pop(0)
            elif not required:
                continue
            else:
                value = self.placeholder(parameter, role)
            arguments[parameter.name] = self.engine.to_native(value)
        if rest or set(given) - used:
            raise CannotCall(", ".join([*sorted(set(given) - used), *(["?"] * len(rest))]))
        positional = [arguments.pop(p.name) for p in self.parameters if p.kind is p.POSITIONAL_ONLY]
        result = self.function(*positional, **arguments)
        if result is None or result is Ellipsis:
            raise NotWritten
        return result

    def placeholder(self, parameter: inspect.Parameter, role: str | None) -> Any:
        """Return a value for a required argument that the check has no value for."""
        if role in ("mask", "memory_mask", "cache", "dropout") or role_of(parameter.name, ("lengths",)):
            return None
        size = size_of(parameter.name)
        if size is not None:
            return self.sizes[size]
        if role in ("causal", "training", "weights_too"):
            return False
        raise CannotCall(parameter.name)


def find_forward(thing: Any) -> Callable[..., Any]:
    """Return what to call: the function itself, `forward`, `__call__`, or a method with a telling name."""
    if inspect.isfunction(thing) or inspect.ismethod(thing) or inspect.isbuiltin(thing):
        return thing
    for name in ("forward", "__call__", "call", "apply", "attention", "run", "compute", "encode", "get", "transform"):
        method = getattr(type(thing), name, None)
        if inspect.isfunction(method):
            return getattr(thing, name)
    methods = [m for n, m in inspect.getmembers(thing, inspect.ismethod) if not n.startswith("_")]
    if len(methods) == 1:
        return methods[0]
    return thing


def all_arrays(result: Any, engine: NumPy) -> list[np.ndarray]:
    """Return every array in a result."""
    items = result if isinstance(result, tuple | list) else result.values() if isinstance(result, dict) else [result]
    if isinstance(result, SimpleNamespace):
        items = vars(result).values()
    return [taken for item in items if (taken := engine.to_numpy(item)) is not None]


def pick_array(result: Any, shape: tuple[int, ...], engine: NumPy) -> np.ndarray | None:
    """Return the first array of the expected shape, or else the first array."""
    found = all_arrays(result, engine)
    fitting = [a for a in found if a.shape == shape]
    return next(iter(fitting or found), None)
