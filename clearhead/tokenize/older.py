"""Tokenizers from the files that checkpoints had before `tokenizer.json`, without another library.

vocab.txt                  BERT, DistilBERT, ELECTRA, MPNet       WordPiece
vocab.json, merges.txt     GPT-2, OPT; RoBERTa, BART; Qwen 2      byte-level BPE
spiece.model               T5; ALBERT                             SentencePiece
sentencepiece.bpe.model    XLM-RoBERTa                            SentencePiece
tokenizer.model            LLaMA, Mistral, Gemma; LLaMA 3         SentencePiece; tiktoken
source.spm, target.spm     Marian                                 SentencePiece
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from clearhead.typed_json import read_json

from .make import byte_characters
from .marian import SOURCE, MarianTokenizer
from .pieces import SPACE, Pieces, begin_with, from_pieces, read_pieces
from .pretokenizers import LLAMA3, QWEN2
from .tokenizer import Tokenizer, TokenizerError, reads

Settings = dict[str, Any]
SENTINELS = 100  # T5's <extra_id_0> … <extra_id_99>
TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")
LLAMA3_SIZE = 128_000  # ranks in LLaMA 3's file, whose special tokens no file lists
LLAMA3_NAMED = {
    0: "begin_of_text",
    1: "end_of_text",
    4: "finetune_right_pad_id",
    6: "start_header_id",
    7: "end_header_id",
    8: "eom_id",
    9: "eot_id",
    10: "python_tag",
}
ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@reads("older")
def load_older(folder: Path, settings: Settings) -> Tokenizer | None:
    """Load the tokenizer of a folder without a `tokenizer.json`; None if no file is known."""
    special = folder / "special_tokens_map.json"
    if special.is_file():
        settings = {role: value for role, value in read_json(special).items() if role in ROLES} | settings
    for names, read in READERS.items():
        if all((folder / name).is_file() for name in names):
            found = read(folder, settings)
            add_listed_tokens(found, folder)
            return found
    return None


def family_of(folder: Path, settings: Settings) -> str:
    """The family that decides how the files are read: of the tokenizer's class, or of the model."""
    if named := settings.get("tokenizer_class"):
        return re.sub(r"Tokenizer(Fast)?$", "", named).lower()
    config = folder / "config.json"
    return str(read_json(config).get("model_type", "")).lower() if config.is_file() else ""


def name_of(value: Any) -> str:
    return value["content"] if isinstance(value, dict) else value


def finish(inner: tokenizers.Tokenizer, settings: Settings, defaults: dict[str, str]) -> Tokenizer:
    """Mark the special tokens, named in the settings or by default, that the vocabulary has."""
    settings = {role: name for role, name in defaults.items() if inner.token_to_id(name) is not None} | settings
    for role in ROLES:
        if value := settings.get(role):
            given: dict[str, Any] = value if isinstance(value, dict) else {}
            strips = {flag: bool(given.get(flag, False)) for flag in ("lstrip", "rstrip")}
            if inner.token_to_id(name_of(value)) is not None:
                inner.add_special_tokens([AddedToken(name_of(value), special=True, normalized=False, **strips)])
    return Tokenizer(inner, settings)


def add_listed_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Add the tokens of `added_tokens.json` and of `added_tokens_decoder`, in the order of their ids."""
    listed = {int(id): token for id, token in (tokenizer.settings.get("added_tokens_decoder") or {}).items()}
    file = folder / "added_tokens.json"
    if file.is_file():
        listed |= {id: {"content": name} for name, id in read_json(file, dict[str, int]).items() if id not in listed}
    for id, token in sorted(listed.items()):
        flags = {flag: bool(token.get(flag, False)) for flag in ("lstrip", "rstrip", "single_word", "normalized")}
        added = AddedToken(token["content"], special=bool(token.get("special", False)), **flags)
        (tokenizer.inner.add_special_tokens if added.special else tokenizer.inner.add_tokens)([added])
        if tokenizer.inner.token_to_id(token["content"]) != id:
            raise TokenizerError(f"{folder}: the added token {token['content']!r} has the id {id}, which is not next")


# ---- WordPiece


def read_wordpiece(folder: Path, settings: Settings) -> Tokenizer:
    """BERT's vocabulary: one token on each line."""
    lines = read_text(folder / "vocab.txt").split("\n")
    vocabulary = {line.rstrip("\r"): id for id, line in enumerate(lines if lines[-1] else lines[:-1])}
    first, last = ("[CLS]", "[SEP]") if "[CLS]" in vocabulary else ("<s>", "</s>")
    defaults = {"unk_token": "[UNK]", "cls_token": first, "sep_token": last}
    defaults |= {"pad_token": "[PAD]", "mask_token": "[MASK]"} if first == "[CLS]" else MARKS
    unknown = name_of(settings.get("unk_token") or "[UNK]")
    inner = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token=unknown, max_input_chars_per_word=100))
    inner.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
        strip_accents=settings.get("strip_accents"),
        lowercase=settings.get("do_lower_case", True),
    )
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece("##")
    made = finish(inner, settings, defaults)
    surround(made, "cls_token", "sep_token")
    return made


