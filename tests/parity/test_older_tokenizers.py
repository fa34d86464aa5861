"""Tokenizers from the files before `tokenizer.json` give the same ids as those of transformers."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers, trainers

from clearhead.tokenize import Tokenizer, TokenizerError
from clearhead.tokenize.make import byte_characters

from .test_gguf_tokenizer import odd_strings

WORDS = "the quick brown fox jumps over a lazy dog don't naïve 2024 12 , . ! ? ' \" 9, ok,"
TEXT = [WORDS, *odd_strings(300)] * 2
STRINGS = [text for text in odd_strings(400) if "\x00" not in text] + [WORDS, "A [MASK] and <mask> </s> ``q'' it''s"]


def byte_pairs(folder: Path, special: list[str]) -> None:
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(TEXT, trainer)
    inner.model.save(str(folder))


def word_pieces(folder: Path, special: list[str]) -> None:
    pieces = dict.fromkeys([*special, *WORDS.lower().split(), *"abcdefghijklmnopqrstuvwxyz0123456789.,!?'日ß"])
    tails = [f"##{letter}" for letter in "abcdefghijklmnopqrstuvwxyz0123456789"]
    (folder / "vocab.txt").write_text("\n".join([*pieces, *tails, "##ing", "Ca"]) + "\n", encoding="utf-8")


def sentence_pieces(folder: Path, name: str, **more: Any) -> None:
    library = pytest.importorskip("sentencepiece")
    (folder / "text").write_text("\n".join(TEXT).replace("\x00", ""), encoding="utf-8")
    library.SentencePieceTrainer.train(
        input=str(folder / "text"), model_prefix=str(folder / "made"), vocab_size=300, model_type="unigram",
        hard_vocab_limit=False, minloglevel=2, **more,
    )  # fmt: skip
    (folder / "made.model").rename(folder / name)
    for name in ("text", "made.vocab"):
        (folder / name).unlink()


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
T5 = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
ALBERT = {
    "pad_id": 0,
    "unk_id": 1,
    "bos_id": -1,
    "eos_id": -1,
    "control_symbols": "[CLS],[SEP]",
    "user_defined_symbols": "[MASK]",
}
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "bert": (lambda folder: word_pieces(folder, BERT), "BertTokenizer", {}),
    "bert, cased": (lambda folder: word_pieces(folder, BERT), "BertTokenizer", {"do_lower_case": False}),
    "gpt2": (lambda folder: byte_pairs(folder, ["<|endoftext|>"]), "GPT2Tokenizer", {}),
    "roberta": (lambda folder: byte_pairs(folder, ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]), "RobertaTokenizer", {}),
    "qwen2": (lambda folder: byte_pairs(folder, ["<|endoftext|>"]), "Qwen2Tokenizer", {}),
    "t5": (lambda folder: sentence_pieces(folder, "spiece.model", **T5), "T5Tokenizer", {}),
    "albert": (lambda folder: sentence_pieces(folder, "spiece.model", **ALBERT), "AlbertTokenizer", {}),
    "xlm-roberta": (lambda folder: sentence_pieces(folder, "sentencepiece.bpe.model"), "XLMRobertaTokenizer", {}),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_ids_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    make, kind, settings = CASES[name]
    make(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind} | settings))
    mine = Tokenizer.load(tmp_path)
    theirs = getattr(transformers, kind).from_pretrained(tmp_path)
    wrong = [text for text in STRINGS if mine.prompt(text) != theirs(text)["input_ids"]]
    assert not wrong, f"{len(wrong)} of {len(STRINGS)} differ, first {wrong[0]!r}"
    mine.save(tmp_path / "saved")
    again = Tokenizer.load(tmp_path / "saved")
    assert [again.prompt(text) for text in STRINGS] == [mine.prompt(text) for text in STRINGS]


def test_a_tiktoken_file_is_a_tokenizer(tmp_path: Path) -> None:
    """Its ids are those of the byte-level BPE with LLaMA 3's words that the ranks were taken from."""
    from clearhead.tokenize.pretokenizers import LLAMA3, WordRule, split_words

    from .test_gguf_tokenizer import train

    want = train(split_words(WordRule((LLAMA3,))), ignore_merges=True)
    bytes_of = {character: byte for byte, character in enumerate(byte_characters())}
    ranks = {name: id for name, id in want.inner.get_vocab(with_added_tokens=False).items() if name != "<|endoftext|>"}
    lines = [
        f"{base64.b64encode(bytes(bytes_of[c] for c in name)).decode()} {rank}"
        for name, rank in sorted(ranks.items(), key=lambda pair: pair[1])
    ]
    (tmp_path / "tokenizer.model").write_text("\n".join(lines) + "\n")
    got = Tokenizer.load(tmp_path)
    for text in odd_strings(500):
        assert got.encode(text) == want.encode(text), text
    (tmp_path / "tokenizer.model").write_text(lines[0] + "\nno base64 x\n")
    with pytest.raises(TokenizerError, match="is not a tiktoken file"):
        Tokenizer.load(tmp_path)


def test_added_tokens_keep_their_ids(tmp_path: Path) -> None:
    byte_pairs(tmp_path, ["<|endoftext|>"])
    size = len(json.loads((tmp_path / "vocab.json").read_text()))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size + 1, "<|im_start|>": size}))
    mine = Tokenizer.load(tmp_path)
    assert mine.prompt("<|im_start|><|im_end|>") == [size, size + 1]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_end|>": size + 5}))
    with pytest.raises(TokenizerError, match=r"has the id .*, which is not next"):
        Tokenizer.load(tmp_path)


def test_a_folder_without_a_tokenizer_says_which_files_would_do(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"has no tokenizer: none of tokenizer.json, vocab.txt, .*tokenizer.model"):
        Tokenizer.load(tmp_path)


def test_merges_that_end_words_are_refused(tmp_path: Path) -> None:
    (tmp_path / "vocab.json").write_text(json.dumps({"a": 0, "b</w>": 1, "ab</w>": 2}))
    (tmp_path / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    with pytest.raises(TokenizerError, match="those need a tokenizer"):
        Tokenizer.load(tmp_path)
