"""The base of all configs: frozen data, checked when made, saved as JSON, and able to list what it computes."""

from __future__ import annotations

import difflib
import html
import json
import math
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from clearhead.typed_json import JSONError, decode_json, quote_repr, read_json

Shape = tuple[int, ...]
C = TypeVar("C", bound="Config")
P = TypeVar("P", bound="Part")


class ConfigError(ValueError):
    """An invalid config. The message names the field, its value and the rule.

    >>> try:
    ...     AttentionConfig(heads=0)
    ... except ConfigError as error:
    ...     print(error)
    Attention.heads is 0, but must be positive
    """


@dataclass(frozen=True, kw_only=True)
class Step:
    """One line of `trace`: a value with its formula, shape, weights and cost.

    >>> step = next(iter(clearhead.trace("tiny-gpt", length=5).steps))
    >>> step.name, step.letters, step.shape
    ('embedding.tokens', 'B T D', (1, 5, 32))
    """

    name: str  # dotted path, the same as the tap's and, for weights, the module's
    formula: str
    letters: str  # "B H T S", in the alphabet of `clearhead.shapes`
    shape: Shape
    part: str  # attention, ffn, norm, embedding, head: what `cost` sums by
    weights: Mapping[str, Shape] = field(default_factory=dict)
    idle: int = 0  # parameters among these weights that one token does not use: experts not chosen
    flops: int = 0  # a multiply-add is 2, matrix products only
    order: str = ""  # growth of `flops` in length n and width d
    kept: int = 1  # how many arrays of this shape a training step keeps for the backward pass, with fused kernels
    repeats: int = 1  # how many equal blocks compute it, if repeated blocks are listed once
    copies: int = 1  # how many of those blocks have weights of their own

    @property
    def parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.weights.values())


@dataclass(frozen=True)
class Scope:
    """The size of every dimension letter at one place of the config tree, and the part that `cost` counts it under.

    >>> Scope({"B": 1, "T": 5, "D": 64}).shape("B T D")
    (1, 5, 64)
    """

    sizes: Mapping[str, int]
    part: str = ""
    folded: bool = False  # list repeated blocks once, with their number in `Step.repeats`

    def __getitem__(self, letter: str) -> int:
        return self.sizes[letter]

    def with_sizes(self, part: str | None = None, /, **sizes: int) -> Scope:
        """A copy with other sizes, and another part."""
        return Scope({**self.sizes, **sizes}, self.part if part is None else part, self.folded)

    def shape(self, letters: str) -> Shape:
        """`"B T H·K+G·K"` -> sizes: a dimension is a sum of products of letters and numbers."""

        def size(factor: str) -> int:
            return int(factor) if factor.isdigit() else self.sizes[factor]

        return tuple(sum(math.prod(map(size, term.split("·"))) for term in dim.split("+")) for dim in letters.split())

    def step(self, name: str, formula: str, letters: str, **rest: Any) -> Step:
        return Step(name=name, formula=formula, letters=letters, shape=self.shape(letters), part=self.part, **rest)


ONE = Scope(dict.fromkeys(("B", "T", "S", "source", "source_new"), 1))
"""One token: enough to list weights, whose shapes do not depend on the input."""


def under(name: str, steps: Iterable[Step]) -> Iterator[Step]:
    """The steps of a child, with the child's name in front of theirs."""
    for step in steps:
        yield replace(
            step,
            name=f"{name}.{step.name}" if step.name else name,
            weights={f"{name}.{weight}": shape for weight, shape in step.weights.items()},
        )


