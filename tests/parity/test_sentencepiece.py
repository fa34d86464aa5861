"""Our reading of SentencePiece models against the library itself, and of Marian's three files against transformers."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import pytest

from clearhead.tokenize import Tokenizer, TokenizerError
from clearhead.tokenize.pieces import from_pieces, read_pieces

sentencepiece = pytest.importorskip("sentencepiece")
SHARED = Path(os.environ.get("CLEARHEAD_SHARED", Path(__file__).parents[3] / "shared"))

ENGLISH = """The encoder reads the sentence and the decoder writes another one.
Attention weighs every word of the source for each word that is written.
A good translation keeps the meaning, the tone and the order of the thoughts.
Reading is slow and writing is slower, but reading again is the slowest of all."""
GERMAN = """Der Encoder liest den Satz und der Decoder schreibt einen anderen.
Die Aufmerksamkeit wägt jedes Wort der Quelle für jedes Wort, das geschrieben wird.
Eine gute Übersetzung bewahrt den Sinn, den Ton und die Reihenfolge der Gedanken.
Lesen ist langsam und Schreiben langsamer, aber das Wiederlesen ist am langsamsten."""
TEXTS = [
    "The decoder reads the meaning.",
    "  two  spaces   and a tab\tand ﬁne ½ full-width ＡＢＣ ",
    "Übersetzung in an English sentence: quelle für Wort",
    "unknown 日本語 letters, 日 and ✓ among words",
    "",
    " ",
    "x",
    "reading\nwriting",
    "🙂🙂",
]


def trained(folder: Path, text: str, kind: str, size: int, **more: object) -> Path:
    (folder / f"{kind}.txt").write_text(text, encoding="utf-8")
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / f"{kind}.txt"),
        model_prefix=str(folder / kind),
        model_type=kind,
        vocab_size=size,
        hard_vocab_limit=False,
        minloglevel=2,
        **more,
    )
    return folder / f"{kind}.model"


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
@pytest.mark.parametrize(
    "more",
    [{}, {"byte_fallback": True, "vocab": 380}, {"add_dummy_prefix": False, "remove_extra_whitespaces": False}],
    ids=["plain", "bytes", "spaces as they are"],
)
def test_a_model_says_what_the_library_says(kind: str, more: dict[str, object], tmp_path: Path) -> None:
    options = dict(more)
    path = trained(tmp_path, ENGLISH, kind, options.pop("vocab", 120), **options)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path))
    ours = Tokenizer(from_pieces(read_pieces(path)))
    for text in TEXTS:
        want = theirs.encode(text)
        assert ours.encode(text) == want, text
        known = [id for id in want if id != theirs.unk_id()]
        assert ours.decode(known) == theirs.decode(known), text


@pytest.fixture
def marian(tmp_path: Path) -> Path:
    """Marian's files: two models, and a table of other ids that lacks one piece and has languages."""
    for side, text in {"source": ENGLISH, "target": GERMAN}.items():
        (tmp_path / side).mkdir()
        trained(tmp_path / side, text, "unigram", 130).rename(tmp_path / f"{side}.spm")
    names = {name for side in ("source", "target") for name in read_pieces(tmp_path / f"{side}.spm").names[3:]}
    names.remove("▁and" if "▁and" in names else "s")
    table = ["</s>", "<unk>", *sorted(names), ">>deu<<", "<pad>"]
    (tmp_path / "vocab.json").write_text(json.dumps({name: id for id, name in enumerate(table)}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"source_lang": "en", "target_lang": "de"}))
    return tmp_path


def in_transformers(folder: Path) -> object:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it would like another package for punctuation
        return transformers.MarianTokenizer.from_pretrained(folder)


