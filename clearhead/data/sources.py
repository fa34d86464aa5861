"""Documents from files, folders, globs and standard input: text, `.jsonl`, tables, and gzip or zstd of them."""

from __future__ import annotations

import codecs
import glob
import gzip
import os
import re
import sys
import tempfile
import warnings
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedIOBase
from pathlib import Path
from typing import IO, Any

from clearhead.typed_json import MAX_BYTES, JSONError, decode_json

from .chat import parse_line
from .corpus import Corpus, DataError, Document
from .parts import cut_at
from .tables import SUFFIXES, dataset_files, open_zstd, read_arrow, read_csv, read_parquet

BLOCK = 2**23  # characters of one file in memory at a time
READ = 2**20  # bytes
SNIFF = 2**13  # bytes in which a binary file shows itself by a zero
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
MARKS = {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
RECIPE, LOCK = "recipe.json", ".lock"  # a folder with both is a run's
Note = Callable[[str], None]


@dataclass
class FileList:
    """The files to read, in order, and how many others were skipped."""

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
        counts = {"hidden": self.hidden, "binary": self.binary, "run": self.runs}
        skipped = [f"{count:,} {kind}" for kind, count in counts.items() if count]
        note = f" (skipped: {', '.join(skipped)})" if skipped else ""
        return f"{len(self.files):,} {'file' if len(self.files) == 1 else 'files'}, {self.bytes:,} bytes{note}"


def documents(paths: Sequence[str | Path], besides: Path | None = None, note: Note = warnings.warn) -> Corpus:
    """A document for each text file, each line of a `.jsonl`, and each row of a table; `-` is standard input.

    Folders are walked in the order of names. Hidden and binary files and the folders of runs are skipped and counted in
    `summary`; the folder `besides`, the run's own, is skipped too. `note` is called once for each file that is not
    UTF-8.

    >>> import tempfile, pathlib
    >>> folder = pathlib.Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("To be")
    >>> [document.pieces for document in documents([folder])]
    [(('To be', True),)]
    """
    found = FileList()
    if [str(path) for path in paths].count("-") > 1:
        raise DataError("standard input can be read only once; give - one time")
    for path in paths:
        if not str(path):
            raise DataError("a path of the data is empty; give a file or a folder (. is this one)")
        if str(path) == "-":
            found.add(standard_input())
        else:
            find(path, found, besides)
    once = note_once(note)
    return Corpus(lambda: (document for file in found.files for document in read(file, once)), found.summary)


def note_once(note: Note) -> Note:
    """`note`, but only for sentences it has not had."""
    shown: set[str] = set()

    def say(text: str) -> None:
        if text not in shown:
            shown.add(text)
            note(text)

    return say


def find(path: str | Path, found: FileList, besides: Path | None = None) -> None:
    place = Path(path)
    if place.is_dir():
        for file in visible_files(place, besides, found):
            if is_binary(file):
                found.binary += 1
            else:
                found.add(file)
    elif place.exists():
        if not place.is_file():
            raise DataError(f"{place} is neither a file nor a folder; give a pipe as -")
        if is_binary(place):
            raise DataError(f"{place} is not text: it contains zero bytes")
        found.add(place)
    elif glob.has_magic(str(path)):
        matches = sorted(glob.glob(str(path), recursive=True))
        root = Path(re.split(r"[*?[]", str(path))[0] + "_").parent
        others = [match for match in matches if not (is_inside(besides, root) and is_inside(match, besides))]
        if not others:
            raise DataError(f"no file matches {path}{f' outside of {besides}, the run itself' if matches else ''}")
        for match in others:
            if Path(match).is_file():
                find(match, found)
    else:
        raise DataError(f"there is no file or folder {path}")


def visible_files(folder: Path, besides: Path | None, found: FileList) -> Iterator[Path]:
    """The files under a folder in the order of names; skips `besides`, hidden files and other runs, and counts them.

    Of a folder that `datasets` saved, only its Arrow files.
    """
    if is_same(folder, besides):
        raise DataError(f"{folder} is the run's own folder; choose another --out")
    if (arrow := dataset_files(folder)) is not None:
        yield from arrow
        return
    for place, folders, names in os.walk(folder):
        found.hidden += sum(name.startswith(".") for name in (*folders, *names))
        inner = [Path(place, name) for name in sorted(folders) if not name.startswith(".")]
        inner = [path for path in inner if not is_same(path, besides)]
        found.runs += sum(map(is_run, inner))
        saved = {path: tables for path in inner if (tables := dataset_files(path)) is not None}
        folders[:] = [path.name for path in inner if not is_run(path) and path not in saved]
        files = (Path(place, name) for name in sorted(names) if not name.startswith("."))
        yield from (path for path in files if path.is_file())
        for arrow in saved.values():
            yield from arrow


def is_run(folder: Path) -> bool:
    """Whether the folder is a run's, whose files are not text to train on."""
    return (folder / RECIPE).exists() and (folder / LOCK).exists()


def is_same(folder: Path, other: Path | None) -> bool:
    return other is not None and folder.resolve() == other.resolve()


def is_inside(path: str | Path | None, folder: Path | None) -> bool:
    return path is not None and folder is not None and Path(path).resolve().is_relative_to(folder.resolve())


def standard_input() -> Path:
    """Standard input as a temporary file, because a corpus is read more than once."""
    global _standard_input
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise DataError("the processes of torchrun cannot share standard input; give a file")
    if _standard_input is None:
        _standard_input = tempfile.NamedTemporaryFile(prefix="clearhead-stdin-")  # noqa: SIM115  (until the process ends)
        while block := sys.stdin.buffer.read(READ):
            _standard_input.write(block)
        _standard_input.flush()
    return Path(_standard_input.name)


_standard_input: IO[bytes] | None = None


def is_binary(path: Path) -> bool:
    """Whether a file holds neither text nor a table."""
    if suffix_of(path) in SUFFIXES:
        return False
    with open_file(path) as file:
        beginning = file.read(SNIFF)
    return b"\0" in beginning and not beginning.startswith(tuple(MARKS))


def suffix_of(path: Path) -> str:
    """The suffix of a file's name without .gz or .zst: `.jsonl` of `chats.jsonl.gz`."""
    return Path(path.name.removesuffix(".gz").removesuffix(".zst")).suffix.lower()


@contextmanager
def open_file(path: Path) -> Iterator[BufferedIOBase]:
    """The bytes of a file, decompressed if it is gzip or zstd, whatever its name."""
    try:
        with path.open("rb") as plain:
            beginning = plain.peek(len(ZSTD))  # not read, because the file may be a pipe
            if beginning.startswith(GZIP):
                with gzip.open(plain) as file:
                    yield file
            elif beginning.startswith(ZSTD):
                with open_zstd(plain, path) as file:
                    yield file
            else:
                yield plain
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} cannot be decompressed: it is damaged or cut short ({error})") from None
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:
        if type(error).__module__.startswith("zstandard"):
            raise DataError(f"{path} cannot be decompressed: it is damaged or cut short ({error})") from None
        raise


