"""Where documents come from, and what is reported of data that cannot be used."""

from __future__ import annotations

import gzip
import io
import json
import os
import sys
import threading
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from clearhead.data import Corpus, DataError, Document, chat, documents, sources, split, standard_library
from clearhead.data.parts import parts


def texts(corpus: Corpus) -> dict[str, str]:
    return {document.name: "".join(text for text, _ in document.pieces) for document in corpus}


def lines(*records: object) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "b.txt").write_bytes("zweite Zeile\r\nüber\n".encode())
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "one.md").write_text("one", encoding="utf-8")
    (tmp_path / "a" / "two.jsonl").write_text(lines({"text": "two"}, {"text": "three"}))
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "d.jsonl.gz").write_bytes(gzip.compress(lines({"prompt": "q", "completion": "a"}).encode()))
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".secret").write_text("hidden")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("hidden too")
    return tmp_path


def test_a_folder_is_read_in_order(folder: Path) -> None:
    corpus = documents([folder])
    assert list(texts(corpus).values()) == ["zweite Zeile\r\nüber\n", "packed", "qa", "one", "two", "three"]
    assert f"{folder.as_posix()}/a/two.jsonl, line 2" in texts(corpus)
    assert corpus.summary.startswith("6 files, ")
    assert corpus.summary.endswith("(skipped: 2 hidden, 1 binary)")
    assert list(corpus) == list(corpus), "it can be read again"


def test_files_and_patterns(folder: Path) -> None:
    assert list(texts(documents([folder / "a/one.md", folder / "b.txt"])).values()) == ["one", "zweite Zeile\r\nüber\n"]
    assert list(texts(documents([f"{folder}/**/*.md", f"{folder}/c.*"])).values()) == ["one", "packed"]


def test_the_run_skips_its_own_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = list(texts(documents([folder])))
    run = folder / "runs" / "lm"
    (run / "best").mkdir(parents=True)
    for path in (run / "metrics.jsonl", run / "best" / "README.md"):
        path.write_text("what the run writes")
    monkeypatch.chdir(folder)
    assert list(texts(documents([folder], Path("runs/lm")))) == before
    assert list(texts(documents(["**/*.md"], run))) == ["a/one.md"]
    for path in (run / ".lock", run / "recipe.json"):
        path.touch()
    later = documents([folder], folder / "runs" / "chars")
    assert list(texts(later)) == before, "another run is skipped too"
    assert "1 run" in later.summary
    inside = run / "text"
    inside.mkdir()
    (inside / "three.md").write_text("three")
    for path in (inside, f"{inside}/*.md", inside / "three.md"):
        assert list(texts(documents([path], run)).values()) == ["three"]
    with pytest.raises(DataError, match=r"runs/lm is the run's own folder; choose another"):
        documents(["runs/lm"], run)
    with pytest.raises(DataError, match=r"no file matches runs/lm/\*\.jsonl outside of .*lm, the run itself"):
        documents(["runs/lm/*.jsonl"], run)


def test_no_path_and_two_standard_inputs_are_refused() -> None:
    with pytest.raises(DataError, match="a path of the data is empty"):
        documents([""])
    with pytest.raises(DataError, match="standard input can be read only once"):
        documents(["-", "-"])


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name")
def test_a_pipe_is_refused_as_a_corpus_but_can_be_read_once(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(DataError, match="pipe is neither a file nor a folder; give a pipe as -"):
        documents([pipe])
    for raw in (b"one\ntwo\n", gzip.compress(b"one\ntwo\n")):
        writer = threading.Thread(target=pipe.write_bytes, args=(raw,))
        writer.start()
        with sources.open_file(pipe) as file:
            assert file.read() == b"one\ntwo\n"
        writer.join()


def test_a_mark_at_the_beginning_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfa\xef\xbb\xbf")
    assert list(texts(documents([tmp_path])).values()) == ["a\ufeff"]


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(
    ("data", "names"),
    [
        ("plain\ntext\n", ["standard input"]),
        (lines({"text": "a"}, {"text": "b"}), ["standard input, line 1", "standard input, line 2"]),
    ],
)
def test_standard_input(data: str, names: list[str], packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = gzip.compress(data.encode()) if packed else data.encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw)))
    monkeypatch.setattr(sources, "_standard_input", None)
    corpus = documents(["-"])
    assert list(texts(corpus)) == names
    assert list(corpus) == list(corpus), "it can be read again"


