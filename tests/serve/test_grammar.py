"""Structured output: for 50 schemas, greedy and sampled text is JSON that the schema accepts."""

from __future__ import annotations

import json
from itertools import product

import jsonschema
import pytest

from clearhead.generate.complete import TextGenerator, complete_all
from clearhead.generate.grammar import Grammar, GrammarError

from ..parity.test_chat import make_tokenizer
from .tools import small_model

LEAVES = [
    {"type": "boolean"},
    {"type": "null"},
    {"type": "integer", "minimum": 0, "maximum": 9},
    {"type": "integer", "minimum": -5, "maximum": 120},
    {"type": "string", "maxLength": 4},
    {"type": "string", "minLength": 2, "maxLength": 3},
    {"type": "string", "pattern": "^[a-c]{1,4}$"},
    {"enum": ["red", "green", "blue"]},
    {"enum": [1, "two", None]},
    {"const": "fixed"},
]


def closed(**properties: dict) -> dict:
    return {
        "type": "object",
        "properties": properties,
        "required": sorted(properties),
        "additionalProperties": False,
    }


def schemas() -> list[dict]:
    """50 schemas: leaves, arrays, objects, optional fields, alternatives, references."""
    found = [*LEAVES]
    found += [{"type": "array", "items": leaf, "minItems": 1, "maxItems": 3} for leaf in LEAVES]
    found += [closed(a=leaf) for leaf in LEAVES]
    found += [closed(a=one, b=other) for one, other in list(product(LEAVES[2:5], LEAVES[5:8]))]
    found += [closed(inner=closed(x=leaf), list={"type": "array", "items": leaf, "maxItems": 2}) for leaf in LEAVES[:5]]
    found += [{"anyOf": [closed(a=LEAVES[0]), closed(b=leaf)]} for leaf in LEAVES[2:5]]
    optional = {"type": "object", "properties": {"a": LEAVES[0], "b": LEAVES[2]}, "additionalProperties": False}
    found += [optional, optional | {"required": ["b"]}]
    found.append({"$defs": {"leaf": LEAVES[2]}, **closed(a={"$ref": "#/$defs/leaf"})})
    return found


@pytest.fixture(scope="module")
def generator() -> TextGenerator:
    tokenizer = make_tokenizer()
    return TextGenerator.of(small_model(), tokenizer, max_new_tokens=150, ends=(tokenizer.end,), temperature=0.0)


def test_every_schema_yields_valid_json(generator: TextGenerator) -> None:
    tokenizer = generator.tokenizer
    sampled = TextGenerator.of(
        generator.model, tokenizer, max_new_tokens=150, ends=generator.config.ends, temperature=1.0, seed=1
    )
    assert len(schemas()) == 50
    for schema in schemas():
        grammar = Grammar.from_schema(tokenizer, schema, tokenizer.vocabulary, generator.config.ends)
        for each in (generator, sampled):
            (found,) = complete_all(each, [each.encode("Hi")], logprobs=False, batch=1, grammar=grammar)
            assert found.reason == "end", (schema, found.text)
            jsonschema.validate(json.loads(found.text), schema)


def test_bad_grammars_are_one_sentence(generator: TextGenerator) -> None:
    tokenizer, ends = generator.tokenizer, generator.config.ends
    with pytest.raises(GrammarError, match="is not supported"):
        Grammar.from_schema(tokenizer, {"type": "nonsense"}, tokenizer.vocabulary, ends)
    with pytest.raises(GrammarError, match="is not supported"):
        Grammar.from_regex(tokenizer, "(", tokenizer.vocabulary, ends)
    with pytest.raises(GrammarError, match="needs a model with an end token"):
        Grammar.from_regex(tokenizer, "a", tokenizer.vocabulary, ())
