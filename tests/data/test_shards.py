"""Shards hold the tokens of the documents, take up where they were left, and are never silently of something else."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from clearhead.configs.data import BytePairConfig, CharactersConfig
from clearhead.data import DataError, Document, Shards, build
from clearhead.data.parts import PART
from clearhead.data.shards import Index
from clearhead.tokenize import make

from .tools import by_bytes, bytes_tokenizer, files, plain

END = 256
PROSE = "".join(
    f"{number} sheep; {'x' * (number % 7)} said the {number % 11}.\n\n  Indented\n" for number in range(9000)
)


def test_tokens_ends_and_documents(tmp_path: Path) -> None:
    shards = by_bytes(plain("ab", "c", "dé"), tmp_path / "s")
    assert shards.tokens(0, len(shards)).tolist() == [97, 98, END, 99, END, 100, 0xC3, 0xA9, END]
    assert shards.document_starts.tolist() == [0, 3, 5]
    assert (len(shards), shards.documents, shards.bytes, shards.scored_bytes) == (9, 3, 6, 6)
    assert shards.tokens(2, 5).dtype == np.uint16
    assert sorted(files(tmp_path / "s")) == ["documents.bin", "index.json", "tokens-00000.bin"]
    assert shards.tokenizer == bytes_tokenizer().fingerprint


def test_characters_have_no_end(tmp_path: Path) -> None:
    shards = build(plain("ab", "ba"), make(CharactersConfig(), ["ab"]), tmp_path)
    assert shards.tokens(0, 4).tolist() == [0, 1, 1, 0]
    assert shards.document_starts.tolist() == [0, 2]


def test_what_has_no_loss_is_marked(tmp_path: Path) -> None:
    chats = [Document("a", (("xy", True),)), Document("b", (("pp", False), ("ccc", True), ("q", False)))]
    shards = by_bytes(chats, tmp_path)
    ignored = shards.ignored_rows(np.array([0]), len(shards))
    assert ignored is not None
    assert ignored[0].astype(int).tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1]  # the end goes with the piece it ends
    assert (len(shards), shards.scored) == (10, 6)
    assert (shards.bytes, shards.scored_bytes) == (8, 5)


def test_long_documents_are_cut_without_a_trace(tmp_path: Path) -> None:
    """Parts are encoded side by side; the tokens are those of the whole text."""
    tokenizer = make(BytePairConfig(vocabulary=600), [PROSE])
    assert len(PROSE) > 5 * PART
    shards = build(plain(PROSE), tokenizer, tmp_path)
    whole = tokenizer.inner.encode(PROSE, add_special_tokens=False).ids
    assert shards.tokens(0, len(shards)).tolist() == [*whole, tokenizer.end]
    assert shards.documents == 1


def test_a_document_that_continues_is_one(tmp_path: Path) -> None:
    pieces = [Document("a", (("ab", True),)), Document("a", (("cd", True),), continues=True), *plain("e")]
    shards = by_bytes(pieces, tmp_path)
    assert shards.tokens(0, len(shards)).tolist() == [97, 98, 99, 100, END, 101, END]
    assert shards.document_starts.tolist() == [0, 5]


def test_shards_are_one_row_whichever_files_they_are_in(tmp_path: Path) -> None:
    texts = [f"document {number} " * (number % 5 + 1) for number in range(40)]
    pieces = [Document(str(n), ((text, n % 3 > 0), ("!", True))) for n, text in enumerate(texts)]
    one, many = by_bytes(pieces, tmp_path / "1"), by_bytes(pieces, tmp_path / "n", shard_tokens=100)
    assert (len(one.arrays), len(many.arrays)) == (1, 13)
    assert len(one) == len(many)
    starts = np.arange(0, len(one) - 300)
    np.testing.assert_array_equal(one.rows(starts, 300), many.rows(starts, 300))
    np.testing.assert_array_equal(one.ignored_rows(starts, 300), many.ignored_rows(starts, 300))
    np.testing.assert_array_equal(one.document_starts, many.document_starts)
    assert (one.bytes, one.corpus) == (many.bytes, many.corpus)
    assert min(map(len, many.arrays[:-1])) >= 100


def test_a_large_vocabulary_takes_four_bytes(tmp_path: Path) -> None:
    characters = "".join(map(chr, range(0x4E00, 0x4E00 + 3))) + "".join(map(chr, range(0x20000, 0x20000 + 2**16)))
    shards = build(plain(characters), make(CharactersConfig(), [characters]), tmp_path)
    assert shards.tokens(0, len(shards)).tolist() == list(range(2**16 + 3))
    assert Index.load(tmp_path).dtype == "uint32"  # type: ignore[union-attr]


def test_made_already_is_not_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_bytes(plain("ab", "c"), tmp_path)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(by_bytes(plain("ab", "c"), tmp_path)) == 5
    assert before == {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def stopping(count: int) -> Iterator[Document]:
    """Some of the documents, then a power cut."""
    yield from DOCUMENTS[:count]
    raise KeyboardInterrupt


DOCUMENTS = [Document(str(n), ((f"text {n} " * (n % 9 + 1), True), ("?" * (n % 4), n % 2 == 0))) for n in range(200)]


@pytest.mark.parametrize("count", [0, 1, 57, 130, 199])
def test_stopped_and_resumed_is_the_same_to_the_byte(
    count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["clearhead.data.build"], "BATCH", 64)
    by_bytes(DOCUMENTS, tmp_path / "whole", shard_tokens=700)
    with pytest.raises(KeyboardInterrupt):
        by_bytes(stopping(count), tmp_path / "stopped", shard_tokens=700)
    index = Index.load(tmp_path / "stopped")
    assert count < 50 or (index is not None and 0 < len(index.shards) < 13)
    seen: list[tuple[int, int]] = []
    build(
        DOCUMENTS,
        bytes_tokenizer(),
        tmp_path / "stopped",
        shard_tokens=700,
        progress=lambda size, tokens: seen.append((size, tokens)),
    )
    assert files(tmp_path / "stopped") == files(tmp_path / "whole")
    shards = Shards.open(tmp_path / "whole")
    assert seen == sorted(seen)
    assert seen[-1] == (shards.bytes, len(shards))
    assert not index or seen[0][1] > index.total("tokens"), "finished shards are not made again"


KILLED = """
import sys, time
from clearhead.configs.data import BytesConfig
from clearhead.data import Document, build
from clearhead.tokenize import make
documents = [Document(str(n), ((f"text {n} " * 4000, True), ("?" * (n % 4), False))) for n in range(300)]
build(documents, make(BytesConfig(), []), sys.argv[1], shard_tokens=500_000)
"""


def test_killed_at_any_moment_it_goes_on(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED]
    subprocess.run([*command, str(tmp_path / "whole")], check=True)
    killed = tmp_path / "killed"
    finished = []
    for want in (0, 2, 5):  # files of tokens to wait for
        process = subprocess.Popen([*command, str(killed)])
        while len(list(killed.glob("tokens-*.bin*"))) <= want and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        index = Index.load(killed)
        finished.append(0 if index is None else len(index.shards))
    assert 0 < finished[-1] < 22
    subprocess.run([*command, str(killed)], check=True)
    assert files(killed) == files(tmp_path / "whole")


def shorten(folder: Path) -> None:
    data = (folder / "tokens-00001.bin").read_bytes()
    (folder / "tokens-00001.bin").write_bytes(data[:-2])


def lose(folder: Path) -> None:
    (folder / "tokens-00002.bin").unlink()


def flip(folder: Path) -> None:
    data = bytearray((folder / "tokens-00001.bin").read_bytes())
    data[10] ^= 1
    (folder / "tokens-00001.bin").write_bytes(data)


def flip_documents(folder: Path) -> None:
    data = bytearray((folder / "documents.bin").read_bytes())
    data[8] ^= 1
    (folder / "documents.bin").write_bytes(data)


@pytest.mark.filterwarnings("ignore:.*building the token shards again")
@pytest.mark.parametrize("damage", [shorten, lose, flip, flip_documents])
def test_a_damaged_shard_is_detected_and_built_again(damage: Callable[[Path], None], tmp_path: Path) -> None:
    by_bytes(DOCUMENTS, tmp_path, shard_tokens=700)
    before = files(tmp_path)
    damage(tmp_path)
    with pytest.raises(DataError, match=r"(tokens-0000\d|documents)\.bin (is missing or cut short|was changed)"):
        Shards.open(tmp_path)
    by_bytes(DOCUMENTS, tmp_path, shard_tokens=700)
    assert files(tmp_path) == before


@pytest.mark.parametrize("stop", [None, 130])
def test_other_text_or_tokenizer_is_refused(stop: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["clearhead.data.build"], "BATCH", 64)
    with contextlib.suppress(KeyboardInterrupt):
        by_bytes(DOCUMENTS if stop is None else stopping(stop), tmp_path, shard_tokens=100)
    before = files(tmp_path)
    assert len(before) > 5
    other = [Document("0", (("Text", True),)), *DOCUMENTS[1:]]
    for wrong in (other, DOCUMENTS[:1], *([] if stop else [[*DOCUMENTS, *plain("more")]])):
        with pytest.raises(DataError, match="were made from other text; remove the folder"):
            by_bytes(wrong, tmp_path, shard_tokens=100)
    with pytest.raises(DataError, match="were made by another tokenizer; remove the folder"):
        build(DOCUMENTS, make(CharactersConfig(), ["text?0123456789 "]), tmp_path, shard_tokens=100)
    assert files(tmp_path) == before, "nothing is overwritten"


def test_what_cannot_be_opened_is_said(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no token shards: it has no index\.json"):
        Shards.open(tmp_path)
    by_bytes(plain("abc"), tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps(index | {"complete": False}))
    with pytest.raises(DataError, match="are not finished; build them again to continue"):
        Shards.open(tmp_path)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(DataError, match=r"index\.json is damaged or of another version"):
        Shards.open(tmp_path)


def test_an_unknown_character_is_named_with_its_document(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"text 1: the character 'é' \(U\+00E9\), at place 1"):
        build(plain("ab", "aé"), make(CharactersConfig(), ["ab"]), tmp_path)


def test_a_full_disk_is_said_and_what_is_finished_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, calls = os.fsync, []

    def full(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    by_bytes(DOCUMENTS, tmp_path / "whole", shard_tokens=700)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(
        DataError, match=r"cannot write token shards to .*: No space left on device; finished shards are"
    ):
        by_bytes(DOCUMENTS, tmp_path / "full", shard_tokens=700)
    monkeypatch.setattr(os, "fsync", sync)
    index = Index.load(tmp_path / "full")
    assert index is not None
    assert index.shards
    by_bytes(DOCUMENTS, tmp_path / "full", shard_tokens=700)
    assert files(tmp_path / "full") == files(tmp_path / "whole")
