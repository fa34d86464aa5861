"""The tokenizer inside a GGUF file, both ways: SentencePiece's pieces with scores, or GPT-2's pairs with merges."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from .pieces import BYTE, CONTROL, NORMAL, SPACE, UNKNOWN, UNUSED, USER_DEFINED, Pieces, begin_with, from_pieces
from .tokenizer import Tokenizer, TokenizerError

if TYPE_CHECKING:
    import gguf

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
WORDS = {"gpt-2": None, "llama-bpe": LLAMA3, "qwen2": LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")}
"""How a text falls into words before pairs are merged, by llama.cpp's name for it; None is GPT-2's own rule."""
TOKENS = "tokenizer.ggml."
NONE = "no_vocab"  # llama.cpp's name for no tokenizer
ROLES = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}


def gguf_package() -> Any:
    try:
        import gguf
    except ImportError:
        raise TokenizerError("GGUF files need the package gguf: pip install 'clearhead[gguf]'") from None
    return gguf


def open_gguf(path: Path) -> gguf.GGUFReader:
    """The file, memory-mapped."""
    package = gguf_package()
    try:
        return package.GGUFReader(path, "c")
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error.strerror}") from None
    except (ValueError, IndexError, KeyError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} is not a GGUF file, or has been cut short: {error}") from None


def metadata(reader: gguf.GGUFReader) -> dict[str, Any]:
    """What the file says of its model and tokenizer."""
    said = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    # floats are stored in 32 bits: the shortest number that is meant, 1e-05 and not 9.999999747378752e-06
    return {name: float(str(np.float32(v))) if isinstance(v, float) else v for name, v in said.items()}


def from_gguf(path: Path) -> Tokenizer | None:
    """The file's tokenizer; None where it holds a model alone."""
    said = metadata(open_gguf(path))
    kind = said.get(f"{TOKENS}model", NONE)
    if kind == NONE:
        return None
    if kind not in ("llama", "gpt2"):
        raise TokenizerError(f"the tokenizer {kind!r} of {path} is not read; llama and gpt2 are")
    try:
        inner = from_scores(said) if kind == "llama" else from_merges(said, path)
    except KeyError as error:
        raise TokenizerError(f"the tokenizer of {path} lacks {error}") from None
    names = said[f"{TOKENS}tokens"]
    settings: dict[str, Any] = {
        key: names[id] for role, key in ROLES.items() if (id := said.get(f"{TOKENS}{role}_token_id")) is not None
    }
    usual = kind == "llama" or said.get(f"{TOKENS}pre") == "llama-bpe"  # where the file does not say
    settings["add_bos_token"] = bool(said.get(f"{TOKENS}add_bos_token", usual))
    if settings["add_bos_token"]:
        begin_with(inner, said.get(f"{TOKENS}bos_token_id"))
    if template := said.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    return Tokenizer(inner, settings)


def from_scores(said: Mapping[str, Any]) -> tokenizers.Tokenizer:
    return from_pieces(
        Pieces(
            names=said[f"{TOKENS}tokens"],
            scores=said[f"{TOKENS}scores"],
            types=said[f"{TOKENS}token_type"],
            prefix=bool(said.get(f"{TOKENS}add_space_prefix", True)),
            trimmed=bool(said.get(f"{TOKENS}remove_extra_whitespaces", False)),
        )
    )


def from_merges(said: Mapping[str, Any], path: Path) -> tokenizers.Tokenizer:
    words = said.get(f"{TOKENS}pre", "gpt-2")
    if words not in WORDS:
        raise TokenizerError(
            f"{path} parts its words by the rule {words!r}, which is not known; {', '.join(WORDS)} are"
        )
    names, types = said[f"{TOKENS}tokens"], said[f"{TOKENS}token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in said[f"{TOKENS}merges"]]
    inner = tokenizers.Tokenizer(models.BPE({name: id for id, name in enumerate(names)}, merges))
    rule = WORDS[words]
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=rule is None)
    if rule is not None:
        split = pre_tokenizers.Split(Regex(rule), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, inner.pre_tokenizer])
    inner.decoder = decoders.ByteLevel()
    for name, kind in zip(names, types, strict=True):
        if kind in (CONTROL, USER_DEFINED):
            inner.add_tokens([AddedToken(name, special=kind == CONTROL, normalized=False)])
    return inner


# ---- and back


def write_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer, size: int) -> None:
    """`size` is the model's vocabulary; what the tokenizer has no token for is marked as unused."""
    whole = json.loads(tokenizer.json)
    model = whole["model"]
    if model["type"] != "BPE":
        raise TokenizerError(f"a tokenizer of the kind {model['type']} cannot be written to GGUF; byte pairs can")
    ids = tokenizer.inner.get_vocab(with_added_tokens=True)
    names = {id: name for name, id in ids.items()}
    added = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in whole["added_tokens"]}
    types = [added.get(id, NORMAL if id in names else UNUSED) for id in range(size)]
    for id in range(size):
        if len(names.get(id, "")) == 6 and names[id].startswith("<0x"):
            types[id] = BYTE
    if model.get("unk_token") in ids:
        types[ids[model["unk_token"]]] = UNKNOWN
    bytewise = "ByteLevel" in json.dumps(whole["pre_tokenizer"])
    if not bytewise and BYTE not in types:
        raise TokenizerError("a tokenizer of characters cannot be written to GGUF, in which every byte has a token")
    writer.add_tokenizer_model("gpt2" if bytewise else "llama")
    writer.add_token_list([names.get(id, f"[unused {id}]") for id in range(size)])
    writer.add_token_types(types)
    if bytewise:
        writer.add_tokenizer_pre(words_rule(whole["pre_tokenizer"]))
        writer.add_token_merges([" ".join(merge) if isinstance(merge, list) else merge for merge in model["merges"]])
    else:
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(scores(model, names, size))
        writer.add_add_space_prefix(
            "Prepend" in json.dumps(whole["normalizer"]) or SPACE in str(whole["pre_tokenizer"])
        )
    for role, key in ROLES.items():
        named = tokenizer.settings.get(key)
        found = ids.get(named["content"] if isinstance(named, dict) else named) if named else None
        if found is None and role == "eos":
            found = tokenizer.end
        if found is not None:
            writer.add_uint32(f"{TOKENS}{role}_token_id", found)
    writer.add_add_bos_token(tokenizer.prompt("")[:1] == [tokenizer.token("bos_token")])
    if isinstance(template := tokenizer.settings.get("chat_template"), str):
        writer.add_chat_template(template)


def scores(model: Mapping[str, Any], names: Mapping[int, str], size: int) -> list[float]:
    """SentencePiece merges what makes the best score; the order of the merges says which that is."""
    rank: dict[str, int] = {}
    for place, merge in enumerate(model["merges"]):
        rank.setdefault("".join(merge if isinstance(merge, list) else merge.split(" ", 1)), place)
    return [-float(rank.get(names.get(id, ""), len(rank))) for id in range(size)]


def words_rule(pre: Mapping[str, Any]) -> str:
    """llama.cpp's name of the rule."""
    parts = pre.get("pretokenizers", [pre])
    rules = [part["pattern"].get("Regex") for part in parts if part["type"] == "Split"]
    known = {rule: name for name, rule in WORDS.items()}
    rule = rules[0] if rules else None
    if rule not in known or (rule is None and not parts[-1].get("use_regex", True)):
        raise TokenizerError(f"the tokenizer's rule for words has no name in llama.cpp: {rule}")
    return known[rule]