MARKS = {"pad_token": "<pad>", "mask_token": "<mask>"}


def surround(tokenizer: Tokenizer, first: str | None, last: str) -> None:
    """Let prompts begin and end with the tokens of these roles."""
    names = [name_of(tokenizer.settings[role]) for role in (first, last) if role and tokenizer.settings.get(role)]
    ids = [(name, tokenizer.inner.token_to_id(name)) for name in dict.fromkeys(names)]
    if missing := [name for name, id in ids if id is None]:
        raise TokenizerError(f"the vocabulary has no token {missing[0]!r}")
    before, after = (names[:-1], names[-1]) if names else ([], None)
    parts = [*before, "$A", *([after] if after else [])]
    tokenizer.inner.post_processor = processors.TemplateProcessing(single=parts, special_tokens=ids)


# ---- byte-level BPE


def read_byte_pairs(folder: Path, settings: Settings) -> Tokenizer:
    """The vocabulary and the merges of GPT-2, RoBERTa, Qwen 2 and their relatives."""
    vocabulary = read_json(folder / "vocab.json", dict[str, int])
    lines = read_text(folder / "merges.txt").split("\n")
    merges = [tuple(line.split(" ")) for line in lines if line and not line.startswith("#version")]
    if any(len(merge) != 2 for merge in merges):
        raise TokenizerError(
            f"{folder / 'merges.txt'} is not a list of merges: a line has more or fewer than two parts"
        )
    if any(right.endswith("</w>") for _, right in merges):
        raise TokenizerError(
            f"{folder / 'merges.txt'} marks ends of words, as for CLIP and GPT-1; those need a tokenizer.json"
        )
    family = family_of(folder, settings)
    inner = tokenizers.Tokenizer(models.BPE(vocabulary, [(left, right) for left, right in merges]))
    inner.decoder = decoders.ByteLevel()
    space = bool(settings.get("add_prefix_space", False))
    if family.startswith("qwen"):
        inner.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2), "isolated")
        inner.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(space, use_regex=False)])
        return finish(inner, settings, {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>"})
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=space)
    if family.startswith("gpt") or family in ("opt", "codegen") or not {"<s>", "</s>"} <= vocabulary.keys():
        made = finish(inner, settings, dict.fromkeys(("unk_token", "bos_token", "eos_token"), "<|endoftext|>"))
        if settings.get("add_bos_token"):
            begin_with(made.inner, made.token("bos_token"))
        return made
    ends = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>"}
    made = finish(inner, settings, ends | MARKS)
    surround(made, "cls_token", "sep_token")
    return made


# ---- SentencePiece


def read_spiece(folder: Path, settings: Settings) -> Tokenizer:
    """T5's or ALBERT's SentencePiece model."""
    pieces = read_pieces(folder / "spiece.model")
    if "[CLS]" in pieces.names:
        return read_albert(pieces, settings)
    extra = settings.get("extra_ids", SENTINELS)
    sentinels = [f"<extra_id_{i}>" for i in reversed(range(extra))]
    inner = unigram_words([*rows_of(pieces), *((name, 0.0) for name in sentinels)], pieces, pieces.unknown)
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in sentinels])
    made = finish(inner, settings, {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"})
    surround(made, None, "eos_token")
    return made


def read_albert(pieces: Pieces, settings: Settings) -> Tokenizer:
    """ALBERT's: lower-cased and without accents by default."""
    inner = unigram_words(rows_of(pieces), pieces, pieces.unknown)
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not settings.get("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if settings.get("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    inner.normalizer = normalizers.Sequence(steps)
    ends = {"bos_token": "[CLS]", "eos_token": "[SEP]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    made = finish(inner, settings, ends | {"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "[MASK]"})
    surround(made, "cls_token", "sep_token")
    return made


def read_xlm_roberta(folder: Path, settings: Settings) -> Tokenizer:
    """XLM-RoBERTa's: four special tokens first, then the pieces after the model's own three, then `<mask>`."""
    pieces = read_pieces(folder / "sentencepiece.bpe.model")
    rows = [(name, 0.0) for name in ("<s>", "<pad>", "</s>", "<unk>")] + rows_of(pieces)[3:] + [("<mask>", 0.0)]
    inner = unigram_words(rows, pieces, 3)
    ends = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "unk_token": "<unk>"}
    made = finish(inner, settings, ends | MARKS)
    surround(made, "cls_token", "sep_token")
    return made


def rows_of(pieces: Pieces) -> list[tuple[str, float]]:
    return list(zip(pieces.names, pieces.scores, strict=True))


def unigram_words(rows: list[tuple[str, float]], pieces: Pieces, unknown: int | None) -> tokenizers.Tokenizer:
    """A unigram tokenizer that splits words at white space first and puts `▁` before each of them."""
    inner = tokenizers.Tokenizer(models.Unigram(rows, unk_id=unknown, byte_fallback=False))
    if pieces.charsmap:
        inner.normalizer = normalizers.Precompiled(pieces.charsmap)
    words = pre_tokenizers.Metaspace(replacement=SPACE, prepend_scheme="always")
    inner.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), words])
    inner.decoder = decoders.Metaspace(replacement=SPACE, prepend_scheme="always")
    return inner


