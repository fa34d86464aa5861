"""A tokenizer: any kind of `tokenizer.json`, with the id of the end token."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers
import tokenizers.decoders
import tokenizers.models
import tokenizers.pre_tokenizers
import tokenizers.processors

from clearhead.files import write_atomically
from clearhead.typed_json import JSONError, check_fields, check_type, read_json

END = "<|endoftext|>"
MASK = "[MASK]"
HALF = "the text holds half of a surrogate pair, which is no character"
BYTE = re.compile("<0x[0-9A-F]{2}>")
FILES = "tokenizer.json, vocab.txt, vocab.json with merges.txt, spiece.model, sentencepiece.bpe.model, tokenizer.model"
"""Files that hold a tokenizer, for messages."""
KNOWN_ENDS = (END, "</s>", "<|end_of_text|>", "<eos>", "<|im_end|>", "[SEP]")


Special = str | dict[str, Any] | None
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(
        ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"), Special
    ),
    "chat_template": str | list[dict[str, str]] | None,
    "tokenizer_class": str | None,
    "add_bos_token": bool | None,
    "add_eos_token": bool | None,
    "add_prefix_space": bool | None,
    "do_lower_case": bool | None,
    "keep_accents": bool | None,
    "strip_accents": bool | None,
    "tokenize_chinese_chars": bool | None,
    "extra_ids": int | None,
    "added_tokens_decoder": dict[str, dict[str, Any]] | None,
}
"""The fields of `tokenizer_config.json` that are used, with their types."""


class TokenizerError(ValueError):
    """A tokenizer cannot be made or read, or it has no tokens for a text.

    >>> from clearhead.configs import CharactersConfig
    >>> try:
    ...     make(CharactersConfig(), ["abc"]).encode("x")
    ... except TokenizerError as error:
    ...     print(str(error)[:27])
    the character 'x' (U+0078),
    """


Read = Callable[[Path, dict[str, Any]], "Tokenizer | None"]
FORMATS: dict[str, Read] = {}
"""How `Tokenizer.load` reads what is no `tokenizer.json`. `gguf.py` and `older.py` add themselves when the package is
imported, because they make tokenizers and so import this module."""


def reads(name: str) -> Callable[[Read], Read]:
    """Register the reader of a format. It takes a path and the settings beside it; None: no tokenizer there."""

    def register(function: Read) -> Read:
        FORMATS[name] = function
        return function

    return register


def read_settings(path: Path) -> dict[str, Any]:
    """Read a `tokenizer_config.json`."""
    settings = read_json(path)
    check_fields(settings, SETTINGS, str(path))
    for name, value in settings.items():
        if name in SETTINGS and isinstance(value, dict):
            check_type(value.get("content"), str, str(path), f"{name}.content")
    return settings


class Tokenizer:
    """Convert text to ids and back.

    `encode` treats a text as plain text: a special token's name in it is encoded as ordinary characters. `prompt` uses
    the form the model was trained on: it recognizes special tokens and adds the ones that belong around the prompt.

    `settings` holds the `tokenizer_config.json`. Only the names of special tokens are used here; `save` keeps the rest.

    >>> from clearhead.configs import BytesConfig
    >>> tokenizer = make(BytesConfig(), [])
    >>> tokenizer.encode("to"), tokenizer.decode([98, 101])
    ([116, 111], 'be')
    """

    def __init__(self, inner: tokenizers.Tokenizer, settings: dict[str, Any] | None = None) -> None:
        inner.no_padding()
        inner.no_truncation()
        self.inner = inner
        self.settings = settings or {}
        self.end = self._end()

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """Load a `tokenizer.json`, a GGUF file, or a folder with a `tokenizer.json` or one of the older files."""
        file = Path(path)
        if file.suffix == ".gguf":
            if (inside := FORMATS["gguf"](file, {})) is None:
                raise TokenizerError(f"{file} holds a model without a tokenizer")
            return inside
        file = file / "tokenizer.json" if file.is_dir() else file
        beside = file.with_name("tokenizer_config.json")
        try:
            settings = read_settings(beside) if beside.exists() else {}
            if not file.exists():
                if (found := FORMATS["older"](file.parent, settings)) is not None:
                    return found
                raise TokenizerError(f"{file.parent} has no tokenizer: none of {FILES}")
            inner = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except (TokenizerError, JSONError):
            raise
        except OSError as error:
            raise TokenizerError(f"cannot read the tokenizer {file}: {error.strerror}") from None
        except Exception as error:  # the library raises plain Exception if it cannot parse the file
            raise TokenizerError(f"{file} is not a tokenizer.json: {error}") from None
        return cls(inner, settings)

    @classmethod
    def from_vocabulary(
        cls,
        vocabulary: Mapping[str, int],
        merges: Iterable[str | tuple[str, str]],
        *,
        specials: Sequence[str] = (END,),
        end: str | None = END,
        begin: str | None = None,
    ) -> Tokenizer:
        """A byte-level BPE tokenizer, as GPT-2 has it, from its vocabulary and merges.

        vocabulary  the id of each token, in GPT-2's characters for bytes (a space is Ġ): the contents of vocab.json
        merges      pairs in the order in which they were learned, each ("l", "o") or "l o": the lines of merges.txt
        specials    tokens that are never split; those without an id get the next free ones
        end, begin  the special tokens that end a text, and that begin every prompt

        >>> tokenizer = Tokenizer.from_vocabulary({"l": 0, "o": 1, "w": 2, "lo": 3, "low": 4}, ["l o", "lo w"])
        >>> tokenizer.encode("low"), tokenizer.decode([3, 2])
        ([4], 'low')
        """
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else tuple(merge) for merge in merges]
        if odd := next((pair for pair in pairs if len(pair) != 2 or not all(pair)), None):
            raise TokenizerError(f"the merge {' '.join(odd)!r} is not a pair of tokens, such as 'l o'")
        for left, right in pairs:
            if missing := [token for token in (left, right, left + right) if token not in vocabulary]:
                raise TokenizerError(f"the merge '{left} {right}' needs {missing[0]!r}, which has no id")
        inner = tokenizers.Tokenizer(tokenizers.models.BPE(dict(vocabulary), [(left, right) for left, right in pairs]))
        inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        inner.decoder = tokenizers.decoders.ByteLevel()
        named = {"eos_token": end, "bos_token": begin}
        inner.add_special_tokens([*specials, *(name for name in named.values() if name and name not in specials)])
        found = cls(inner, {role: name for role, name in named.items() if name})
        if begin is not None:
            inner.post_processor = tokenizers.processors.TemplateProcessing(
                single=f"{begin} $A", special_tokens=[(begin, inner.token_to_id(begin))]
            )
        return found

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer_config.json`, then `tokenizer.json`, in transformers' format; each write is atomic."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        if self.end is not None:
            settings["eos_token"] = self.name(self.end)
        files = {"tokenizer_config.json": json.dumps(settings | self.settings, indent=2, ensure_ascii=False) + "\n"}
        files["tokenizer.json"] = self.json
        Path(folder).mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            write_atomically(Path(folder, name), text)

    def with_mask_token(self) -> Tokenizer:
        """Return a copy with a mask token for masked language models."""
        inner = tokenizers.Tokenizer.from_str(self.json)
        inner.add_special_tokens([MASK])
        return Tokenizer(inner, self.settings | {"mask_token": MASK})

    def with_end(self) -> Tokenizer:
        """Return a copy that adds the end token after every prompt, for an encoder."""
        if self.end is None:
            raise TokenizerError(
                "the tokenizer has no end token, which every target needs; "
                "name it as eos_token in tokenizer_config.json"
            )
        inner, end = tokenizers.Tokenizer.from_str(self.json), self.inner.id_to_token(self.end)
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"$A {end}", special_tokens=[(end, self.end)]
        )
        return Tokenizer(inner, self.settings)

    def is_byte(self, id: int) -> bool:
        """Return whether a token is a single byte, such as `<0xE1>`, of a character without its own token."""
        return BYTE.fullmatch(self.inner.id_to_token(id) or "") is not None

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the ids of each text, using all cores."""
        return [encoding.ids for encoding in self.encodings(texts)]

    def encode_target(self, text: str) -> list[int]:
        """Return the ids of a target text. Differs from `encode` only if the target has its own tokenizer."""
        return self.encode(text)

    def encodings(self, texts: Sequence[str]) -> list[tokenizers.Encoding]:
        """Like `encode_batch`, but without the cost of converting the ids to Python integers."""
        if self.alphabet is not None:
            for text in texts:
                self._refuse_unknown(text, self.alphabet)
        try:
            return self.plain.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:  # the library's error for a str with lone surrogates
            raise TokenizerError(HALF) from None

    def prompt(self, text: str, *, around: bool = True) -> list[int]:
        """Return the ids of a prompt, recognizing special tokens in it. `around` adds those that belong around it."""
        return self._read(self.inner, text, around)

    def encode_source(self, text: str) -> list[int]:
        """Return the ids of a plain text to translate, with the special tokens that belong around it."""
        return self._read(self.plain, text, True)

    def _read(self, inner: tokenizers.Tokenizer, text: str, around: bool) -> list[int]:
        if self.alphabet is not None:
            self._refuse_unknown(text, self.alphabet)
        try:
            return inner.encode(text, add_special_tokens=around).ids
        except TypeError:  # the library's error for a str with lone surrogates
            raise TokenizerError(HALF) from None

    def token(self, name: str) -> int | None:
        """Return the id of a special token by its role in the settings: `bos_token`, `mask_token`, …"""
        named = self.settings.get(name)
        return self.inner.token_to_id(named["content"] if isinstance(named, dict) else named) if named else None

    def name(self, id: int) -> str | None:
        """Return a token's name in the vocabulary."""
        return self.inner.id_to_token(id)

    @cached_property
    def specials(self) -> frozenset[int]:
        """The ids of the special tokens."""
        return frozenset(id for id, token in self.inner.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def plain(self) -> tokenizers.Tokenizer:
        """A copy that encodes special tokens in a text as ordinary characters."""
        plain = tokenizers.Tokenizer.from_str(self.json)
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def json(self) -> str:
        return self.inner.to_str(pretty=True)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text of the ids, by default without special tokens."""
        return self.inner.decode(ids, skip_special_tokens=skip_special_tokens)

    @cached_property
    def vocabulary(self) -> int:
        """The number of ids: the largest id plus one."""
        return max(self.inner.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """A hash that is equal for equal `tokenizer.json` contents, on every machine."""
        canonical = json.dumps(json.loads(self.json), sort_keys=True)
        return hashlib.sha256(canonical.encode()).hexdigest()

    @cached_property
    def alphabet(self) -> frozenset[str] | None:
        """All characters, if every token is one character. Used to refuse others, which the library drops silently."""
        inner, model = self.inner, self.inner.model
        if inner.normalizer is not None or inner.pre_tokenizer is not None or inner.get_added_tokens_decoder():
            return None
        if not isinstance(model, tokenizers.models.BPE) or model.unk_token or model.byte_fallback:
            return None
        return None if json.loads(self.json)["model"]["merges"] else frozenset(inner.get_vocab())

    def _end(self) -> int | None:
        if self.settings.get("eos_token"):
            return self.token("eos_token")
        ids = [self.inner.token_to_id(name) for name in KNOWN_ENDS]
        return next((id for id in ids if id is not None), None)

    def _refuse_unknown(self, text: str, known: frozenset[str]) -> None:
        unknown = set(text) - known
        if unknown:
            at, character = min((text.index(character), character) for character in unknown)
            raise TokenizerError(
                f"the character {character!r} (U+{ord(character):04X}), at place {at:,}, is not among the "
                f"{len(known):,} characters that this tokenizer was made from; a tokenizer of bytes or byte pairs "
                f"reads any text"
            )
