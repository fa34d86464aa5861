"""Tokenizers in GGUF files: llama.cpp gives the same tokens as we do, or the export refuses."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from click.testing import CliRunner
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers

from clearhead.cli.main import cli
from clearhead.models.llama import llama
from clearhead.tokenize import Tokenizer, TokenizerError
from clearhead.tokenize.gguf import from_gguf, write_tokenizer
from clearhead.tokenize.pieces import BYTE, CONTROL, NORMAL, UNKNOWN, Pieces, from_pieces
from clearhead.tokenize.pretokenizers import GPT2, LLAMA3, WORD_RULES, split_words

gguf = pytest.importorskip("gguf")

ALPHABET = (
    *"abcdefghijklmnopqrstuvwxyzABCXYZ0123456789",
    *"     \n\n\t\r.,;:!?'\"()[]{}<>/\\|@#$%^&*-_=+~`",
    *"éßİǅ日本語한글با🙂½²Ⅷ٣…\u200b\u00a0\u3000",
    *("'s", "'LL", "'t", " 's", "\r\n", "  ", "   \n", "don't", "I'M", "1234", "3.14", "x²", "naïve", "e\u0301"),
)


def odd_strings(count: int = 2000) -> list[str]:
    draw = random.Random(7)
    return ["", " ", "\n", *("".join(draw.choices(ALPHABET, k=draw.randint(1, 24))) for _ in range(count - 3))]


TEXT = odd_strings(400) + ["the quick brown fox jumps over the lazy dog 2024 times, doesn't it? " * 3] * 5


def train(pre: Any, normalizer: Any = None, **options: Any) -> Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(**options))
    inner.pre_tokenizer, inner.normalizer, inner.decoder = pre, normalizer, decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=700, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"], show_progress=False
    )
    inner.train_from_iterator(TEXT, trainer)
    return Tokenizer(inner, {"eos_token": "<|endoftext|>"})


def sentencepiece() -> Tokenizer:
    """A small SentencePiece model: bytes, letters, and pieces of growing length."""
    words = ["▁the", "▁quick", "▁dog", "▁do", "es", "ing", "▁▁", "▁▁▁▁", "12", "日本"]
    pieces = dict.fromkeys(c for w in words for c in w)
    for word in words:
        pieces |= dict.fromkeys(word[:end] for end in range(2, len(word) + 1))
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces)]
    scores = [0.0] * 259 + [-float(i) for i in range(len(pieces))]
    inner = from_pieces(Pieces(names=names, scores=scores, types=types, trimmed=False))
    inner.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])
    return Tokenizer(inner, {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"})


def write(tokenizer: Tokenizer, path: Path) -> Path:
    """A GGUF file with a tokenizer and no model."""
    writer = gguf.GGUFWriter(str(path), "llama")
    write_tokenizer(writer, tokenizer, tokenizer.vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_ids(path: Path, texts: list[str], **options: Any) -> list[list[int]]:
    llama_cpp = pytest.importorskip("llama_cpp")
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=False) for text in texts]


@pytest.mark.parametrize("name", [name for name, rule in WORD_RULES.items() if rule.written])
def test_llama_cpp_splits_words_as_we_do(name: str, tmp_path: Path) -> None:
    rule = WORD_RULES[name]
    mine = train(split_words(rule), ignore_merges=rule.ignore_merges)
    path = write(mine, tmp_path / "m.gguf")
    texts = odd_strings()
    expected = [mine.encode(text) for text in texts]
    back = from_gguf(path)
    assert back is not None
    assert [back.encode(text) for text in texts] == expected
    theirs = llama_ids(path, texts)
    wrong = [text for text, ours, ids in zip(texts, expected, theirs, strict=True) if ours != ids]
    assert not wrong, f"{len(wrong)} of {len(texts)} strings differ, first {wrong[0]!r}"


def test_llama_cpp_reads_sentencepiece_as_we_do(tmp_path: Path) -> None:
    mine = sentencepiece()
    path, texts = write(mine, tmp_path / "m.gguf"), [text for text in odd_strings() if text]
    expected = [mine.encode(text) for text in texts]
    theirs = llama_ids(path, texts)
    wrong = [text for text, ours, ids in zip(texts, expected, theirs, strict=True) if ours != ids]
    assert not wrong, f"{len(wrong)} of {len(texts)} strings differ, first {wrong[0]!r}"


def bytewise(*steps: Any, use_regex: bool = True, prefix: bool = False) -> Any:
    return pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=prefix, use_regex=use_regex)])


def metaspace(scheme: str) -> Tokenizer:
    inner = sentencepiece().inner
    inner.normalizer, inner.pre_tokenizer = None, pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    return Tokenizer(inner, sentencepiece().settings)


def trimming() -> Tokenizer:
    inner = sentencepiece().inner
    inner.normalizer = normalizers.Sequence([normalizers.Strip(), inner.normalizer])
    return Tokenizer(inner, sentencepiece().settings)


REFUSED = {
    "punctuation": (lambda: train(bytewise(pre_tokenizers.Punctuation())), "no pre-tokenizer Punctuation"),
    "lowercase": (lambda: train(bytewise(), normalizers.Lowercase()), "no normalizer Lowercase"),
    "prefix space": (lambda: train(bytewise(prefix=True)), "no pre-tokenizer ByteLevel with add_prefix_space"),
    "two splits": (
        lambda: train(bytewise(pre_tokenizers.Split(Regex("x"), "isolated"), use_regex=True)),
        "no pre-tokenizer that splits words by 'x' then",
    ),
    "removed": (lambda: train(bytewise(pre_tokenizers.Split(Regex(LLAMA3), "removed"))), r"Split \(Removed\)"),
    "trimming": (trimming, "no normalizer Strip"),
    "metaspace": (lambda: metaspace("first"), "prepend_scheme first puts no space before a text that begins"),
    "unigram": (
        lambda: Tokenizer(tokenizers.Tokenizer(models.Unigram([("a", 0.0)], unk_id=0))),
        "cannot write a Unigram tokenizer",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_llama_cpp_cannot_express_is_refused(name: str, tmp_path: Path) -> None:
    make, sentence = REFUSED[name]
    with pytest.raises(TokenizerError, match=sentence):
        write(make(), tmp_path / "m.gguf")


def test_metaspace_without_a_prefix(tmp_path: Path) -> None:
    mine = metaspace("never")
    path, texts = write(mine, tmp_path / "m.gguf"), [text for text in odd_strings(500) if text]
    assert llama_ids(path, texts) == [mine.encode(text) for text in texts]


def test_digits_have_a_name(tmp_path: Path) -> None:
    mine = train(bytewise(pre_tokenizers.Digits(individual_digits=True)))
    path, texts = write(mine, tmp_path / "m.gguf"), odd_strings(500)
    assert llama_ids(path, texts) == [mine.encode(text) for text in texts]


def test_an_unknown_pre_tokenizer_is_named(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("klingon")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.warns(UserWarning, match="the pre-tokenizer 'klingon' is not supported; supported: .*bloom, "):
        assert from_gguf(path) is None


def test_nfc_is_written_with_a_warning(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="does not apply this tokenizer's NFC normalizer"):
        write(train(bytewise(), normalizers.NFC()), tmp_path / "m.gguf")
    assert json.loads(train(bytewise()).json)["pre_tokenizer"]["pretokenizers"][0]["use_regex"]
    assert WORD_RULES["gpt-2"].splits[0] == GPT2


def test_an_unknown_pre_tokenizer_blocks_only_text(tmp_path: Path) -> None:
    """`cost`, ids and a tokenizer from elsewhere still work, and the reason is a warning."""
    import clearhead
    from clearhead.models.gguf.write import save_gguf

    mine = train(split_words(WORD_RULES["gpt-2"]))
    mine.save(tmp_path / "elsewhere")
    sizes = {"dim": 32, "layers": 1, "heads": 2, "hidden": 32, "vocabulary": mine.vocabulary}
    save_gguf(clearhead.build(llama(**sizes)), tmp_path / "m.gguf", mine)
    data = (tmp_path / "m.gguf").read_bytes()
    assert data.count(b"gpt-2") == 1
    (tmp_path / "m.gguf").write_bytes(data.replace(b"gpt-2", b"xyz-9"))
    with pytest.raises(TokenizerError, match="the pre-tokenizer 'xyz-9' is not supported; supported: "):
        Tokenizer.load(tmp_path / "m.gguf")
    path = str(tmp_path / "m.gguf")
    model = clearhead.load(path)
    with pytest.warns(UserWarning, match="'xyz-9' is not supported"):
        assert len(model.generate([[1, 2]], max_new_tokens=3)[0].tokens) <= 3
    with pytest.raises(ValueError, match=r"has no tokenizer .*--tokenizer"):
        model.generate("the dog", max_new_tokens=3)
    assert CliRunner().invoke(cli, ["cost", path]).exit_code == 0
    assert CliRunner().invoke(cli, ["inspect", path, "5 3", "--ids"]).exit_code == 0
    given = ["--tokenizer", str(tmp_path / "elsewhere"), "--max-new-tokens", "3"]
    result = CliRunner().invoke(cli, ["generate", path, "the dog", *given])
    assert result.exit_code == 0, result.output
