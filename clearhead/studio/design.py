"""Compose an architecture: the tree of a config with a control for each field, and what it costs."""

from __future__ import annotations

import typing
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from typing import Any

from clearhead.configs import ConfigError, EncoderDecoderConfig, LMHeadConfig, dumps
from clearhead.configs.base import Config, alternatives, field_types, is_abstract
from clearhead.inspect.questions import Answer, QuestionError, Session, question
from clearhead.measure.cost import cost
from clearhead.measure.trace import trace
from clearhead.models.presets import PRESETS, preset

LENGTHS = (64, 256, 1024, 4096, 16384)  # of the curve of growth
USUAL: dict[str, Any] = {
    "heads": 4, "kv_heads": 2, "vocabulary": 1000, "length": 2048, "size": 64, "window": 64, "experts": 8, "active": 2,
    "features": 64, "rank": 64, "base": 10000.0, "factor": 4.0, "block": 16, "projection": 64, "kernel": 3,
}  # fmt: skip
"""What a field without a default starts with when its part is chosen."""


@question
def presets(session: Session, arguments: Mapping[str, Any]) -> Answer:
    return {"presets": list(PRESETS)}


@question
def design(session: Session, arguments: Mapping[str, Any]) -> Answer:
    """A preset with changes: its tree, cost and shapes."""
    name, changes = str(arguments.get("preset", "tiny-llama")), dict(arguments.get("changes", {}))
    config: Any = preset(name)
    if changes:
        config = config.with_values(changes)
    length, batch = max(1, int(arguments.get("length", 128))), max(1, int(arguments.get("batch", 1)))
    try:
        numbers, steps = cost(config, length=length, batch=batch), trace(config, length=length).steps
    except ConfigError as error:  # a model of images has a length of its own
        if "length" not in str(error):
            raise QuestionError(str(error)) from None
        numbers, steps = cost(config, batch=batch), trace(config).steps
    first = [step for step in steps if ".blocks." not in step.name or ".blocks.0." in step.name]
    code = [f"config = clearhead.preset({name!r})"]
    if changes:
        code.append(f"config = config.with_values({changes!r})")
    opening = "import clearhead\n\n" + "\n".join(code)
    total = f"\nprint(clearhead.cost(config, length={numbers.length}, batch={batch}).parameters.total)"
    by_length = f"""
for length in {LENGTHS}:
    print(length, clearhead.cost(config, length=length).flops.by_part)"""
    shapes = f"""
for step in clearhead.trace(config, length={numbers.length}).steps:
    print(step.name, list(step.shape))"""
    return {
        "tree": tree(config, "", "", type(config)),
        "cost": numbers.to_dict(),
        "growth": list(growth(config)),
        "trains": isinstance(config, EncoderDecoderConfig) or isinstance(config.head, LMHeadConfig),
        "steps": [
            {
                "name": step.name,
                "formula": step.formula,
                "shape": list(step.shape),
                "parameters": step.parameters,
                "flops": step.flops,
            }
            for step in first
        ],
        "json": dumps(config),
        "python": opening + total,
        "growth_python": opening + by_length,
        "shapes_python": opening + shapes,
    }


def growth(config: Any) -> Iterator[Answer]:
    """FLOPs of a forward pass by length, in all and by part."""
    curves: dict[str, list[list[float]]] = {}
    for length in LENGTHS:
        try:
            flops = cost(config, length=length).flops
        except ConfigError:  # longer than its positions
            continue
        for part, value in {"total": flops.forward, **flops.by_part}.items():
            if value:
                curves.setdefault(part, []).append([length, value])
    for part, points in curves.items():
        yield {"name": part, "points": points}


def tree(node: Config | None, path: str, name: str, annotation: Any) -> Answer:
    """A node of the config: the kinds that may stand in its place, its own fields, and its children."""
    answer: Answer = {"path": path, "name": name, "kind": "" if node is None else node.kind(), "fields": []}
    answer["kinds"] = [] if not path else [[kind, value] for kind, value in kinds_for(node, annotation)]
    children = []
    for each in fields(node) if node is not None else ():
        value, place = getattr(node, each.name), f"{path}.{each.name}".lstrip(".")
        hint = field_types(typing.cast(Config, node).kind())[each.name]
        if isinstance(value, tuple) and any(isinstance(item, Config) for item in value):
            children += [tree(item, f"{place}.{n}", f"{each.name} {n}", type(item)) for n, item in enumerate(value)]
        elif isinstance(value, Config) or (value is None and config_types(hint)):
            children.append(tree(value, place, each.name, hint))
        elif (control := describe(value, hint)) is not None:
            answer["fields"].append({"path": place, "name": each.name, "value": value} | control)
    return answer | {
        "children": [child for child in children if child["kinds"] or child["fields"] or child["children"]]
    }


def describe(value: Any, hint: Any) -> Answer | None:
    """The control of a number, a word or a switch."""
    options = alternatives(hint)
    words = [
        word for option in options if typing.get_origin(option) is typing.Literal for word in typing.get_args(option)
    ]
    if words and (value is None or isinstance(value, str)):
        return {"type": "text", "choices": words}
    if bool in options and (isinstance(value, bool) or value is None):
        return {"type": "boolean"}
    if int in options or float in options:
        return {"type": "number" if float in options else "integer", "optional": type(None) in options}
    return None


def config_types(hint: Any) -> list[type[Config]]:
    """The concrete configs that may stand in a field."""
    named = [option for option in alternatives(hint) if isinstance(option, type) and issubclass(option, Config)]
    return [
        kind
        for kind in Config.kinds.values()
        if not is_abstract(kind)
        and any(issubclass(kind, option) for option in named)
        and kind.__module__.startswith("clearhead.")
    ]


def kinds_for(node: Config | None, hint: Any) -> Iterator[tuple[str, Any]]:
    """The kinds that fit a place, each with a value to start from; a kind that cannot be made is left out."""
    if type(None) in alternatives(hint):
        yield "", None
    for kind in config_types(hint):
        if type(node) is kind:
            yield kind.kind(), node.to_dict()
        elif (made := start_value(kind, node)) is not None:
            yield kind.kind(), made.to_dict()


def start_value(kind: type[Config], node: Config | None) -> Config | None:
    """A part of another kind: fields of the same name carry over, others get their default or a usual value."""
    given: dict[str, Any] = {}
    for each in fields(kind):
        if node is not None and hasattr(node, each.name):
            given[each.name] = getattr(node, each.name)
        elif each.default is MISSING and each.default_factory is MISSING:
            given[each.name] = node if each.name == "expert" else USUAL.get(each.name, getattr(node, "hidden", 128))
    try:
        return kind(**given)
    except (ConfigError, TypeError, ValueError):
        return None
