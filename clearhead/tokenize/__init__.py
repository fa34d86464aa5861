"""Text to numbers and back: byte pairs, characters, bytes, or any `tokenizer.json`. No torch."""

from .make import make
from .tokenizer import MASK, Tokenizer, TokenizerError

__all__ = ["MASK", "Tokenizer", "TokenizerError", "make"]
