"""Documents from tables: `.csv`, `.parquet`, and folders that `datasets` saved (`save_to_disk`)."""

from __future__ import annotations

import csv
import io
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from clearhead.extras import install_command

from .chat import parse_record
from .corpus import DataError, Document

INSTALL = install_command("data")
SUFFIXES = (".csv", ".parquet", ".arrow")
BLOCK = 2**16  # compressed bytes read at once


def read_csv(lines: Iterable[str], name: str) -> Iterator[Document]:
    """A document for each row. The first row names the columns; a table of a single column needs no special name."""
    before = csv.field_size_limit(sys.maxsize)  # a setting of the whole process: give it back
    try:
        rows = csv.DictReader(lines)
        names = rows.fieldnames or []
        for row in rows:
            where = f"{name}, line {rows.line_num:,}"
            if None in row:
                raise DataError(f"{where} has more cells than the first line has names; quote texts that hold a comma")
            yield Document(where, parse_record(rename_text_column(row, list(names)), where))
    except csv.Error as error:
        raise DataError(f"{name} is not a CSV table: {error}") from None
    finally:
        csv.field_size_limit(before)


def read_parquet(path: Path) -> Iterator[Document]:
    """A document for each row of a Parquet file, a batch of rows in memory at a time."""
    parquet = import_arrow("parquet", path)
    try:
        file = parquet.ParquetFile(path)
        yield from read_batches(file.iter_batches(batch_size=1024), path)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as Parquet: {first_line(error)}") from None


def read_arrow(path: Path) -> Iterator[Document]:
    """A document for each row of an Arrow file, as `datasets` writes it."""
    ipc = import_arrow("ipc", path)
    try:
        with path.open("rb") as file:
            yield from read_batches(ipc.open_stream(file), path)
    except (OSError, ValueError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path} cannot be read as an Arrow stream: {first_line(error)}") from None


def read_batches(batches: Iterable[Any], path: Path) -> Iterator[Document]:
    number = 0
    for batch in batches:
        names = list(batch.schema.names)
        for row in batch.to_pylist():
            number += 1
            where = f"{path.as_posix()}, row {number:,}"
            yield Document(where, parse_record(rename_text_column(row, names), where))


def rename_text_column(row: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """The row; if it has a single column, that is the text."""
    return {"text": row[names[0]]} if len(names) == 1 else row


def dataset_files(folder: Path) -> list[Path] | None:
    """The Arrow files of a folder that `datasets` saved (its split `train`); None for other folders."""
    if (folder / "dataset_dict.json").is_file():
        splits = read_json(folder / "dataset_dict.json").get("splits", [])
        if "train" not in splits:
            raise DataError(
                f"{folder} has the splits {', '.join(map(str, splits))}, but no train; give one: {folder}/NAME"
            )
        return dataset_files(folder / "train")
    if not (folder / "state.json").is_file() or not any(folder.glob("*.arrow")):
        return None
    listed = read_json(folder / "state.json").get("_data_files", [])
    names = [entry["filename"] for entry in listed if isinstance(entry, dict) and "filename" in entry]
    files = [folder / name for name in names] or sorted(folder.glob("*.arrow"))
    if missing := [path for path in files if not path.is_file()]:
        raise DataError(f"{missing[0]} is missing from the dataset in {folder}")
    return files


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise DataError(f"{path} must be a JSON object")
    return data


def import_arrow(module: str, path: Path) -> Any:
    from importlib import import_module

    try:
        return import_module(f"pyarrow.{module}")
    except ImportError:
        raise DataError(f"reading {path} needs pyarrow: {INSTALL}") from None


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def open_zstd(file: Any, path: Path) -> io.BufferedReader:
    """The decompressed bytes of a Zstandard stream."""
    try:
        import zstandard
    except ImportError:
        raise DataError(f"reading {path} needs zstandard: {INSTALL}") from None
    return io.BufferedReader(ZstdStream(file, zstandard.ZstdDecompressor()))


class ZstdStream(io.RawIOBase):
    """The decompressed bytes of one or more Zstandard frames. Raises EOFError if the last frame is cut short."""

    def __init__(self, file: Any, decompressor: Any) -> None:
        self.file, self.decompressor = file, decompressor
        self.frame: Any = None
        self.compressed, self.ready = b"", b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            block = self.compressed or self.file.read(BLOCK)
            if not block:
                if self.frame is not None:
                    raise EOFError("the last Zstandard frame is not complete")
                return 0
            self.frame = self.frame or self.decompressor.decompressobj()
            self.ready, self.compressed = self.frame.decompress(block), b""
            if self.frame.eof:
                self.compressed, self.frame = self.frame.unused_data, None
        count = min(len(buffer), len(self.ready))
        buffer[:count], self.ready = self.ready[:count], self.ready[count:]
        return count
