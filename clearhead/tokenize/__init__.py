"""Convert text to token ids and back: byte pairs, characters, bytes, or any `tokenizer.json`. Needs no torch."""

from . import gguf, older  # noqa: F401  they add their formats to Tokenizer.load
from .make import make
from .tokenizer import MASK, Tokenizer, TokenizerError

__all__ = ["MASK", "Tokenizer", "TokenizerError", "make"]
