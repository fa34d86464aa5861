"""A tokenizer made from a vocabulary and merges splits texts as transformers' GPT-2 tokenizer does."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from clearhead.configs import BytePairConfig
from clearhead.tokenize import Tokenizer, TokenizerError, make

TEXT = "The quick brown fox, it's 12 o'clock: naïve café 你好 <|endoftext|> lower lowest  lower\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`vocab.json` and `merges.txt` of a small byte-level BPE."""
    folder = tmp_path_factory.mktemp("merges")
    made = make(BytePairConfig(vocabulary=320), [TEXT.replace("<|endoftext|>", "") * 5])
    model = json.loads(made.json)["model"]
    vocabulary = model["vocab"] | {"<|endoftext|>": len(model["vocab"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    lines = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(lines) + "\n")
    return folder


def test_merges_split_as_transformers_does(files: Path) -> None:
    from transformers import GPT2Tokenizer

    theirs = GPT2Tokenizer(vocab=str(files / "vocab.json"), merges=str(files / "merges.txt"))
    ours = Tokenizer.load(files)
    assert ours.prompt(TEXT) == theirs(TEXT)["input_ids"]
    assert ours.encode("naïve lower") == theirs("naïve lower")["input_ids"]
    ids = ours.prompt(TEXT)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, clean_up_tokenization_spaces=False)
    assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert ours.end == theirs.eos_token_id


def test_pairs_and_lines_of_merges_mean_the_same() -> None:
    vocabulary = {"l": 0, "o": 1, "w": 2, "lo": 3, "low": 4}
    lines = Tokenizer.from_vocabulary(vocabulary, ["l o", "lo w"], begin="<s>")
    pairs = Tokenizer.from_vocabulary(vocabulary, [("l", "o"), ("lo", "w")], begin="<s>")
    assert lines.fingerprint == pairs.fingerprint
    assert lines.prompt("low<|endoftext|>") == [lines.token("bos_token"), 4, lines.end]
    assert lines.prompt("low", around=False) == lines.encode("low") == [4]
    assert lines.end == 5


@pytest.mark.parametrize(("merges", "sentence"), [
    (["l o w"], "the merge 'l o w' is not a pair of tokens"),
    (["o w"], "the merge 'o w' needs 'ow', which has no id"),
])  # fmt: skip
def test_merges_that_cannot_be_are_refused(merges: list[str], sentence: str) -> None:
    with pytest.raises(TokenizerError, match=sentence):
        Tokenizer.from_vocabulary({"l": 0, "o": 1, "w": 2}, merges)
