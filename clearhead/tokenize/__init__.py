"""Text to numbers and back: byte pairs, characters, bytes, or any `tokenizer.json`. No torch."""

from .make import make
from .tokenizer import Tokenizer, TokenizerError

__all__ = ["Tokenizer", "TokenizerError", "make"]
