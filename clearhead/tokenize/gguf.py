"""Read and write the tokenizer inside a GGUF file: SentencePiece pieces with scores, or byte-level BPE merges."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tokenizers
from tokenizers import AddedToken, decoders, models

from clearhead.extras import install_command
from clearhead.gguf_file import open_gguf

from .pieces import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, Pieces, begin_with, from_pieces
from .pretokenizers import UnknownTokenizer, WordRule, find_rule, name_rule, split_words
from .tokenizer import Tokenizer, TokenizerError, reads

if TYPE_CHECKING:
    import gguf

TOKENS = "tokenizer.ggml."
NONE = "no_vocab"  # llama.cpp's name for no tokenizer
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise TokenizerError(f"GGUF files need the package gguf: {install_command('gguf')}") from None
    return gguf


def from_gguf(path: Path) -> Tokenizer | None:
    """Return the file's tokenizer; None if it has none, or, with a warning, one of an unknown kind.

    Everything that needs no tokenizer still works then, and so does a tokenizer from elsewhere.
    """
    try:
        return read_gguf_tokenizer(path, {})
    except UnknownTokenizer as error:
        warnings.warn(f"{error}. Give token ids, or a tokenizer from elsewhere (--tokenizer FOLDER)", stacklevel=2)
        return None


@reads("gguf")
def read_gguf_tokenizer(path: Path, beside: Mapping[str, Any]) -> Tokenizer | None:
    """Return the file's tokenizer, or None if the file holds only a model. It needs no settings `beside` it."""
    fields = open_gguf(path).fields
    kind = fields.get(f"{TOKENS}model", NONE)
    if kind == NONE:
        return None
    if kind not in ("llama", "gpt2"):
        raise UnknownTokenizer(f"{path}: the tokenizer {kind!r} is not supported; supported: gpt2, llama")
    rule = find_rule(fields.get(f"{TOKENS}pre", "default"), path) if kind == "gpt2" else None
    try:
        inner = from_scores(fields) if rule is None else from_merges(fields, rule)
    except KeyError as error:
        raise TokenizerError(f"{path}: the tokenizer lacks {error}") from None
    names = fields[f"{TOKENS}tokens"]
    settings: dict[str, Any] = {
        key: names[id] for role, key in ROLES.items() if (id := fields.get(f"{TOKENS}{role}_token_id")) is not None
    }
    default = rule is None or rule.begins
    settings["add_bos_token"] = bool(fields.get(f"{TOKENS}add_bos_token", default))
    if settings["add_bos_token"]:
        begin_with(inner, fields.get(f"{TOKENS}bos_token_id"))
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return Tokenizer(inner, settings)


