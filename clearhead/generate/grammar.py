"""Structured output: only tokens that keep the text within a JSON schema or a regular expression are allowed.

llguidance compiles the grammar and computes, before each token, which tokens may come next.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.configs import LMHeadConfig
from clearhead.extras import install_command
from clearhead.tokenize import Tokenizer

if TYPE_CHECKING:
    from .complete import TextGenerator


class GrammarError(ValueError):
    """The schema or expression is not supported, or the tokenizer cannot be used with grammars."""


class Grammar:
    """A compiled grammar for one tokenizer. `matcher` follows one text."""

    def __init__(self, tokenizer: Tokenizer, source: str, vocabulary: int, ends: tuple[int, ...]) -> None:
        llguidance = import_llguidance()
        self.tokens = load_tokens(tokenizer.json, vocabulary, ends)
        self.source, self.vocabulary, self.ends = source, vocabulary, ends
        if problem := llguidance.LLMatcher.validate_grammar(source, self.tokens):
            raise GrammarError(f"this grammar is not supported: {problem}")

    @classmethod
    def from_schema(cls, tokenizer: Tokenizer, schema: Any, vocabulary: int, ends: tuple[int, ...]) -> Grammar:
        """Text that is JSON and fits a JSON schema; True fits any JSON."""
        llguidance = import_llguidance()
        compact = {"whitespace_flexible": False}  # otherwise a small model writes blanks forever
        try:
            source = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema), defaults=compact)
        except ValueError as error:
            raise GrammarError(f"this JSON schema is not supported: {error}") from None
        return cls(tokenizer, source, vocabulary, ends)

    @classmethod
    def from_regex(cls, tokenizer: Tokenizer, regex: str, vocabulary: int, ends: tuple[int, ...]) -> Grammar:
        """Text that matches a regular expression as a whole."""
        return cls(tokenizer, import_llguidance().LLMatcher.grammar_from_regex(regex), vocabulary, ends)

    def matcher(self) -> Matcher:
        return Matcher(self)


class Matcher:
    """The state of a grammar after the tokens of one text."""

    def __init__(self, grammar: Grammar) -> None:
        llguidance = import_llguidance()
        self.grammar, self.inner = grammar, llguidance.LLMatcher(grammar.tokens, grammar.source)

    def mask(self, logits: Float[Tensor, "V"]) -> Float[Tensor, "V"]:
        """The logits with −∞ for every token that the grammar forbids. A complete text may only end."""
        bits = np.frombuffer(self.inner.compute_bitmask(), np.uint8)
        if problem := self.inner.get_error():
            raise GrammarError(f"the grammar failed: {problem}")
        allowed = torch.from_numpy(np.unpackbits(bits, bitorder="little")[: len(logits)].astype(bool)).to(logits.device)
        if not bool(allowed.any()):
            allowed[list(self.grammar.ends)] = True
        return logits.masked_fill(~allowed, -torch.inf)

    def accept(self, token: int) -> None:
        self.inner.consume_token(token)


def read_grammar(generator: TextGenerator, schema_file: str | None, regex: str | None) -> Grammar:
    """The grammar of a schema file or of an expression."""
    head, tokenizer = generator.model.config.head, generator.tokenizer
    if tokenizer is None or not isinstance(head, LMHeadConfig):
        raise GrammarError("structured output needs a language model with a tokenizer")
    if schema_file is not None and regex is not None:
        raise GrammarError("give --json-schema or --regex, not both")
    if regex is not None:
        return Grammar.from_regex(tokenizer, regex, head.vocabulary, generator.config.ends)
    assert schema_file is not None
    try:
        schema = json.loads(Path(schema_file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise GrammarError(f"cannot read the JSON schema in {schema_file}: {error}") from None
    return Grammar.from_schema(tokenizer, schema, head.vocabulary, generator.config.ends)


def import_llguidance() -> Any:
    try:
        import llguidance
    except ModuleNotFoundError:
        raise GrammarError(f"structured output needs llguidance: {install_command('grammar')}") from None
    return llguidance


@lru_cache(maxsize=4)
def load_tokens(source: str, vocabulary: int, ends: tuple[int, ...]) -> Any:
    """The tokenizer as llguidance reads it, from the text of tokenizer.json."""
    if not ends:
        raise GrammarError("structured output needs a model with an end token")
    llguidance = import_llguidance()
    try:
        return llguidance.LLTokenizer(source, n_vocab=vocabulary, eos_token=list(ends))
    except ValueError:  # a decoder that llguidance does not know: give it the bytes of every token
        table = llguidance.TokenizerWrapper(TokenTable(source, vocabulary, ends))
        return llguidance.LLTokenizer(table, n_vocab=vocabulary, eos_token=list(ends))


class TokenTable:
    """The bytes of every token, in the form that llguidance's `TokenizerWrapper` reads."""

    def __init__(self, source: str, vocabulary: int, ends: tuple[int, ...]) -> None:
        self.inner = tokenizers.Tokenizer.from_str(source)
        self.eos_token_id, self.bos_token_id = ends[0], None
        specials = {id for id, added in self.inner.get_added_tokens_decoder().items() if added.special}
        self.special_token_ids = sorted(specials | set(ends))
        texts = [self.inner.decode([id], skip_special_tokens=False) for id in range(vocabulary)]
        self.tokens = [text.encode() for text in texts]

    def __call__(self, text: bytes | str) -> list[int]:
        return self.inner.encode(text.decode() if isinstance(text, bytes) else text, add_special_tokens=False).ids
