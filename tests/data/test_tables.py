"""Tables, zstd and other encodings are read as documents."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from clearhead.data import DataError, documents


def texts(path: Path) -> list[str]:
    return ["".join(text for text, _ in document.pieces) for document in documents([path])]


ROWS = [{"text": "one, two", "id": 1}, {"text": 'three "four"\nfive', "id": 2}]


def test_a_long_cell_is_read_and_the_limit_of_csv_stays(tmp_path: Path) -> None:
    before = csv.field_size_limit()
    (tmp_path / "a.csv").write_text(f"text\n{'a' * 200_000}\n")
    assert len(texts(tmp_path / "a.csv")[0]) == 200_000
    assert csv.field_size_limit() == before


def test_csv_rows_are_documents(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text('text,id\n"one, two",1\n"three ""four""\nfive",2\n')
    assert texts(path) == ["one, two", 'three "four"\nfive']
    path.write_text("story\nonce\nupon\n")
    assert texts(path) == ["once", "upon"], "a single column needs no name"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(DataError, match=r"a\.csv, line 2 has the keys 'a', 'b', but needs 'text'"):
        texts(path)
    path.write_text("text,id\na,b,c\n")
    with pytest.raises(DataError, match="line 2 has more cells than the first line has names"):
        texts(path)


def test_parquet_and_datasets_folders_are_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.Table.from_pylist(ROWS)
    parquet.write_table(table, tmp_path / "a.parquet")
    assert texts(tmp_path / "a.parquet") == [row["text"] for row in ROWS]
    chats = pyarrow.Table.from_pylist([{"prompt": "2+2=", "completion": "4"}])
    parquet.write_table(chats, tmp_path / "b.parquet")
    (document,) = documents([tmp_path / "b.parquet"])
    assert document.pieces == (("2+2=", False), ("4", True))
    train = tmp_path / "saved" / "train"
    train.mkdir(parents=True)
    with (
        pyarrow.OSFile(str(train / "data-00000-of-00001.arrow"), "wb") as sink,
        pyarrow.ipc.new_stream(sink, table.schema) as writer,
    ):
        writer.write_table(table)
    (train / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (train / "dataset_info.json").write_text("{}")
    (tmp_path / "saved" / "dataset_dict.json").write_text(json.dumps({"splits": ["train"]}))
    for folder in (train, tmp_path / "saved"):
        assert texts(folder) == [row["text"] for row in ROWS]
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(DataError, match=r"bad\.parquet cannot be read as Parquet"):
        texts(tmp_path / "bad.parquet")


def test_zstd_is_decompressed(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    path = tmp_path / "a.jsonl.zst"
    path.write_bytes(zstandard.compress(b'{"text": "packed"}\n'))
    assert texts(path) == ["packed"]
    path.write_bytes(path.read_bytes() + zstandard.compress(b'{"text": "again"}\n'))
    assert texts(path) == ["packed", "again"]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match="damaged or cut short"):
        texts(path)


@pytest.mark.parametrize(
    ("content", "text", "note"),
    [
        ("café olé".encode("latin-1"), "café olé", "read as Windows-1252"),
        (b"x" * (2**20 - 1) + b"\xc3y", "x" * (2**20 - 1) + "Ãy", "read as Windows-1252"),
        ("über".encode("utf-16"), "über", "is UTF-16"),
    ],
)
def test_a_file_that_is_not_utf8_is_decoded_with_one_note(tmp_path: Path, content: bytes, text: str, note: str) -> None:
    path, messages = tmp_path / "a.txt", list[str]()
    path.write_bytes(content)
    corpus = documents([path], note=messages.append)
    for _ in range(2):
        assert "".join(corpus.texts()) == text
    assert len(messages) == 1
    assert note in messages[0]
