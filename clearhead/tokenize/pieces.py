"""Read SentencePiece models and turn them into tokenizers, without the SentencePiece library.

A model is a list of pieces with scores. `unigram` chooses the pieces with the highest sum of scores (Kudo 2018). `bpe`
repeatedly merges the two neighbours that form the piece with the highest score.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, processors

from .tokenizer import TokenizerError

SPACE = "▁"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
KINDS = {1: "unigram", 2: "bpe"}


@dataclass(frozen=True)
class Pieces:
    """The contents of a SentencePiece model."""

    names: Sequence[str]
    scores: Sequence[float]
    types: Sequence[int]
    kind: str = "bpe"
    charsmap: bytes = b""  # compiled rules for normalizing characters
    prefix: bool = True  # add a space before the text
    trimmed: bool = True  # collapse runs of spaces and strip both ends

    @property
    def unknown(self) -> int | None:
        return next((i for i, kind in enumerate(self.types) if kind == UNKNOWN), None)

    def of(self, *kinds: int) -> list[str]:
        return [name for name, kind in zip(self.names, self.types, strict=True) if kind in kinds]


def read_pieces(path: Path) -> Pieces:
    """Read the model in a `.spm` or `.model` file, which is a Protocol Buffers message."""
    try:
        data = path.read_bytes()
        whole = list(fields(data))
        rows = [dict(fields(value)) for number, value in whole if number == 1 and isinstance(value, bytes)]
        trainer, rules = (dict(fields(dict(whole).get(number, b""))) for number in (2, 3))
        names = [row[1].decode() for row in rows]
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from None
    except (IndexError, KeyError, UnicodeDecodeError, struct.error, AttributeError, TypeError):
        raise TokenizerError(f"{path} is not a SentencePiece model, or has been cut short") from None
    if not names:
        raise TokenizerError(f"{path} is not a SentencePiece model: it holds no pieces")
    kind = trainer.get(3, 1)
    if kind not in KINDS:
        raise TokenizerError(f"{path} is a SentencePiece model of words or characters; unigram and bpe are read")
    return Pieces(
        names=names,
        scores=[struct.unpack("<f", row[2])[0] if 2 in row else 0.0 for row in rows],
        types=[row.get(3, NORMAL) for row in rows],
        kind=KINDS[kind],
        charsmap=rules.get(2, b""),
        prefix=bool(rules.get(3, 1)),
        trimmed=bool(rules.get(4, 1)),
    )


def fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """Yield the numbered fields of a message: integers, or bytes that hold floats, texts or messages."""
    at = 0
    while at < len(message):
        tag, at = varint(message, at)
        match tag & 7:
            case 0:
                value, at = varint(message, at)
                yield tag >> 3, value
                continue
            case 1:
                size = 8
            case 5:
                size = 4
            case 2:
                size, at = varint(message, at)
            case _:
                raise IndexError("no such wire type")
        if at + size > len(message):
            raise IndexError("cut short")
        yield tag >> 3, message[at : at + size]
        at += size


def varint(message: bytes, at: int) -> tuple[int, int]:
    """Decode a variable-length integer; return its value and the offset after it."""
    value = shift = 0
    while True:
        byte = message[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def from_pieces(pieces: Pieces) -> tokenizers.Tokenizer:
    """Build the tokenizer of these pieces. A piece's id is its index."""
    inner = tokenizers.Tokenizer(unigram(pieces) if pieces.kind == "unigram" else byte_pairs(pieces))
    steps: list[Any] = [normalizers.Precompiled(pieces.charsmap)] if pieces.charsmap else []
    if pieces.trimmed:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if pieces.prefix:
        steps.append(normalizers.Prepend(SPACE))
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    back = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*back, decoders.Strip(" ", 1, 0)] if pieces.prefix else back)
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in pieces.of(UNKNOWN, CONTROL)])
    inner.add_tokens([AddedToken(name, normalized=False) for name in pieces.of(USER_DEFINED)])
    return inner


def begin_with(inner: tokenizers.Tokenizer, id: int | None) -> None:
    """Add this token before every prompt, if it is not None. Only `tokenizer.json` files state this themselves."""
    if id is not None:
        name = inner.id_to_token(id)
        inner.post_processor = processors.TemplateProcessing(single=[name, "$A"], special_tokens=[(name, id)])


def unigram(pieces: Pieces) -> models.Unigram:
    rows = [*zip(pieces.names, pieces.scores, strict=True)]
    return models.Unigram(rows, unk_id=pieces.unknown, byte_fallback=BYTE in pieces.types)


def byte_pairs(pieces: Pieces) -> models.BPE:
    """Convert each piece into the merges that form it, highest score first, in SentencePiece's order."""
    ids = {name: i for i, name in enumerate(pieces.names)}
    merges = []
    for name, score, kind in zip(pieces.names, pieces.scores, pieces.types, strict=True):
        if kind == NORMAL:
            halves = ((name[:at], name[at:]) for at in range(1, len(name)))
            found = [(-score, ids[left], ids[right]) for left, right in halves if left in ids and right in ids]
            merges += sorted(found)
    merges.sort(key=lambda merge: merge[0])
    pairs = [(pieces.names[left], pieces.names[right]) for _, left, right in merges]
    unknown = None if pieces.unknown is None else pieces.names[pieces.unknown]
    return models.BPE(ids, pairs, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in pieces.types)
