"""Ways to damage a file: values of wrong types in JSON, and bytes changed, cut or inserted."""

from __future__ import annotations

import json
import random
from typing import Any

ODD: list[Any] = [
    None, True, False, 0, -1, 1, 2, 3, 7, 2**31, 2**63, 2**64, 10**30, -(10**30), 0.5, -0.0, 1e308, float("nan"),
    float("inf"), "", "x", "12", "[bold]red[/]", "[/nope]", "\x1b[31m", "\0", "../../etc", "a" * 5000, "\ud800",
    [], [[]], [None], [1, "x"], {}, {"a": {}}, {"kind": "x"}, {"kind": "Stack"}, {"content": 3}, [{}] * 3,
]  # fmt: skip


def mutate(data: bytes, rng: random.Random, is_json: bool) -> bytes:
    if is_json and rng.random() < 0.8:
        try:
            return mutate_json(data, rng)
        except ValueError:
            pass
    return mutate_bytes(data, rng)


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    lines = data.decode().splitlines()
    try:
        tree = json.loads(data)
    except ValueError:  # lines of JSON
        number = rng.randrange(len(lines))
        lines[number] = dump(change(json.loads(lines[number]), rng))
        return "\n".join(lines).encode()
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        tree = change(tree, rng)
    return dump(tree).encode("utf-8", "surrogatepass")


def dump(tree: Any) -> str:
    return json.dumps(tree)


def change(tree: Any, rng: random.Random) -> Any:
    """A copy with one odd value, one key fewer, one more, or a deep nest somewhere."""
    if isinstance(tree, dict) and tree and rng.random() < 0.9:
        key = rng.choice(list(tree))
        kind = rng.random()
        if kind < 0.1:
            return {name: value for name, value in tree.items() if name != key}
        if kind < 0.15:
            return tree | {rng.choice(("x", "", "[b]", "\x1b")): odd(rng)}
        return tree | {key: change(tree[key], rng)}
    if isinstance(tree, list) and tree and rng.random() < 0.8:
        at = rng.randrange(len(tree))
        return [*tree[:at], change(tree[at], rng), *tree[at + 1 :]]
    return odd(rng)


def odd(rng: random.Random) -> Any:
    if rng.random() < 0.05:
        deep: Any = 1
        for _ in range(rng.choice((70, 500, 900))):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        return deep
    return rng.choice(ODD)


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    kind = rng.random()
    if kind < 0.25:
        return bytes(out[: rng.randrange(len(out) + 1)])
    if kind < 0.35:
        return rng.randbytes(rng.randrange(200))
    for _ in range(rng.choice((1, 2, 8, 64))):
        at = rng.randrange(min(len(out), 4096) if rng.random() < 0.7 else len(out)) if out else 0
        if kind < 0.8 and out:
            out[at] = rng.randrange(256)
        else:
            out[at:at] = rng.randbytes(rng.randrange(1, 9))
    return bytes(out)