@dataclass(frozen=True, kw_only=True)
class Config:
    """A node of the config tree: a frozen dataclass whose fields are numbers, words or other configs.

    `print(config)` shows the tree, without the fields that have their default.

    >>> AttentionConfig(heads=4).with_value("heads", 8).heads
    8
    >>> Window(3).kind(), Window(3).to_dict()
    ('Window', {'kind': 'Window', 'size': 3})
    """

    kinds: ClassVar[dict[str, type[Config]]] = {}

    def __init_subclass__(cls, abstract: bool = False) -> None:
        """Register the class under its kind; an abstract one only stands for its subclasses."""
        super().__init_subclass__()
        if not abstract:
            Config.kinds[cls.kind()] = cls

    def __post_init__(self) -> None:
        hints = field_types(self.kind())
        for f in fields(self):
            value = getattr(self, f.name)
            if not fits(value, hints[f.name]):
                raise ConfigError(
                    f"{self.kind()}.{f.name} is {quote_repr(value)}, but must be {describe(hints[f.name])}"
                )
        self.check()

    @classmethod
    def kind(cls) -> str:
        return cls.__name__.removesuffix("Config")

    def check(self) -> None:
        """Raise `ConfigError` if the fields do not fit together. Their types are checked already."""

    def require_positive(self, *names: str) -> None:
        """Raise unless each named field is None or a finite number above 0."""
        for name in names:
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{self.kind()}.{name} is {value}, but must be positive")

    def require_share(self, *names: str) -> None:
        """Raise unless each named field is at least 0 and below 1."""
        for name in names:
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{self.kind()}.{name} is {getattr(self, name)}, but must be at least 0 and below 1")

    def __str__(self) -> str:
        """The tree, one line for each node that contains others. A node without children is one line."""
        return "\n".join(tree_lines(self))

    def _repr_html_(self) -> str:
        """The tree, for notebooks."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """The config as plain data with its `kind`, as it is saved in JSON."""
        return {"kind": self.kind()} | {f.name: plain(getattr(self, f.name)) for f in fields(self)}

    def with_value(self: C, path: str, value: Any) -> C:
        """A copy with another value at a dotted path, such as `stack.pattern.0.mixer.heads`."""
        return self.with_values({path: value})

    def with_values(self: C, values: Mapping[str, Any]) -> C:
        """A copy with several values changed at once; only the result is checked."""
        return put(self, [(path.split("."), value, path) for path, value in values.items()])


def tree_lines(config: Config, name: str = "") -> list[str]:
    """`name: Kind(fields that are not the default)`, then the lines of each child, indented."""
    plain_fields, children = [], []
    for f in fields(config):
        value = getattr(config, f.name)
        nodes = value if isinstance(value, tuple) else (value,)
        long = len(nodes) > 1 or any(isinstance(n, Config) and (has_children(n) or len(str(n)) > 40) for n in nodes)
        if long and all(isinstance(node, Config) for node in nodes):
            names = [f"{f.name}.{i}" for i in range(len(nodes))] if isinstance(value, tuple) else [f.name]
            children += list(zip(names, nodes, strict=True))
            continue
        if f.default is MISSING or value != f.default:
            plain_fields.append(f"{f.name}={value}" if isinstance(value, Config) else f"{f.name}={value!r}")
    lines = [f"{name}: " * bool(name) + f"{config.kind()}({', '.join(plain_fields)})"]
    for child, node in children:
        lines += [f"  {line}" for line in tree_lines(node, child)]
    return lines


def has_children(config: Config) -> bool:
    """Whether a field of the config is a config itself."""
    return any(isinstance(getattr(config, f.name), Config | tuple) for f in fields(config))


@dataclass(frozen=True, kw_only=True)
class Part(Config):
    """A config of something that computes: it can say its steps and, through them, its weights.

    >>> LayerNormConfig().weights(8)
    {'weight': (8,), 'bias': (8,)}
    >>> LayerNormConfig().count_parameters(8)
    16
    """

    traceable: ClassVar[bool] = False
    """Whether forward is the same graph for every text, whatever its length: then ONNX can hold it."""

    def steps(self, scope: Scope) -> Iterator[Step]:
        """What this part computes, in order, with the weights that each step owns."""
        return iter(())

    def count_parameters(self, dim: int = 0) -> int:
        """The number of parameters, in closed form: repeated blocks are counted once and multiplied."""
        steps = self.steps(replace(ONE, folded=True).with_sizes(D=dim))
        return sum(step.parameters * step.copies for step in steps)

    def weights(self, dim: int = 0) -> dict[str, Shape]:
        """Names and shapes of the part's weights in a model of width `dim`; whole models know their own width."""
        steps = self.steps(ONE.with_sizes(D=dim))
        return {name: shape for step in steps for name, shape in step.weights.items()}

    def state(self, scope: Scope) -> dict[str, Shape]:
        """Names and shapes of what decoding keeps between two tokens; nothing by default."""
        return {}

    def resolve(self: P, dim: int = 0) -> P:
        """The same part with every default written out, so that two ways to describe one computation become equal.

        A part whose defaults depend on the width overrides this; here the parts inside it are resolved.
        """

        def resolve(value: Any) -> Any:
            if isinstance(value, tuple):
                return tuple(map(resolve, value))
            return value.resolve(dim) if isinstance(value, Part) else value

        return replace(self, **{f.name: resolve(getattr(self, f.name)) for f in fields(self)})


def plain(value: Any) -> Any:
    if isinstance(value, Config):
        return value.to_dict()
    if isinstance(value, tuple):
        return [plain(item) for item in value]
    return value


def dumps(config: Config) -> str:
    """The text of `clearhead.json`.

    >>> print(dumps(Window(3)), end="")
    {
      "kind": "Window",
      "size": 3
    }
    """
    return json.dumps(config.to_dict(), indent=2) + "\n"


def loads(text: str) -> Config:
    """The config in the text of a `clearhead.json`. An unknown kind or field is an error that names the known ones.

    >>> loads('{"kind": "Window", "size": 3}')
    Window(size=3)
    """
    try:
        return from_json(decode_json(text, "the config", Any))
    except JSONError as error:
        raise ConfigError(str(error)) from None


