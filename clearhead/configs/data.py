"""What text becomes: the four ways of making tokens."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Config, ConfigError

BYTES = 256


@dataclass(frozen=True, kw_only=True)
class BytePairConfig(Config):
    """Byte-level byte-pair encoding, learned from the text: bytes, the pairs seen most often, and the end of a text.

    >>> from clearhead.tokenize import make
    >>> make(BytePairConfig(vocabulary=300), ["to be or not to be"] * 9).encode("to be")
    [257, 258]
    """

    vocabulary: int = 4096
    learn_from: int | None = 2**27  # characters, from the beginning of the text, that are counted; None: all
    space: bool = False  # a text is read as if a space were before it: its first word is the word that it is elsewhere

    def check(self) -> None:
        self.require_positive("learn_from")
        if self.vocabulary <= BYTES:
            raise ConfigError(
                f"BytePair.vocabulary is {self.vocabulary}, but must be above {BYTES}: every byte has a token, "
                f"and so has the end of a text"
            )


@dataclass(frozen=True, kw_only=True)
class CharactersConfig(Config):
    """One token for every character of the text, in the order of Unicode. There is none for the end of a text.

    >>> from clearhead.tokenize import make
    >>> make(CharactersConfig(), ["abc"]).encode("cab")
    [2, 0, 1]
    """


@dataclass(frozen=True, kw_only=True)
class BytesConfig(Config):
    """Tokens 0 to 255 are the bytes of UTF-8, 256 is the end of a text. Nothing is learned.

    >>> from clearhead.tokenize import make
    >>> make(BytesConfig(), []).encode("to")
    [116, 111]
    """


@dataclass(frozen=True, kw_only=True)
class TokenizerFileConfig(Config):
    """Any `tokenizer.json`, or a folder that holds one.

    >>> TokenizerFileConfig(path="runs/mine/tokenizer.json").path
    'runs/mine/tokenizer.json'
    """

    path: str


TokenizerConfig = BytePairConfig | CharactersConfig | BytesConfig | TokenizerFileConfig