def from_scores(fields: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Build a SentencePiece tokenizer from pieces and their scores."""
    return from_pieces(
        Pieces(
            names=list(fields[f"{TOKENS}tokens"]),
            scores=fields[f"{TOKENS}scores"],
            types=fields[f"{TOKENS}token_type"],
            prefix=bool(fields.get(f"{TOKENS}add_space_prefix", True)),
            trimmed=bool(fields.get(f"{TOKENS}remove_extra_whitespaces", False)),
        )
    )


def from_merges(fields: Mapping[str, Any], rule: WordRule) -> tokenizers.Tokenizer:
    """Build a byte-level BPE tokenizer from tokens and merges."""
    names, types = list(fields[f"{TOKENS}tokens"]), fields[f"{TOKENS}token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in fields[f"{TOKENS}merges"]]
    vocabulary = {name: id for id, name in enumerate(names)}
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=rule.ignore_merges))
    inner.pre_tokenizer = split_words(rule)
    inner.decoder = decoders.ByteLevel()
    for name, kind in zip(names, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            inner.add_tokens([AddedToken(name, special=kind == CONTROL, normalized=False)])
    return inner


# ---- writing


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, size: int) -> None:
    """Write a tokenizer that gives the same tokens in llama.cpp. Raise if llama.cpp cannot express part of it.

    size  the model's vocabulary size; ids without a token are marked as unused
    """
    whole = json.loads(tokenizer.json)
    model = whole["model"]
    if model["type"] != "BPE":
        raise TokenizerError(f"cannot write a {model['type']} tokenizer to GGUF; only BPE is supported")
    check_added_tokens(whole["added_tokens"])
    bytewise = "ByteLevel" in json.dumps(whole["pre_tokenizer"])
    ids = tokenizer.inner.get_vocab(with_added_tokens=True)
    names = {id: name for name, id in ids.items()}
    types = token_types(whole, names, size)
    if not bytewise and BYTE not in types:
        raise TokenizerError("cannot write a character tokenizer to GGUF: every byte must have a token")
    writer.add_tokenizer_model("gpt2" if bytewise else "llama")
    writer.add_token_list([names.get(id, f"[unused {id}]") for id in range(size)])
    writer.add_token_types(types)
    if bytewise:
        check_normalizer(whole)
        writer.add_tokenizer_pre(name_rule(tokenizer.inner, whole))
        writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]])
    else:
        writer.add_tokenizer_pre("default")
        writer.add_add_space_prefix(has_space_prefix(whole))
        writer.add_token_scores(piece_scores(model, names, types))
    for role, key in ROLES.items():
        named = tokenizer.settings.get(key)
        found = ids.get(named["content"] if isinstance(named, dict) else named) if named else None
        if found is None and role == "eos":
            found = tokenizer.end
        if found is not None:
            writer.add_uint32(f"{TOKENS}{role}_token_id", found)
    write_template(writer, tokenizer)
    if isinstance(template := tokenizer.settings.get("chat_template"), str):
        writer.add_chat_template(template)


def token_types(whole: Mapping[str, Any], names: Mapping[int, str], size: int) -> list[int]:
    added = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in whole["added_tokens"]}
    types = [added.get(id, NORMAL if id in names else UNUSED) for id in range(size)]
    for id in range(size):
        if len(names.get(id, "")) == 6 and names[id].startswith("<0x"):
            types[id] = BYTE
        if id in names and names[id] == whole["model"].get("unk_token"):
            types[id] = UNKNOWN
    return types


def check_added_tokens(tokens: Sequence[Mapping[str, Any]]) -> None:
    for token in tokens:
        if flags := [name for name in ("lstrip", "rstrip", "single_word") if token.get(name)]:
            raise TokenizerError(f"cannot write the token {token['content']!r} to GGUF: it has {flags[0]}")


def check_normalizer(whole: Mapping[str, Any]) -> None:
    """Raise if a byte-level tokenizer normalizes the text. NFC, which llama.cpp skips, only gives a warning."""
    for step in steps_of(whole["normalizer"], "normalizers"):
        if step["type"] != "NFC":
            raise TokenizerError(f"cannot write this tokenizer to GGUF: llama.cpp has no normalizer {step['type']}")
        warnings.warn(
            "llama.cpp does not apply this tokenizer's NFC normalizer; text with decomposed accents differs there",
            stacklevel=3,
        )


def has_space_prefix(whole: Mapping[str, Any]) -> bool:
    """Return whether a SentencePiece tokenizer adds a space before a text. Raise if it normalizes in other ways."""
    prefix = False
    for step in steps_of(whole["normalizer"], "normalizers"):
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                pass
            case {"type": kind}:
                raise TokenizerError(f"cannot write this tokenizer to GGUF: llama.cpp has no normalizer {kind}")
    for step in steps_of(whole["pre_tokenizer"], "pretokenizers"):
        match step:
            case {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme}:
                if scheme != "never":
                    raise TokenizerError(
                        f"cannot write this tokenizer to GGUF: Metaspace with prepend_scheme {scheme} puts no space "
                        "before a text that begins with one, but llama.cpp does"
                    )
                if step.get("split", True) and any(SPACE in name[1:] for name in whole["model"]["vocab"]):
                    raise TokenizerError(
                        "cannot write this tokenizer to GGUF: it splits at spaces, but has tokens with inner spaces"
                    )
            case {"type": kind}:
                raise TokenizerError(f"cannot write this tokenizer to GGUF: llama.cpp has no pre-tokenizer {kind}")
    return prefix


def steps_of(part: Mapping[str, Any] | None, key: str) -> list[Mapping[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer as a flat list."""
    if part is None:
        return []
    return [inner for step in part[key] for inner in steps_of(step, key)] if key in part else [part]


def piece_scores(model: Mapping[str, Any], names: Mapping[int, str], types: Sequence[int]) -> list[float]:
    """Return a score for each piece such that llama.cpp, which merges the highest score first, follows the merges.

    llama.cpp joins any two neighbours that form a piece. This gives the same tokens only if the merges list all such
    pairs, grouped by piece.
    """
    pairs = [tuple(merge) if isinstance(merge, list) else tuple(merge.split(" ", 1)) for merge in model["merges"]]
    listed, order = set(pairs), [left + right for left, right in pairs]
    rank: dict[str, int] = {}
    for place, piece in enumerate(order):
        if piece in rank and order[place - 1] != piece:
            raise TokenizerError(f"cannot write this tokenizer to GGUF: merges of {piece!r} are not in a row")
        rank.setdefault(piece, place)
    vocabulary = model["vocab"]
    for id, kind in enumerate(types):
        name = names.get(id, "")
        for at in range(1, len(name) if kind == NORMAL else 0):
            if name[:at] in vocabulary and name[at:] in vocabulary and (name[:at], name[at:]) not in listed:
                raise TokenizerError(
                    f"cannot write this tokenizer to GGUF: llama.cpp would merge {name[:at]!r} and {name[at:]!r}, "
                    "which this tokenizer does not"
                )
    return [-float(rank.get(names.get(id, ""), len(rank))) for id in range(len(types))]


def write_template(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    """Write whether a text begins with the bos token and ends with the eos token. GGUF can express nothing else."""
    around, text = tokenizer.prompt("a"), tokenizer.prompt("a", around=False)
    place = next((i for i in range(len(around)) if around[i : i + len(text)] == text), None)
    before, after = (around[:place], around[place + len(text) :]) if place is not None else (around, [])
    if before not in ([], [tokenizer.token("bos_token")]) or after not in ([], [tokenizer.end]):
        raise TokenizerError(
            f"cannot write this tokenizer to GGUF: it puts the tokens {before} before a text and {after} after it"
        )
    writer.add_add_bos_token(bool(before))
    writer.add_add_eos_token(bool(after))
