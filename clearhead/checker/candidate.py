"""A function, class or object to check, and how to construct and call it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import numpy as np

from .engine import NumPy, engine
from .names import assign_sizes, neutral_value, role_of, size_of
from .rotary_tables import is_table, make_angles, make_table, takes_angles


class CannotCall(Exception):
    """The checker does not know what to pass for a required argument."""


class CannotConstruct(Exception):
    """The constructor failed on the arguments that the checker tried."""


class NeedsModule(Exception):
    """The code uses a name whose import failed."""


class NeedsFloat32(Exception):
    """The code does not run in float64, because it casts to other types itself."""


class NotWritten(Exception):
    """The code raises NotImplementedError or returns None."""


@dataclass(frozen=True)
class ProbeSizes:
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


# options of config objects that mean "off" when they are not sizes
SWITCHES = r"^(use|is|has|enable|tie|with)_|bias|flash|causal|dropout|drop$|tied|checkpoint"


class AnyConfig:
    """A config object that has every known size and switch. Other names raise AttributeError."""

    def __init__(self, sizes: ProbeSizes) -> None:
        self.sizes = sizes

    def __getattr__(self, name: str) -> Any:
        size = size_of(name)
        if size is not None:
            return self.sizes[size]
        if re.search(SWITCHES, name) and not name.startswith("__"):
            return name == "bias"
        raise AttributeError(name)

    def __getitem__(self, name: str) -> Any:
        try:
            return getattr(self, name)
        except AttributeError:
            raise KeyError(name) from None

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


@dataclass(frozen=True)
class Candidate:
    name: str
    part: str
    thing: Any
    engine_name: str
    source: str = ""
    neighbours: Mapping[str, Any] = field(default_factory=dict)
    example: ExampleCall | None = None
    broken: Mapping[str, int] = field(default_factory=dict)  # undefined names -> the line that failed to define them
    documented: bool = False  # an exercise: its docstring states which inputs must work
    file_source: str = ""
    is_factory: bool = False  # a function that returns a module: `def FeedForward(dim): return nn.Sequential(…)`
    dtype: str = "float64"

    def caller(self, thing: Any, roles: tuple[str, ...], sizes: ProbeSizes, engine: NumPy | None = None) -> Caller:
        """Return a caller for the object, which follows the example call if there is one."""
        example = None if self.example is None else self.example.call
        made = Caller(find_forward(thing), engine or self.engine(), roles, sizes, example=example or {})
        return replace(made, neighbours=self.neighbours)

    @property
    def is_class(self) -> bool:
        return inspect.isclass(self.thing) or self.is_factory

    @property
    def is_function(self) -> bool:
        return (inspect.isfunction(self.thing) or inspect.isbuiltin(self.thing)) and not self.is_factory

    def constructor_takes(self, size: str) -> bool:
        """Return True if the constructor has an argument for this size."""
        return self.is_class and size in assign_sizes([p.name for p in constructor_parameters(self.thing)]).values()

    def engine(self) -> NumPy:
        made = engine(self.engine_name, self.dtype)
        if re.search(r"float32|\.float\(\)", self.source):  # norms and softmax often compute in float32 on purpose
            made.slack = 30.0
        return made

    def instantiate(self, sizes: ProbeSizes, seed: int = 0) -> Any:
        """Return the object, or construct one from the class."""
        if not self.is_class:
            return self.thing
        seed_all(seed, self.engine_name)
        given = {} if self.example is None else self.example.construct
        try:
            with global_depth(self.neighbours, sizes.N):
                return construct(self.thing, sizes, self.neighbours, given=given)
        except (CannotCall, NotWritten, NotImplementedError, NeedsModule, NameError, MemoryError):
            raise
        except Exception as error:
            call = f"{self.name}({describe(self.thing, sizes, self.neighbours)})"
            raise CannotConstruct(call, one_line(error)) from error


@contextmanager
def global_depth(names: Mapping[str, Any], depth: int) -> Iterator[None]:
    """Let a global such as `n_layer` say how many layers to build, if it is another number."""
    before = {n: v for n, v in names.items() if type(v) is int and len(n) > 1 and size_of(n) == "N" and v != depth}
    if not isinstance(names, dict) or not before or depth == ProbeSizes.N:
        yield
        return
    names.update(dict.fromkeys(before, depth))
    try:
        yield
    finally:
        names.update(before)


def one_line(error: BaseException) -> str:
    """Return the type and the first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}".rstrip(": ")[:160]


