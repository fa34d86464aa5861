"""Every field of `config.json` that the code reads has a type, and a wrong type is one sentence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import clearhead
from clearhead.models import convert
from clearhead.models.convert.fields import FIELDS, ROPE_FIELDS
from clearhead.typed_json import JSONError, decode_json, quote, read_json

FOLDER = Path(convert.__file__).parent
READ = re.compile(r"\b(hf|rope)(?:\[|\.get\()\"(\w+)\"")


def test_every_field_that_is_read_has_a_type() -> None:
    used = {found for path in FOLDER.glob("*.py") for found in READ.findall(path.read_text())}
    assert len(used) > 50
    missing = {f"{where}: {name}" for where, name in used if name not in (FIELDS if where == "hf" else ROPE_FIELDS)}
    assert not missing


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("num_hidden_layers", "2", "a whole number"),
        ("num_hidden_layers", 10**30, "a whole number"),
        ("num_hidden_layers", [2], "a whole number"),
        ("rms_norm_eps", {}, "a number"),
        ("rope_parameters", "default", "an object"),
        ("architectures", "LlamaForCausalLM", "a list"),
        ("eos_token_id", [None], "a whole number"),
        ("eos_token_id", 2**31, "below|at most|<"),
        ("hidden_act", 3, "a text"),
    ],
)
def test_a_wrong_type_names_file_key_value_and_type(tmp_path: Path, field: str, value: Any, expected: str) -> None:
    clearhead.build(clearhead.preset("tiny-llama")).save(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))
    with pytest.raises(JSONError, match=expected) as caught:
        clearhead.load(tmp_path)
    assert str(path) in str(caught.value)
    assert field in str(caught.value)


@pytest.mark.parametrize(
    ("text", "kind", "sentence"),
    [
        ('{"a": "x"}', dict[str, int], 'f.json: a is "x", but must be a whole number'),
        ("[1]", dict[str, Any], "f.json: it holds [1], but must be an object"),
        ('{"a": [1, null]}', dict[str, list[int]], "f.json: a[1] is null, but must be a whole number"),
        ("[" * 100_000, list, "f.json is nested deeper than 64 levels"),
        ("[" * 65 + "]" * 65, list, "f.json is nested deeper than 64 levels"),
        (b"\xff", list, "f.json is not UTF-8: invalid start byte at byte 0"),
        ('"\\ud800"', str, "f.json contains half of a surrogate pair, which is not a character"),
        ("9" * 5000, int, "f.json: it holds Infinity, but must be a whole number"),
    ],
)
def test_what_cannot_be_read_is_one_sentence(text: str | bytes, kind: Any, sentence: str) -> None:
    with pytest.raises(JSONError) as caught:
        decode_json(text, "f.json", kind)
    assert str(caught.value) == sentence


def test_values_come_back_unchanged(tmp_path: Path) -> None:
    data = {"model_max_length": 1000000000000000019884624838656, "limit": [0.0, 1e300], "nested": {"a": None}}
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data))
    assert read_json(path) == data


def test_quotes_are_short_and_printable() -> None:
    assert len(quote("x" * 1000)) == 80
    assert quote(["x"] * 1000) == "a list of 1,000 items"
    assert "\x1b" not in quote({"\x1b[31m": 1})
