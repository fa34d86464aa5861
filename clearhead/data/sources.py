"""Documents from files, folders, patterns, `.jsonl`, gzip of any of them, and standard input."""

from __future__ import annotations

import codecs
import glob
import gzip
import os
import re
import sys
import tempfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any

from clearhead.typed_json import MAX_BYTES, JSONError, decode_json

from .chat import parse_line
from .corpus import Corpus, DataError, Document
from .parts import cut_at

BLOCK = 2**23  # characters of one file in memory at a time
READ = 2**20  # bytes
SNIFF = 2**13  # bytes in which a binary file shows itself by a zero
GZIP = b"\x1f\x8b"
RECIPE, LOCK = "recipe.json", ".lock"  # a folder that holds both is a run's


@dataclass
class Found:
    """The files that some paths stand for, in order, and how many of a folder's were passed over."""

    files: list[Path] = field(default_factory=list)
    hidden: int = 0
    binary: int = 0
    runs: int = 0
    bytes: int = 0

    def add(self, path: Path) -> None:
        self.files.append(path)
        self.bytes += path.stat().st_size

    @property
    def summary(self) -> str:
        counts = {"hidden": self.hidden, "binary": self.binary, "of runs": self.runs}
        skipped = [f"{count:,} {kind}" for kind, count in counts.items() if count]
        passed = f" (passed over: {' and '.join(skipped)})" if skipped else ""
        return f"{len(self.files):,} {'file' if len(self.files) == 1 else 'files'}, {self.bytes:,} bytes{passed}"


def documents(paths: Sequence[str | Path], besides: Path | None = None) -> Corpus:
    """A document for each text file and for each line of a `.jsonl`; `-` is standard input.

    Folders are walked in order of names; what is hidden or binary in them is passed over and counted in `summary`, and
    so are folders of runs. What lies in the folder `besides`, the run's own, is none of the data either.
    """
    found = Found()
    if [str(path) for path in paths].count("-") > 1:
        raise DataError("standard input is read once; give - one time")
    for path in paths:
        if not str(path):
            raise DataError("a path of the data is empty; give a file or a folder (. is this one)")
        if str(path) == "-":
            found.add(standard_input())
        else:
            find(path, found, besides)
    return Corpus(lambda: (document for file in found.files for document in read(file)), found.summary)


def find(path: str | Path, found: Found, besides: Path | None = None) -> None:
    place = Path(path)
    if place.is_dir():
        for file in visible(place, besides, found):
            if is_binary(file):
                found.binary += 1
            else:
                found.add(file)
    elif place.exists():
        if not place.is_file():
            raise DataError(f"{place} is neither a file nor a folder; a pipe is read once: give it as -")
        if is_binary(place):
            raise DataError(f"{place} is not text: there are zero bytes in it")
        found.add(place)
    elif glob.has_magic(str(path)):
        matches = sorted(glob.glob(str(path), recursive=True))
        root = Path(re.split(r"[*?[]", str(path))[0] + "_").parent
        others = [match for match in matches if not (lies_in(besides, root) and lies_in(match, besides))]
        if not others:
            raise DataError(f"no file matches {path}{f' outside of {besides}, the run itself' if matches else ''}")
        for match in others:
            if Path(match).is_file():
                find(match, found)
    else:
        raise DataError(f"there is no file or folder {path}")


