"""Read JSON that another program wrote.

A reader gets values of the types it asked for, or a `JSONError`: one sentence with the file, the key, the value and the
expected type. Files that are too large or nested too deeply are refused, and a whole number beyond 64 bits becomes a
float, so that no field declared `int` can hold one.
"""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

MAX_BYTES = 2**30  # the largest vocabulary in use takes 35 MB
MAX_DEPTH = 64
QUOTED = 80  # characters of a value that a message shows
INT64 = range(-(2**63), 2**63)
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")  # not \t, \n
TYPE_WORDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "true or false",
    "null": "null",
    "array": "a list",
    "object": "an object",
}


class JSONError(ValueError):
    """Outside JSON that cannot be used; the message names the file, the key, the value and the expected type."""


def read_json(path: Path, kind: type[T] | Any = dict[str, Any]) -> T | Any:
    """The contents of a JSON file, checked to be of type `kind`.

    `kind` is any type that msgspec knows: `dict[str, int]`, a dataclass, a `TypedDict`. A dataclass is constructed;
    plain types come back unchanged.

    >>> read_json(Path("vocab.json"), dict[str, int])  # doctest: +SKIP
    {'<unk>': 0, '<s>': 1}
    """
    if path.exists() and not path.is_file():
        raise JSONError(f"{path} is not a file")
    size = path.stat().st_size
    if size > MAX_BYTES:
        raise JSONError(f"{path} has {size:,} bytes; JSON files are read up to {MAX_BYTES:,} bytes")
    return decode_json(path.read_bytes(), str(path), kind)


def decode_json(text: str | bytes, name: str, kind: type[T] | Any = dict[str, Any]) -> T | Any:
    """Parse and check JSON text as `read_json` does a file; errors call it `name`."""
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        data = json.loads(text, parse_int=parse_int)
        if HALF_PAIR.search(text):
            json.dumps(data, ensure_ascii=False).encode()
    except RecursionError:
        raise JSONError(f"{name} is nested deeper than {MAX_DEPTH} levels") from None
    except UnicodeDecodeError as error:
        raise JSONError(f"{name} is not UTF-8: {error.reason} at byte {error.start:,}") from None
    except UnicodeEncodeError:
        raise JSONError(f"{name} contains half of a surrogate pair, which is not a character") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno:,}, " if error.lineno > 1 else ""
        raise JSONError(f"{name} is not JSON: {error.msg} at {line}column {error.colno:,}") from None
    check_depth(data, name)
    return check_type(data, kind, name)


def check_type(value: Any, kind: type[T] | Any, name: str, key: str = "") -> T | Any:
    """`value` as a `kind`; `key` is its place in the file `name`."""
    if typing.get_origin(kind) is dict and isinstance(value, dict):
        _, item = typing.get_args(kind)  # msgspec does not name the key of a dict's value
        return {word: check_type(one, item, name, join_keys(key, word)) for word, one in value.items()}
    if kind is Any:
        return value
    try:
        return msgspec.convert(value, kind, str_keys=True)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at `")
        place = path.rstrip("`").removeprefix("$").lstrip(".")
        found, place = follow(value, place)
        where = join_keys(key, place)
        raise JSONError(f"{name}: {where + ' is ' if where else 'it holds '}{describe(found, problem)}") from None


def check_fields(data: Mapping[str, Any], kinds: Mapping[str, Any], name: str) -> None:
    """Check the fields of an object that have a type in `kinds`; others may hold anything."""
    for key in data.keys() & kinds.keys():
        check_type(data[key], kinds[key], name, key)


def check_depth(data: Any, name: str) -> None:
    level = [data] if isinstance(data, dict | list) else []
    for _ in range(MAX_DEPTH):
        children = (child for node in level for child in (node.values() if isinstance(node, dict) else node))
        level = [child for child in children if isinstance(child, dict | list)]
        if not level:
            return
    raise JSONError(f"{name} is nested deeper than {MAX_DEPTH} levels")


def parse_int(digits: str) -> int | float:
    """A whole number of at most 64 bits; a larger one as a float (`model_max_length` is often 10³⁰)."""
    if len(digits) < 19 or (len(digits) < 21 and int(digits) in INT64):
        return int(digits)
    return float(digits)


def follow(value: Any, place: str) -> tuple[Any, str]:
    """The value at a path such as `shards[3].tokens`, and as much of the path as could be followed."""
    done = ""
    for word, index in re.findall(r"([^.\[\]]+)|\[(\d+|\.\.\.)\]", place):
        try:
            value = value[int(index)] if index else value[word]
        except (LookupError, TypeError, ValueError):
            break
        done = f"{done}[{index}]" if index else join_keys(done, word)
    return value, done


def join_keys(key: str, more: str) -> str:
    return quote_text(key + more if more.startswith("[") else f"{key}.{more}".strip("."))


def describe(value: Any, problem: str) -> str:
    """`"x", but must be a whole number`, from msgspec's sentence."""
    if missing := re.fullmatch(r"Object missing required field `(.+)`", problem):
        return f"an object without the field {missing[1]!r}"
    expected = re.match(r"Expected `([^`]+)`(.*?)(, got .*)?$", problem)
    if expected is None:
        return f"{quote(value)}: {problem}"
    kinds = [TYPE_WORDS.get(word, word) for word in expected[1].split(" | ")]
    limit = expected[2].replace(" >= ", " of at least ").replace(" <= ", " of at most ").replace(" > ", " above ")
    return f"{quote(value)}, but must be {' or '.join(kinds)}{limit}"


def quote(value: Any) -> str:
    """A value as JSON, cut to 80 characters."""
    if isinstance(value, dict | list) and len(value) > QUOTED:
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value):,} items"
    try:
        return quote_text(json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError, RecursionError):
        return quote_text(repr(value))


def quote_repr(value: Any) -> str:
    """A value as Python writes it, cut to 80 characters."""
    return quote_text(repr(value))


def quote_text(text: str) -> str:
    """A text cut to 80 characters, with control characters shown as escapes."""
    return escape_controls(text if len(text) <= QUOTED else text[: QUOTED - 1] + "…")


def escape_controls(text: str) -> str:
    """A text in which control characters, which could steer a terminal, are shown as escapes such as `\\x1b`."""
    return CONTROLS.sub(lambda found: ascii(found[0])[1:-1], text)