def from_json(data: Any) -> Config:
    """The config in decoded JSON."""
    config = parse(data, "config")
    if not isinstance(config, Config):
        raise ConfigError(f"config is {quote_repr(data)}, but must be an object with a 'kind'")
    return config


def read(path: Path) -> Config:
    """The config in a file. Error messages name the file.

    >>> import tempfile, pathlib
    >>> path = pathlib.Path(tempfile.mkdtemp(), "mask.json")
    >>> _ = path.write_text(dumps(Window(3)))
    >>> read(path)
    Window(size=3)
    """
    data = read_json(path, Any)
    try:
        return from_json(data)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse(data: Any, where: str) -> Any:
    """JSON data -> configs, tuples and plain values."""
    if isinstance(data, list):
        return tuple(parse(item, f"{where}.{i}") for i, item in enumerate(data))
    if not isinstance(data, dict):
        return data
    if "kind" not in data:
        raise ConfigError(f"{where} has no 'kind', the name of its class without \"Config\", such as SequenceModel")
    kind = data["kind"]
    if not isinstance(kind, str) or kind not in Config.kinds:
        raise ConfigError(f"{where} has the unknown kind {quote_repr(kind)}{nearest(kind, Config.kinds)}")
    cls = Config.kinds[kind]
    names = {f.name for f in fields(cls)}
    values = {}
    for key, value in data.items():
        if key == "kind":
            continue
        if key not in names:
            raise ConfigError(f"{where}: {kind} has no field {quote_repr(key)}{nearest(key, names)}")
        values[key] = parse(value, f"{where}.{key}")
    required = {f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING}
    if missing := sorted(required - values.keys()):
        raise ConfigError(f"{where}: {kind} needs {', '.join(missing)}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


Change = tuple[list[str], Any, str]
"""What is left of a dotted path, the value, and the whole path."""


def put(node: Any, changes: list[Change]) -> Any:
    """A copy of a config, of a tuple or of a value, with every change in it; it is checked once, when all are made."""
    inside: dict[str, list[Change]] = {}
    for path, value, whole in changes:
        if path:
            inside.setdefault(path[0], []).append((path[1:], value, whole))
        else:
            node = parse(value, whole)
    for key, ((_, _, whole), *_) in inside.items():
        if isinstance(node, tuple):
            if not key.isdigit() or int(key) >= len(node):
                raise ConfigError(f"{whole}: {key!r} is not one of the places 0 to {len(node) - 1}")
        elif not isinstance(node, Config):
            raise ConfigError(f"{whole}: {quote_repr(node)} has no fields, so no {key!r}")
        elif key not in (names := {f.name for f in fields(node)}):
            raise ConfigError(f"{whole}: {node.kind()} has no field {key!r}{nearest(key, names)}")
    if isinstance(node, tuple):
        return tuple(put(item, inside.get(str(i), [])) for i, item in enumerate(node))
    return replace(node, **{key: put(getattr(node, key), some) for key, some in inside.items()}) if inside else node


def nearest(word: object, known: Iterable[str]) -> str:
    """`; did you mean 'heads'? Known: …` for an error message."""
    names = sorted(known)
    close = difflib.get_close_matches(str(word), names, n=1, cutoff=0.5)
    return (f"; did you mean {close[0]!r}?" if close else ";") + f" Known: {', '.join(names)}"


@cache
def field_types(kind: str) -> dict[str, Any]:
    return typing.get_type_hints(Config.kinds[kind])


def alternatives(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def fits(value: Any, annotation: Any) -> bool:
    """Whether a field's value is of its declared type; a whole number is a float, a bool is not a number."""
    for option in alternatives(annotation):
        origin = typing.get_origin(option)
        if origin is Literal:
            if value in typing.get_args(option):
                return True
        elif origin is tuple:
            item = typing.get_args(option)[0]
            if isinstance(value, tuple) and all(fits(v, item) for v in value):
                return True
        elif isinstance(value, bool):
            if option is bool:
                return True
        elif isinstance(value, (int, float) if option is float else option):
            return True
    return False


def is_abstract(cls: type[Config]) -> bool:
    return Config.kinds.get(cls.kind()) is not cls


def describe(annotation: Any) -> str:
    def word(option: Any) -> str:
        origin = typing.get_origin(option)
        if origin is Literal:
            return " or ".join(map(repr, typing.get_args(option)))
        if origin is tuple:
            return f"a tuple of {describe(typing.get_args(option)[0])}"
        names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "None"}
        if option in names:
            return names[option]
        known = (kind for kind, cls in Config.kinds.items() if issubclass(cls, option) and is_abstract(option))
        return " or ".join(known) or option.kind()

    return " or ".join(map(word, alternatives(annotation)))