def visible(folder: Path, besides: Path | None, found: Found) -> Iterator[Path]:
    """The files under a folder in the order of names, but those of `besides`, and those that are hidden or of another
    run, which are counted."""
    if is_same(folder, besides):
        raise DataError(f"{folder} is the run's own folder, in which its files change; choose another --out")
    for place, folders, names in os.walk(folder):
        found.hidden += sum(name.startswith(".") for name in (*folders, *names))
        inner = [Path(place, name) for name in sorted(folders) if not name.startswith(".")]
        inner = [path for path in inner if not is_same(path, besides)]
        found.runs += sum(map(is_run, inner))
        folders[:] = [path.name for path in inner if not is_run(path)]
        files = (Path(place, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in files if path.is_file())


def is_run(folder: Path) -> bool:
    """Whether somebody trains or has trained here: what such a run writes of itself is nobody's text."""
    return (folder / RECIPE).exists() and (folder / LOCK).exists()


def is_same(folder: Path, other: Path | None) -> bool:
    return other is not None and folder.resolve() == other.resolve()


def lies_in(path: str | Path | None, folder: Path | None) -> bool:
    return path is not None and folder is not None and Path(path).resolve().is_relative_to(folder.resolve())


def standard_input() -> Path:
    """Standard input as a file, since a corpus is read more than once."""
    global _standard_input
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise DataError("standard input can be read by one process only, not by those of torchrun; give a file")
    if _standard_input is None:
        _standard_input = tempfile.NamedTemporaryFile(prefix="clearhead-stdin-")  # noqa: SIM115  (until we leave)
        while block := sys.stdin.buffer.read(READ):
            _standard_input.write(block)
        _standard_input.flush()
    return Path(_standard_input.name)


_standard_input: IO[bytes] | None = None


def is_binary(path: Path) -> bool:
    with opened(path) as file:
        return b"\0" in file.read(SNIFF)


@contextmanager
def opened(path: Path) -> Iterator[BufferedIOBase]:
    """The bytes of a file, unpacked if it is gzip, whatever its name."""
    try:
        with path.open("rb") as plain:
            if plain.peek(len(GZIP)).startswith(GZIP):  # nothing is read twice: it may be a pipe
                with gzip.open(plain) as file:
                    yield file
            else:
                yield plain
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be unpacked, it is damaged or cut short: {error}") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None


def read(path: Path) -> Iterator[Document]:
    name = title(path)
    with opened(path) as file:
        if is_jsonl(path):
            yield from read_lines(file, name)
        else:
            yield from read_text(file, name)


def title(path: Path) -> str:
    """What a file is called in documents and messages."""
    return "standard input" if _standard_input is not None and str(path) == _standard_input.name else path.as_posix()


def is_jsonl(path: Path) -> bool:
    """By its name; standard input has none and is judged by its first line."""
    if title(path) != "standard input":
        return path.name.removesuffix(".gz").endswith(".jsonl")
    with opened(path) as file:
        try:
            record = decode_json(file.readline(MAX_BYTES), title(path), Any)
        except JSONError:
            return False
    return isinstance(record, dict) and bool({"text", "prompt", "messages"} & record.keys())


def read_lines(file: BufferedIOBase, name: str) -> Iterator[Document]:
    for number, line in enumerate(file, 1):
        where = f"{name}, line {number:,}"
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise undecodable(where, error, error.start) from None
        if text.strip():
            yield Document(where, parse_line(text, where))


def read_text(file: BufferedIOBase, name: str) -> Iterator[Document]:
    """One document; a file longer than a block comes as several, cut where no word is."""
    held, continues = "", False
    for text in decoded(file, name):
        held += text
        while len(held) >= 2 * BLOCK:
            at = cut_at(held, BLOCK)
            yield Document(name, ((held[:at], True),), continues)
            held, continues = held[at:], True
    yield Document(name, ((held, True),), continues)


def decoded(file: BufferedIOBase, name: str) -> Iterator[str]:
    """The text of a file as it stands, line ends and all; only a byte order mark at its beginning is left out."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    done = 0
    while True:
        block = file.read(READ)
        waiting = len(decoder.getstate()[0])  # the beginning of a character whose end is in this block
        try:
            yield decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:
            raise undecodable(name, error, done - waiting + error.start) from None
        if not block:
            return
        done += len(block)


def undecodable(where: str, error: UnicodeDecodeError, at: int) -> DataError:
    byte = error.object[error.start]
    return DataError(
        f"{where}: byte {at:,} is {byte:#04x}, which is not UTF-8 there; convert the file to UTF-8 or leave it out"
    )
