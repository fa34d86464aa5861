"""Marian's tokenizer: one SentencePiece model for the source, one for the target, and a shared table of ids."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from shutil import copyfile
from typing import Annotated, Any

import tokenizers
from msgspec import Meta

from clearhead.files import write_atomically
from clearhead.typed_json import read_json

from .pieces import SPACE, Pieces, from_pieces, read_pieces
from .tokenizer import Tokenizer, TokenizerError

SOURCE, TARGET, TABLE = "source.spm", "target.spm", "vocab.json"
Id = Annotated[int, Meta(ge=0, lt=2**31)]
LANGUAGE = re.compile(r">>.*?<<")


class MarianTokenizer(Tokenizer):
    """Encode the source language with `encode` and the target language with `encode_target`.

    `decode` works for both, because they share one table of ids. A source text may start with the code of its target
    language: `>>fra<< Good morning`.
    """

    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        try:
            self.ids: dict[str, int] = read_json(folder / TABLE, dict[str, Id])
        except OSError as error:
            raise TokenizerError(f"cannot read the tokenizer {folder / TABLE}: {error.strerror}") from None
        self.folder = folder
        self.source, self.target = (only_text(read_pieces(folder / name)) for name in (SOURCE, TARGET))
        self.names = {id: name for name, id in self.ids.items()}
        special = ("unk_token", "<unk>"), ("eos_token", "</s>"), ("pad_token", "<pad>")
        self.special = [settings.get(key) or name for key, name in special]
        if self.special[0] not in self.ids:
            raise TokenizerError(f"{folder / TABLE} has no id for {self.special[0]}, the unknown token")
        super().__init__(self.source, settings)

    @property
    def vocabulary(self) -> int:
        return max(self.names) + 1

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [self.piece_ids(text, self.source) for text in texts]

    def prompt(self, text: str, *, around: bool = True) -> list[int]:
        """Encode a source text in the form the model was trained on, with `</s>` at the end."""
        return [*self.encode(text), *([self.end] if around and self.end is not None else [])]

    def encode_source(self, text: str) -> list[int]:
        return self.prompt(text)

    def with_end(self) -> Tokenizer:
        raise TokenizerError(
            f"{self.folder} has a tokenizer for each language, and a model learns by one for both; train from nothing, "
            "or from a model with a tokenizer.json"
        )

    def encode_target(self, text: str) -> list[int]:
        """Encode a text in the target language, for training or scoring."""
        return self.piece_ids(text, self.target)

    def name(self, id: int) -> str | None:
        return self.names.get(id)

    @cached_property
    def specials(self) -> frozenset[int]:
        return frozenset(self.ids[name] for name in self.special if name in self.ids)

    def piece_ids(self, text: str, model: tokenizers.Tokenizer) -> list[int]:
        """Split a text into pieces with `model` and look up their ids. A piece without an id becomes `<unk>`."""
        found = LANGUAGE.match(text)
        code = [found[0]] if found else []
        pieces = model.encode(text[found.end() :] if found else text, add_special_tokens=False).tokens
        unknown = self.ids[self.special[0]]
        return [self.ids.get(piece, unknown) for piece in [*code, *pieces]]

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        pieces = [self.names.get(id, self.special[0]) for id in ids]
        shown = [piece for piece in pieces if not (skip_special_tokens and piece in self.special)]
        return "".join(shown).replace(SPACE, " ").strip()

    def save(self, folder: str | Path) -> None:
        """Save the three files and `tokenizer_config.json` in the form that transformers reads."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name in (SOURCE, TARGET, TABLE):
            if Path(folder, name).resolve() != (self.folder / name).resolve():
                copyfile(self.folder / name, Path(folder, name))
        settings = {"tokenizer_class": "MarianTokenizer"} | self.settings
        write_atomically(Path(folder, "tokenizer_config.json"), json.dumps(settings, indent=2) + "\n")

    @cached_property
    def alphabet(self) -> None:
        return None

    def _end(self) -> int | None:
        return self.ids.get(self.special[1])


def only_text(pieces: Pieces) -> tokenizers.Tokenizer:
    """Build a tokenizer that treats `</s>` in a text as ordinary characters."""
    inner = from_pieces(pieces)
    inner.encode_special_tokens = True
    return inner