def read(path: Path, note: Note = warnings.warn) -> Iterator[Document]:
    name, suffix = title(path), suffix_of(path)
    if suffix == ".parquet":
        yield from read_parquet(path)
    elif suffix == ".arrow":
        yield from read_arrow(path)
    else:
        with open_file(path) as file:
            if suffix == ".csv":
                yield from read_csv((f"{line}\n" for line in decode_lines(file, name, note)), name)
            elif is_jsonl(path):
                yield from read_lines(file, name, note)
            else:
                yield from read_text(file, name, note)


def title(path: Path) -> str:
    """The name of a file in documents and messages."""
    return "standard input" if _standard_input is not None and str(path) == _standard_input.name else path.as_posix()


def is_jsonl(path: Path) -> bool:
    """Whether the name says so; standard input has no name, so its first line decides."""
    if title(path) != "standard input":
        return suffix_of(path) == ".jsonl"
    with open_file(path) as file:
        try:
            record = decode_json(file.readline(MAX_BYTES), title(path), Any)
        except JSONError:
            return False
    return isinstance(record, dict) and bool({"text", "prompt", "messages"} & record.keys())


def read_lines(file: BufferedIOBase, name: str, note: Note) -> Iterator[Document]:
    for number, text in enumerate(decode_lines(file, name, note), 1):
        if text.strip():
            where = f"{name}, line {number:,}"
            yield Document(where, parse_line(text, where))


def read_text(file: BufferedIOBase, name: str, note: Note) -> Iterator[Document]:
    """One document; a file longer than a block comes as several, cut between words."""
    held, continues = "", False
    for text in decode_text(file, name, note):
        held += text
        while len(held) >= 2 * BLOCK:
            at = cut_at(held, BLOCK)
            yield Document(name, ((held[:at], True),), continues)
            held, continues = held[at:], True
    yield Document(name, ((held, True),), continues)


def decode_text(file: BufferedIOBase, name: str, note: Note) -> Iterator[str]:
    """The text of a file with its line ends, but without a byte order mark.

    Bytes that are not UTF-8 are read as Windows-1252, the most common encoding of older Western files, with a note. A
    file that starts with the mark of UTF-16 is read as UTF-16.
    """
    block = file.read(READ)
    encoding = next((encoding for mark, encoding in MARKS.items() if block.startswith(mark)), "utf-8-sig")
    decoder = codecs.getincrementaldecoder(encoding)(errors=FALLBACK)
    if encoding != "utf-8-sig":
        note(f"{name} is UTF-16, not UTF-8; it was decoded")
    while True:
        before = fallback_count()
        text = decoder.decode(block, final=not block)
        if fallback_count() != before:
            note(f"{name} is not UTF-8; its other bytes were read as Windows-1252")
        yield text
        if not block:
            return
        block = file.read(READ)


def decode_lines(file: Iterable[bytes], name: str, note: Note = warnings.warn) -> Iterator[str]:
    """The lines of a text file without their ends. Only a line feed ends a line."""
    for number, line in enumerate(file, 1):
        before = fallback_count()
        text = line.decode("utf-8-sig" if number == 1 else "utf-8", errors=FALLBACK)
        if fallback_count() != before:
            note(f"{name} is not UTF-8; its other bytes were read as Windows-1252")
        yield text.rstrip("\r\n")


FALLBACK = "clearhead-windows-1252"
_fallbacks = 0


def fallback_count() -> int:
    """How many times bytes had to be read as Windows-1252."""
    return _fallbacks


def decode_windows_1252(error: UnicodeError) -> tuple[str, int]:
    """Decode the bytes that are not UTF-8, one character for each."""
    global _fallbacks
    if not isinstance(error, UnicodeDecodeError):
        raise error
    _fallbacks += 1
    odd = error.object[error.start : error.end]
    return "".join(bytes([byte]).decode("cp1252", errors="replace") for byte in odd), error.end


codecs.register_error(FALLBACK, decode_windows_1252)