def read_tokenizer_model(folder: Path, settings: Settings) -> Tokenizer:
    """LLaMA's SentencePiece model, or a file of tiktoken. Prompts begin with the bos token by default."""
    path = folder / "tokenizer.model"
    with path.open("rb") as file:
        if TIKTOKEN.match(file.readline(200)):
            return read_tiktoken(path, settings)
    found = Tokenizer(from_pieces(read_pieces(path)), {"bos_token": "<s>"} | settings)
    if settings.get("add_bos_token", True):
        begin_with(found.inner, found.token("bos_token"))
    return found


# ---- tiktoken


def read_tiktoken(path: Path, settings: Settings) -> Tokenizer:
    """A tiktoken file: each line is a token's bytes in base64, and its rank. Words are split as LLaMA 3 does."""
    try:
        pairs = (line.split() for line in path.read_bytes().splitlines() if line)
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (ValueError, binascii.Error):
        raise TokenizerError(f"{path} is not a tiktoken file, or has been cut short") from None
    inner = tokenizers.Tokenizer(models.BPE(*ranks_to_merges(ranks), ignore_merges=True))
    split = pre_tokenizers.Split(Regex(LLAMA3), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.Sequence([split, byte_level]), decoders.ByteLevel()
    if len(ranks) == LLAMA3_SIZE and not settings.get("added_tokens_decoder"):
        inner.add_special_tokens(list(llama3_specials()))
        settings = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"} | settings
    made = Tokenizer(inner, settings)
    if settings.get("add_bos_token", True):
        begin_with(made.inner, made.token("bos_token"))
    return made


def ranks_to_merges(ranks: dict[bytes, int]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary, and merges that form every token of two known parts, lowest rank first."""
    characters = byte_characters()

    def text(token: bytes) -> str:
        return "".join(characters[byte] for byte in token)

    merges = []
    for token, rank in ranks.items():
        halves = ((token[:at], token[at:]) for at in range(1, len(token)))
        known = [(ranks[left], ranks[right], left, right) for left, right in halves if left in ranks and right in ranks]
        merges += [(rank, *parts) for parts in sorted(known)]
    merges.sort(key=lambda merge: merge[0])
    return {text(token): rank for token, rank in ranks.items()}, [(text(one[3]), text(one[4])) for one in merges]


def llama3_specials() -> Iterable[str]:
    """LLaMA 3's 256 special tokens, most of them reserved."""
    reserved = 0
    for i in range(256):
        if i in LLAMA3_NAMED:
            yield f"<|{LLAMA3_NAMED[i]}|>"
        else:
            yield f"<|reserved_special_token_{reserved}|>"
            reserved += 1


def read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise TokenizerError(f"{path} is not UTF-8 text") from None


READERS: dict[tuple[str, ...], Callable[[Path, Settings], Tokenizer]] = {
    (SOURCE,): MarianTokenizer,
    ("vocab.json", "merges.txt"): read_byte_pairs,
    ("vocab.txt",): read_wordpiece,
    ("sentencepiece.bpe.model",): read_xlm_roberta,
    ("spiece.model",): read_spiece,
    ("tokenizer.model",): read_tokenizer_model,
}
"""The files of each kind of tokenizer, in the order in which they are tried."""