def test_marian_equals_transformers(marian: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    theirs, ours = in_transformers(marian), Tokenizer.load(marian)
    assert ours.vocabulary == theirs.vocab_size
    assert ours.end == theirs.eos_token_id
    for text in [*TEXTS, ">>deu<< The decoder reads.", ">>xxx<<reads", "a >>deu<< inside"]:
        assert ours.prompt(text) == theirs(text).input_ids, text
        want = theirs(text_target=text).input_ids
        assert [*ours.encode_target(text), ours.end] == want, text
        assert ours.decode(want) == theirs.decode(want, skip_special_tokens=True), text
    with pytest.raises(TokenizerError, match="has a tokenizer for each language"):
        ours.with_end()  # by which training would read both sides
    again = tmp_path_factory.mktemp("again")
    ours.save(again)
    assert in_transformers(again)(TEXTS[0]).input_ids == theirs(TEXTS[0]).input_ids
    assert Tokenizer.load(again).encode(TEXTS[2]) == ours.encode(TEXTS[2])


def test_a_marian_folder_translates_as_transformers_does(marian: Path) -> None:
    transformers = pytest.importorskip("transformers")
    import torch

    import clearhead
    from clearhead.configs import Wu
    from clearhead.tasks.translate import translate

    tokenizer = in_transformers(marian)
    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=tokenizer.vocab_size, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=64, decoder_ffn_dim=64, scale_embedding=True, init_std=0.3,
        max_position_embeddings=64, pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id, forced_eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    theirs = transformers.MarianMTModel(config).eval()
    theirs.generation_config.bad_words_ids = [[tokenizer.pad_token_id]]
    theirs.save_pretrained(marian)
    texts = ["The decoder reads the meaning.", "Reading is slow and writing is slower.", "x", "unknown 日本語 letters"]
    options = {"max_new_tokens": 12, "num_beams": 5, "length_penalty": 0.0, "do_sample": False}
    wanted = []
    for text in texts:
        (row,) = theirs.generate(**tokenizer([text], return_tensors="pt"), **options)
        wanted.append(tokenizer.decode(row, skip_special_tokens=True))
    found = translate(clearhead.load(marian), texts, max_new_tokens=12, length_penalty=Wu(0.0))
    assert [best.text for (best,) in found] == [text.strip() for text in wanted]
    assert len(set(wanted)) > 1
    ours, target = clearhead.load(marian), GERMAN.splitlines()[0]
    seen = ours.inspect(texts[0], target).model_input
    ids = [tokenizer.pad_token_id, *tokenizer(text_target=target).input_ids[:-1]]
    assert seen.inputs[0].tolist() == ids
    assert (seen.labels[0], seen.source_labels[-1]) == ("<pad>", "</s>")
    assert "".join(seen.labels[1:]).split() == tokenizer.decode(ids, skip_special_tokens=True).split()
    alone = [
        (id, label)
        for id, label in zip(ids[1:], seen.labels[1:], strict=True)
        if tokenizer(text_target=label).input_ids[:-1] == [id]
    ]
    assert alone
    assert [seen.find_token(label) for _, label in alone] == [id for id, _ in alone]


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda folder: (folder / "vocab.json").unlink(), "cannot read the tokenizer .*vocab.json: No such file"),
        (lambda folder: (folder / "vocab.json").write_text("{"), "vocab.json is not JSON"),
        (lambda folder: (folder / "vocab.json").write_text("{}"), "has no id for <unk>"),
        (lambda folder: (folder / "target.spm").unlink(), "cannot read .*target.spm: No such file"),
        (lambda folder: (folder / "target.spm").write_bytes(b"\xff" * 40), "target.spm is not a SentencePiece model"),
        (
            lambda folder: (folder / "source.spm").write_bytes((folder / "source.spm").read_bytes()[:-7]),
            "source.spm is not a SentencePiece model, or has been cut short",
        ),
    ],
)
def test_spoilt_files_are_one_sentence(marian: Path, spoil: object, sentence: str) -> None:
    spoil(marian)
    with pytest.raises(ValueError, match=sentence):
        Tokenizer.load(marian)


def test_a_folder_with_the_old_model_of_llama(tmp_path: Path) -> None:
    path = trained(tmp_path, ENGLISH, "bpe", 380, byte_fallback=True)
    path.rename(tmp_path / "tokenizer.model")
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = Tokenizer.load(tmp_path)
    assert ours.encode(TEXTS[3]) == theirs.encode(TEXTS[3])
    assert [ours.prompt(text) for text in TEXTS] == theirs.encode(TEXTS, add_bos=True)
    ours.save(tmp_path)
    assert Tokenizer.load(tmp_path).prompt(TEXTS[3]) == ours.prompt(TEXTS[3])
    (tmp_path / "tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text('{"add_bos_token": false}')
    assert Tokenizer.load(tmp_path).prompt(TEXTS[3]) == theirs.encode(TEXTS[3])