def test_standard_input_is_for_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DataError, match="the processes of torchrun cannot share standard input"):
        documents(["-"])


def test_loss_is_taken_on_answers_only(tmp_path: Path) -> None:
    turns = [("system", "S"), ("user", "U"), ("assistant", "A"), ("user", "V"), ("assistant", "B")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "x.jsonl").write_text(lines({"prompt": "p", "completion": "c"}) + "\n" + lines({"messages": messages}))
    one, two = documents([tmp_path / "x.jsonl"])
    assert one.pieces == (("p", False), ("c", True))
    assert two.name.endswith("line 3"), "an empty line is passed over, and counted"
    assert two.pieces == (
        ("<|system|>\nS<|end|>\n<|user|>\nU<|end|>\n<|assistant|>\n", False),
        ("A<|end|>\n", True),
        ("<|user|>\nV<|end|>\n<|assistant|>\n", False),
        ("B<|end|>\n", True),
    )
    assert two.pieces == chat(messages)


BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no path": (lambda f: documents([f / "none"]), r"there is no file or folder .*none"),
    "no match": (lambda f: documents([f"{f}/*.rst"]), r"no file matches .*\*\.rst"),
    "binary": (lambda f: documents([f / "picture.png"]), "picture.png is not text"),
    "empty": (lambda f: list(documents([f / "empty.txt"])), "the corpus is empty: there is no text in 1 file, 0 bytes"),
    "nothing": (lambda f: list(documents([])), "the corpus is empty: there is no text in 0 files"),
    "share": (lambda f: split(documents([f]), share=1.0), r"validation share is 1\.0"),
    "too short": (lambda f: list(split(documents([f / "a/one.md"]), share=0.9)[0]), "no text in the training part of"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_paths_are_refused(name: str, folder: Path) -> None:
    act, message = BAD[name]
    with pytest.raises(DataError, match=message):
        act(folder)


CONTENTS = {
    "deep.jsonl": (
        b"[" * 200_000 + b"\n",
        r"deep\.jsonl, line 1 is nested deeper than 64 levels",
    ),
    "long.jsonl": (b'{"text": ' + b"1" * 6000 + b"}\n", r"long\.jsonl, line 1: 'text' is a number"),
    "bad.jsonl": (b'{"text": "a"}\n{"text": }\n', r"bad\.jsonl, line 2 is not JSON: Expecting value at column 10"),
    "list.jsonl": (b"[1]\n", r"line 1 is a list, but must be an object with 'text', or 'prompt'"),
    "keys.jsonl": (b'{"txt": "a", "id": 3}\n', r"line 1 has the keys 'txt', 'id', but needs 'text', or 'prompt'"),
    "number.jsonl": (b'{"text": 3}\n', r"line 1: 'text' is a number, but must be a text"),
    "half.jsonl": (b'{"text": "a\\ud800"}\n', r"line 1 contains half of a surrogate pair"),
    "message.jsonl": (b'{"messages": [{"role": "user"}]}\n', r"line 1: a message: 'content' is missing or null"),
    "silent.jsonl": (b'{"messages": [{"role": "user", "content": "x"}]}\n', "no message has the role 'assistant'"),
    "messages.jsonl": (b'{"messages": "hello"}\n', "'messages' is a text, but must be a list of objects"),
    "short.gz": (gzip.compress(b"abc" * 99)[:-9], r"short\.gz cannot be decompressed: it is damaged or cut short"),
}


@pytest.mark.parametrize("name", CONTENTS)
def test_bad_contents_are_refused(name: str, tmp_path: Path) -> None:
    data, message = CONTENTS[name]
    (tmp_path / name).write_bytes(data)
    with pytest.raises(DataError, match=message):
        list(documents([tmp_path / name]))


def test_a_file_too_large_to_hold_comes_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "BLOCK", 50)
    monkeypatch.setattr(sources, "READ", 7)
    text = "".join(f"line {number} of é\n" for number in range(40))
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    found = list(documents([tmp_path]))
    assert [document.continues for document in found] == [False] + [True] * (len(found) - 1)
    assert "".join(document.pieces[0][0] for document in found) == text
    assert all(document.pieces[0][0].endswith("\n") for document in found)
    assert max(document.characters for document in found) < 100
    for corpus, share in zip(split(documents([tmp_path])), (0.9, 0.1), strict=True):
        assert [document.continues for document in corpus] == [number > 0 for number in range(len(list(corpus)))]
        assert sum(document.characters for document in corpus) == pytest.approx(share * len(text), abs=1)


