"""Whether two configs describe the same computation, and where they differ."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from clearhead.configs import ModelConfig, StackConfig


def differences(ours: ModelConfig, theirs: ModelConfig) -> list[str]:
    """Where two configs describe different computations. Dropout is not compared: it is not part of the function."""
    return list(compare(plain_data(ours), plain_data(theirs), ""))


def plain_data(config: ModelConfig) -> dict[str, Any]:
    """A config as plain data, every default written out, and each stack as the list of its blocks."""
    data = config.to_dict()
    for name in ("stack", "encoder", "decoder"):
        if isinstance(part := getattr(config, name, None), StackConfig):
            blocks = {block: block.resolve(part.dim).to_dict() for block in {*part.blocks}}
            places = [part.place(i) for i in range(len(part.blocks))]
            repeated = ("kind", "pattern", "repeats", "first")
            data[name] = {field: value for field, value in data[name].items() if field not in repeated} | {
                "blocks": [blocks[block] for block in part.blocks],
                "shared": None if places == [*range(len(places))] else places,
            }
    return data


def compare(a: Any, b: Any, where: str) -> Iterator[str]:
    """Describe every difference between two trees of plain data."""
    if isinstance(a, dict) and isinstance(b, dict) and a.keys() == b.keys():
        for key in (key for key in a if key != "dropout"):
            yield from compare(a[key], b[key], f"{where}.{key}" if where else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, pair in enumerate(zip(a, b, strict=True)):
            yield from compare(*pair, f"{where}.{i}")
    elif isinstance(a, float | int) and isinstance(b, float | int) and not isinstance(a, bool):
        if not math.isclose(a, b, rel_tol=1e-9):
            yield f"{where} is {a} and {b}"
    elif a != b:
        yield f"{where} is {short(a)} and {short(b)}"


def short(value: Any) -> str:
    """A value in a few words."""
    if isinstance(value, dict):
        return str(value.get("kind"))
    return f"{len(value)} parts" if isinstance(value, list) else str(value)