def describe(cls: Any, sizes: ProbeSizes, neighbours: Mapping[str, Any]) -> str:
    """Return the constructor arguments that the checker tries, as text."""
    try:
        given = constructor_arguments(cls, sizes, neighbours, 0)
    except Exception:
        return "…"
    texts = {name: value if isinstance(value, int | float | str) else "…" for name, value in given.items()}
    return ", ".join(f"{name}={text}" for name, text in texts.items())


def seed_all(seed: int, engine_name: str) -> None:
    np.random.seed(seed)
    if engine_name == "torch":
        import torch

        torch.manual_seed(seed)


def parameters_of(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters of a function without *args and **kwargs."""
    inner = function.__func__ if inspect.ismethod(function) else function
    if inspect.isfunction(inner):
        return list(parameters_of_function(inner)[1 if inner is not function else 0 :])
    return named_parameters(function)


@lru_cache(maxsize=256)
def parameters_of_function(function: Callable[..., Any]) -> list[inspect.Parameter]:
    return named_parameters(function)


def named_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        found = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    return [p for p in found if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def constructor_parameters(thing: Any) -> list[inspect.Parameter]:
    """Return the arguments of a class's constructor, or of a function that returns a module."""
    return parameters_of(thing.__init__)[1:] if inspect.isclass(thing) else parameters_of(thing)


def construct(
    cls: Any, sizes: ProbeSizes, neighbours: Mapping[str, Any], depth: int = 0, given: Mapping[str, Any] | None = None
) -> Any:
    """Construct a class with these sizes. Configs and sublayers that its constructor needs are constructed too."""
    return cls(**{**constructor_arguments(cls, sizes, neighbours, depth, given or {}), **(given or {})})


def constructor_arguments(
    cls: Any, sizes: ProbeSizes, neighbours: Mapping[str, Any], depth: int, given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    parameters = [p for p in constructor_parameters(cls) if p.name not in (given or {})]
    roles = assign_sizes([p.name for p in parameters], getattr(cls, "__name__", ""))
    found = {p.name: constructor_value(p, roles.get(p.name), sizes, neighbours, depth) for p in parameters}
    return {name: value for name, value in found.items() if value is not inspect.Parameter.empty}


def constructor_value(
    parameter: inspect.Parameter, size: str | None, sizes: ProbeSizes, neighbours: Mapping[str, Any], depth: int
) -> Any:
    """Return what to pass for one argument of a constructor, or Parameter.empty to keep its default."""
    required = parameter.default is inspect.Parameter.empty
    if parameter.name == "device":
        return "cpu"
    if re.search(r"conf|cfg|^args|params|hparams", parameter.name.lower()):
        return config_for(parameter, sizes, neighbours)
    if size == "N" and wants_module(parameter) and depth < 3:
        return module_list(sizes, neighbours, depth)
    if size is not None and (required or overrides_default(parameter, size, sizes)):
        return sizes[size]
    if not required:
        return inspect.Parameter.empty
    if depth < 3 and re.search(r"(layers|blocks)$", parameter.name.lower()) and size is None:
        return module_list(sizes, neighbours, depth)
    if is_table(parameter.name):
        return make_table(parameter.name, sizes.L, sizes["K"], neighbours)
    if depth < 3 and sublayers_named(parameter.name):
        return sublayer_for(parameter.name, sizes, neighbours, depth)
    is_known, value = neutral_value(parameter.name, str(parameter.annotation))
    if not is_known:
        raise CannotCall(parameter.name)
    return sizes["K"] ** 0.5 if value == "temperature" else value


def overrides_default(parameter: inspect.Parameter, size: str, sizes: ProbeSizes) -> bool:
    """Return True if a size replaces the argument's default: not a text, a switch or a computed width."""
    default = parameter.default
    if default is None and size in ("L", "F", "K", "V"):
        return False  # the code works out its own value
    if callable(default) or isinstance(default, str | bool) or size == "rope_base":
        return False
    if size in ("G", "K") and not (isinstance(default, int) and (size == "K" or sizes.G is not None)):
        return size == "G" and sizes.G is not None
    return True


def wants_module(parameter: inspect.Parameter) -> bool:
    """Return True for `layers: nn.ModuleList` and the like."""
    return bool(re.search(r"module|list|sequential|layer\b", str(parameter.annotation).lower()))


def module_list(sizes: ProbeSizes, neighbours: Mapping[str, Any], depth: int) -> Any:
    """Construct a list of the file's blocks."""
    import torch

    return torch.nn.ModuleList([sublayer_for("block", sizes, neighbours, depth) for _ in range(sizes.N)])


def config_for(parameter: inspect.Parameter, sizes: ProbeSizes, neighbours: Mapping[str, Any]) -> Any:
    """Return the file's own config with our sizes, or an object that has every size."""
    annotation = str(parameter.annotation).strip("'\"").split(".")[-1]
    classes = [v for v in neighbours.values() if inspect.isclass(v) and is_config(v, annotation)]
    for cls in sorted(classes, key=lambda cls: cls.__name__ != annotation):
        roles = assign_sizes([p.name for p in constructor_parameters(cls)], cls.__name__)
        try:
            config = cls(**{name: sizes[size] for name, size in roles.items() if size != "rope_base"})
        except Exception:
            continue
        return with_known_names(config, sizes)
    for value in neighbours.values():
        if isinstance(value, dict) and value and all(isinstance(key, str) for key in value):
            known = {key: sizes[s] for key in value if (s := size_of(key)) and not isinstance(value[key], bool)}
            casts = {key: float32_for(each) for key, each in value.items() if "torch.bfloat16" in str(each)}
            if known:
                return value | known | casts
    return AnyConfig(sizes)


def float32_for(dtype: Any) -> Any:
    """Return torch.float32 for a torch dtype."""
    import torch

    return torch.float32 if isinstance(dtype, torch.dtype) else dtype


def with_known_names(config: Any, sizes: ProbeSizes) -> Any:
    """Let a config answer for the sizes that its class does not define: others set them from **kwargs."""
    known = AnyConfig(sizes)

    def missing(self: Any, name: str) -> Any:
        return getattr(known, name)

    with suppress(TypeError):  # a class with __slots__
        config.__class__ = type(type(config).__name__, (type(config),), {"__getattr__": missing})
    return config


def is_config(cls: type, annotation: str) -> bool:
    return cls.__name__ == annotation or bool(re.search(r"config|args|params|hyper", cls.__name__.lower()))


def sublayer_for(name: str, sizes: ProbeSizes, neighbours: Mapping[str, Any], depth: int) -> Any:
    """Construct a sublayer that the constructor takes, as in EncoderLayer(size, self_attn, feed_forward, dropout)."""
    from .names import part_of

    for cls in neighbours.values():
        if inspect.isclass(cls) and part_of(cls.__name__) in sublayers_named(name):
            is_rotary = part_of(cls.__name__) == "rotary"  # as wide as a head
            return construct(cls, replace(sizes, D=sizes["K"], H=1) if is_rotary else sizes, neighbours, depth + 1)
    raise CannotCall(name)


# words in an argument's name -> the parts that it may be; the first match wins
SUBLAYERS = (
    (r"attn|attention|mha", ("multi_head",)),
    (r"ff|feed|mlp", ("feed_forward", "swiglu")),
    (r"norm", ("layer_norm", "rms_norm")),
    (r"layer$|layers$|block", ("encoder_block", "decoder_block")),
    (r"^rope$|rotary", ("rotary",)),
)


def sublayers_named(name: str) -> tuple[str, ...]:
    return next((parts for pattern, parts in SUBLAYERS if re.search(pattern, name.lower())), ())


@dataclass(frozen=True)
class Role:
    """An argument of an example call that the checker fills in: q, k, v, x, mask, memory …"""

    name: str


@dataclass(frozen=True)
class ExampleCall:
    """How to construct and call a part, as the author shows it: `Attention(64, heads=4)(x, mask=mask)`."""

    text: str
    construct: Mapping[str, Any]
    call: Mapping[str, Any]


def parse_example(text: str, thing: Any, names: Mapping[str, Any]) -> ExampleCall:
    """Read an example call. A name that is a role stands for our input; other expressions are evaluated."""
    node = ast.parse(text.strip(), mode="eval").body
    if not isinstance(node, ast.Call):
        raise ValueError(f"the example {text!r} is not a call")
    if not inspect.isclass(thing):
        return ExampleCall(text, {}, bind_arguments(node, parameters_of(find_forward(thing)), names))
    made, called = (node.func, node) if isinstance(node.func, ast.Call) else (node, None)
    construct = bind_arguments(made, constructor_parameters(thing), names)
    forward = getattr(thing, "forward", None) or thing.__call__
    call = {} if called is None else bind_arguments(called, parameters_of(forward)[1:], names)
    return ExampleCall(text, construct, call)


def bind_arguments(node: ast.Call, parameters: list[inspect.Parameter], names: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameter -> Role or value for the arguments of a call."""

    def value(argument: ast.expr) -> Any:
        role = role_of(argument.id) if isinstance(argument, ast.Name) and argument.id not in names else None
        if role is not None:
            return Role(role)
        return eval(compile(ast.Expression(argument), "example", "eval"), dict(names))

    found = {p.name: value(argument) for p, argument in zip(parameters, node.args, strict=False)}
    return found | {k.arg: value(k.value) for k in node.keywords if k.arg is not None}


@dataclass(frozen=True)
class Caller:
    """Calls a function with arguments by role, whatever they are named and however they are ordered."""

    function: Callable[..., Any]
    engine: NumPy
    roles: tuple[str, ...]
    sizes: ProbeSizes
    fixed: Mapping[str, Any] = field(default_factory=dict)  # parameter -> value
    example: Mapping[str, Any] = field(default_factory=dict)  # parameter -> Role or value, from an example call
    neighbours: Mapping[str, Any] = field(default_factory=dict)  # what else the file defines
    table_style: str = "wide"  # how cosines and sines are laid out, if the file does not build them

    def role(self, parameter: inspect.Parameter) -> str | None:
        if self.takes_own_context(parameter):
            return None
        shown = self.example.get(parameter.name)
        role = shown.name if isinstance(shown, Role) else role_of(parameter.name, self.roles)
        if role == "mask" and isinstance(parameter.default, bool):  # `causal_mask=False`
            return "causal" if "causal" in self.roles else None
        return role

    def takes_own_context(self, parameter: inspect.Parameter) -> bool:
        """Return True for the `context` of clearhead.nn, which is not the memory of cross-attention."""
        module = str(getattr(self.function, "__module__", ""))
        return parameter.name == "context" and module.startswith("clearhead.nn")

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
        rest, used = list(unnamed), set()
        arguments: dict[str, Any] = {}
        for parameter in self.parameters:
            role, required = self.role(parameter), parameter.default is inspect.Parameter.empty
            if parameter.name in self.fixed:
                value = self.fixed[parameter.name]
            elif parameter.name in self.example and not isinstance(self.example[parameter.name], Role):
                value = self.example[parameter.name]
            elif role in given and role not in used:
                value = given[role]
                used.add(role)
            elif rest and (role is None or required):
                value = rest.pop(0)
            elif not required:
                continue
            else:
                value = self.placeholder(parameter, role, arguments)
            arguments[parameter.name] = self.engine.to_native(value)
        if rest or set(given) - used:
            raise CannotCall(", ".join([*sorted(set(given) - used), *(["?"] * len(rest))]))
        if "context" in arguments and arguments["context"] is None:
            arguments["context"] = own_context(next(iter(arguments.values())))
        positional = [arguments.pop(p.name) for p in self.parameters if p.kind is p.POSITIONAL_ONLY]
        result = self.function(*positional, **arguments)
        if result is None or result is Ellipsis:
            raise NotWritten
        return result

    def placeholder(self, parameter: inspect.Parameter, role: str | None, arguments: Mapping[str, Any]) -> Any:
        """Return a value for a required argument that the check has no value for."""
        if takes_angles(self.function, parameter.name) and is_table(parameter.name):
            return make_angles(length_of(arguments), self.head_width, self.neighbours, self.table_style)
        if is_table(parameter.name):
            return make_table(parameter.name, length_of(arguments), self.head_width, self.neighbours, self.table_style)
        if role_of(parameter.name, ("positions",)):
            is_start = "start" in parameter.name.lower() or "int" in str(parameter.annotation)
            return 0 if is_start or parameter.name == "offset" else np.arange(length_of(arguments))
        if role in ("mask", "memory_mask", "cache", "dropout") or role_of(parameter.name, ("lengths",)):
            return None
        if self.takes_own_context(parameter):
            return None
        size = size_of(parameter.name)
        if size is not None:
            return self.sizes[size]
        if role in ("causal", "training", "weights_too"):
            return False
        is_known, value = neutral_value(parameter.name, str(parameter.annotation))
        if not is_known or value == "temperature":
            raise CannotCall(parameter.name)
        return value

    @property
    def head_width(self) -> int:
        """The width of one head: as the object states it, or else by our sizes."""
        owner = getattr(self.function, "__self__", None)
        holders = [owner, *getattr(owner, "modules", list)()] if owner is not None else []
        for holder in holders:
            for name, value in vars(holder).items():
                if size_of(name) == "K" and type(value) is int:
                    return value
        return self.sizes["K"]


def length_of(arguments: Mapping[str, Any]) -> int:
    """Return T from x [.., T, D], or from tokens [B, T]."""
    arrays = [value for value in arguments.values() if hasattr(value, "shape") and len(value.shape) >= 2]
    if not arrays:
        raise CannotCall("T")
    shape = arrays[0].shape
    is_tokens = "int" in str(arrays[0].dtype)
    return int(shape[-1 if is_tokens else -2])


def own_context(x: Any) -> Any:
    """Return the context that modules of clearhead.nn take beside x [B, T, D]."""
    import torch

    from clearhead.nn.context import Context

    positions = torch.arange(x.shape[1], device=x.device)[None]
    return Context(positions, positions, aligned=True)


def find_forward(thing: Any) -> Callable[..., Any]:
    """Return what to call: the function itself, `forward`, `__call__`, or a method with a telling name."""
    if inspect.isfunction(thing) or inspect.ismethod(thing) or inspect.isbuiltin(thing):
        return thing
    for name in ("forward", "__call__", "call", "apply", "attention", "run", "compute", "encode", "get", "transform"):
        method = getattr(type(thing), name, None)
        if inspect.isfunction(method) and not method.__module__.startswith("torch.nn.modules.module"):
            return getattr(thing, name)
    methods = [n for n, m in vars(type(thing)).items() if inspect.isfunction(m) and not n.startswith("_")]
    return getattr(thing, methods[0]) if len(methods) == 1 else thing


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