@pytest.mark.parametrize("text", ["word\n" * 50, "word " * 50, "w" * 250, "w\n\n" * 80, "", "one"])
def test_parts_make_the_whole(text: str) -> None:
    found = list(parts(text, 20))
    assert "".join(found) == text
    assert max(map(len, found)) <= 40
    assert min(map(len, found[:-1]), default=20) >= 20


def corpus_of(*texts: str) -> Corpus:
    return Corpus(lambda: (Document(str(n), ((text, True),)) for n, text in enumerate(texts)), "some texts")


@pytest.mark.parametrize("share", [0.1, 0.25, 0.3, 0.5, 0.9])
def test_the_split_is_by_document(share: float) -> None:
    corpus = corpus_of(*(f"text {number}" for number in range(1000)))
    training, validation = split(corpus, share=share, seed=3)
    names = [document.name for document in validation]
    assert len(names) == pytest.approx(1000 * share, abs=1)
    assert sorted([*names, *(document.name for document in training)]) == sorted(d.name for d in corpus)
    assert names == [document.name for document in split(corpus, share=share, seed=3)[1]]
    assert names != [document.name for document in split(corpus, share=share, seed=4)[1]]
    gaps = {int(b) - int(a) for a, b in pairwise(names)}
    assert len(gaps) > 1, "not simply every tenth"
    few = corpus_of(*(f"text {number}" for number in range(10)))
    assert [list(side) != [] for side in split(few, share=share)] == [True, True]


def test_one_text_is_split_by_position() -> None:
    text = "".join(chr(97 + number % 26) for number in range(1003))
    training, validation = split(corpus_of(text))
    assert texts(training) == {"0": text[:902]}
    assert texts(validation) == {"0": text[902:]}
    pieces = Corpus(lambda: iter([Document("x", (("p" * 95, False), ("c" * 105, True)))]), "one")
    training, validation = split(pieces, share=0.25)
    assert [document.pieces for document in training] == [(("p" * 95, False), ("c" * 55, True))]
    assert [document.pieces for document in validation] == [(("c" * 50, True),)]


def test_a_few_conversations_are_split_whole() -> None:
    chats = [Document(str(n), ((f"question {n}", False), (f"answer {n}", True))) for n in range(4)]
    training, validation = (list(side) for side in split(Corpus(lambda: iter(chats), "four chats")))
    assert (len(training), len(validation)) == (3, 1)
    assert sorted([*training, *validation], key=lambda document: document.name) == chats


def test_the_standard_library_is_a_corpus() -> None:
    corpus = standard_library()
    found = texts(corpus)
    assert len(found) > 400
    assert sum(map(len, found.values())) > 5_000_000
    assert "def dumps(" in found["json/__init__.py"]
    assert not [name for name in found if "test" in name.split("/") or "site-packages" in name]
    assert "for_stmt" in found["help('for')"]
    assert list(found) == list(texts(standard_library()))
    assert "modules" in corpus.summary
