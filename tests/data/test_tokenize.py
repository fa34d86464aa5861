"""Tokenizers: text comes back as it was, transformers reads what is saved, and what cannot be done is reported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clearhead.configs import ConfigError, dumps, loads
from clearhead.configs.data import BytePairConfig, BytesConfig, CharactersConfig, TokenizerConfig, TokenizerFileConfig
from clearhead.data import CHAT_TEMPLATE, chat
from clearhead.data.parts import AFTER_LINE, BEFORE_WORD
from clearhead.tokenize import Tokenizer, TokenizerError, make

SHARED = Path(os.environ.get("CLEARHEAD_SHARED", Path(__file__).parents[3] / "shared"))
TEXT = (
    "def area(radius):\n    '''Of a circle: πr².'''\n    return 3.14159 * radius ** 2\n\n\nprint(area(2), area(7))\n"
    * 5
)
SPACES = [" \n \n\n  \t.\n\n=  a\r\n\r\n'' .. == 'a ab ba1 11\n\n\n\n    \n" * 9] * 9
KINDS: dict[str, TokenizerConfig] = {
    "byte pairs": BytePairConfig(vocabulary=300),
    "characters": CharactersConfig(),
    "bytes": BytesConfig(),
}
kinds = pytest.mark.parametrize("config", [pytest.param(config, id=name) for name, config in KINDS.items()])


@kinds
def test_text_comes_back(config: TokenizerConfig) -> None:
    tokenizer = make(config, [TEXT])
    ids = tokenizer.encode(TEXT)
    assert tokenizer.decode(ids) == TEXT
    assert tokenizer.encode_batch([TEXT, "", TEXT[3:9]]) == [ids, [], tokenizer.encode(TEXT[3:9])]
    assert max(ids) < tokenizer.vocabulary


BYTE_LEVEL = {name: make(KINDS[name], [TEXT]) for name in ("byte pairs", "bytes")}
BYTE_LEVEL["greedy pairs"] = make(BytePairConfig(vocabulary=280), SPACES)


@pytest.mark.parametrize("name", BYTE_LEVEL)
@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_from_bytes(name: str, text: str) -> None:
    assert BYTE_LEVEL[name].decode(BYTE_LEVEL[name].encode(text)) == text


@given(text=st.text(alphabet="ab 1\n\t\r'.=é"))
@settings(max_examples=300, deadline=None)
def test_where_a_text_may_be_cut_no_token_is(text: str) -> None:
    tokenizer = BYTE_LEVEL["greedy pairs"]
    whole = tokenizer.encode(text)
    for pattern in (AFTER_LINE, BEFORE_WORD):
        for place in pattern.finditer(text):
            at = place.start()
            assert tokenizer.encode(text[:at]) + tokenizer.encode(text[at:]) == whole


def test_sizes_and_ends() -> None:
    pairs, characters, single = (make(config, [TEXT]) for config in KINDS.values())
    assert (pairs.vocabulary, pairs.end) == (300, 299)
    assert (characters.vocabulary, characters.end) == (len(set(TEXT)), None)
    assert (single.vocabulary, single.end) == (257, 256)
    assert single.encode("aé") == [97, 0xC3, 0xA9]
    assert characters.encode("dea") == [sorted(set(TEXT)).index(character) for character in "dea"]
    assert len(pairs.encode(TEXT)) < len(single.encode(TEXT)) / 1.5


def test_a_special_token_in_a_text_is_text() -> None:
    """A document cannot end itself, nor the one before it."""
    tokenizer = make(BytesConfig(), [])
    text = "a<|endoftext|>b"
    assert tokenizer.end not in tokenizer.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([97, 256, 98]) == "ab"


@kinds
def test_transformers_reads_it(config: TokenizerConfig, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = make(config, [TEXT])
    ours.save(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode(TEXT)
    assert theirs(TEXT)["input_ids"] == ids
    assert theirs.decode(ids) == TEXT
    assert theirs.eos_token_id == ours.end
    assert len(theirs) == ours.vocabulary


def test_transformers_lays_out_a_chat_as_we_do(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    make(BytesConfig(), []).save(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    turns = [("system", "Be kind."), ("user", "Two and two?"), ("assistant", "Four.\n"), ("user", "And three?")]
    messages = [{"role": role, "content": content} for role, content in turns]
    for answering in (False, True):
        ours = "".join(text for text, _ in chat(messages, answering))
        assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=answering) == ours


@kinds
def test_saved_and_loaded_is_the_same(config: TokenizerConfig, tmp_path: Path) -> None:
    one = make(config, [TEXT])
    one.save(tmp_path / "a")
    two = make(TokenizerFileConfig(path=str(tmp_path / "a")), [])
    three = Tokenizer.load(tmp_path / "a" / "tokenizer.json")
    for other in (two, three):
        assert (other.fingerprint, other.end, other.alphabet) == (one.fingerprint, one.end, one.alphabet)
        assert other.encode(TEXT) == one.encode(TEXT)
    two.save(tmp_path / "b")
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_byte_pairs_are_the_same_in_every_process() -> None:
    code = (
        "from clearhead.configs.data import BytePairConfig; from clearhead.tokenize import make; import this; "
        "print(make(BytePairConfig(vocabulary=320), [this.s] * 3).fingerprint)"
    )
    prints = {subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout for _ in range(3)}
    assert len(prints) == 1
    assert len(prints.pop().split()[-1]) == 64


def test_it_learns_from_the_beginning_only_if_told() -> None:
    whole = make(BytePairConfig(vocabulary=260), ["aaaa bb" * 9, "xyxyxyxyxy" * 99])
    part = make(BytePairConfig(vocabulary=260, learn_from=10), ["aaaa bb" * 9, "xyxyxyxyxy" * 99])
    assert len(whole.encode("xyxy")) < len(part.encode("xyxy")) == 4


def test_somebody_elses_file() -> None:
    folder = SHARED / "models" / "stories15M"
    if not folder.exists():
        pytest.skip("the shared checkpoint is not here")
    tokenizer = Tokenizer.load(folder)
    text = "Once upon a time, there was a little girl."
    assert (tokenizer.vocabulary, tokenizer.end) == (32000, 2)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode(text)[0] != 1, "no start token in the middle of a corpus"


def test_what_cannot_be_made_is_said(tmp_path: Path) -> None:
    assert make(BytePairConfig(), [TEXT]).vocabulary < 4096, "a small text has a small vocabulary"
    with pytest.raises(ConfigError, match="vocabulary is 256, but must be above 256"):
        BytePairConfig(vocabulary=256)
    with pytest.raises(TokenizerError, match=r"the character '€' \(U\+20AC\), at place 2, is not among the 3"):
        make(CharactersConfig(), ["abc"]).encode("ab€")
    with pytest.raises(TokenizerError, match="no text to take characters from"):
        make(CharactersConfig(), [])
    with pytest.raises(TokenizerError, match="half of a surrogate pair"):
        make(BytesConfig(), []).encode("a\ud800")
    with pytest.raises(TokenizerError, match=r"has no tokenizer: none of tokenizer\.json, vocab\.txt"):
        Tokenizer.load(tmp_path / "none")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"is not a tokenizer\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("config", [*KINDS.values(), TokenizerFileConfig(path="x")], ids=lambda config: config.kind())
def test_configs_survive_json(config: TokenizerConfig) -> None:
    assert loads(dumps(config)) == config
