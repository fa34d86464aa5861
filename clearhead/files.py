"""Write files that are complete or absent, and never replace what somebody else wrote.

Every writer of the package follows one rule. A target that exists is refused unless the caller passes `force`. The new
file is written beside it under a name nobody has, flushed to the disk, and renamed. Symbolic links are not followed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

UNFINISHED = ".part"
CANNOT_WRITE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS)
"""Errors that are about the file being written, even where the system names the file being copied."""


class TargetError(ValueError):
    """A path that must not or cannot be written to; the message says what to do instead."""


class WriteError(OSError):
    """A file could not be written; the error names the target, not the temporary file."""


def check_target(path: str | Path, force: bool = False) -> None:
    """Raise `TargetError` unless a file can be written to `path`: nothing is there, or a file that `force` replaces.

    Commands call it before they compute what they are going to write.
    """
    path = Path(path)
    if not os.path.lexists(path):
        return
    if not path.is_symlink() and not path.is_file():
        kind = "a folder; name a file in it" if path.is_dir() else "not a regular file; choose another name"
        raise TargetError(f"{path} is {kind}")
    if not force:
        raise TargetError(f"{path} exists; add --force (in Python: force=True) to replace it, or choose another name")


@contextmanager
def stage_file(path: Path) -> Iterator[Path]:
    """Yield the path of an empty file beside `path`; when the block ends without an error, rename it to `path`."""
    check_target(path, force=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=UNFINISHED, dir=path.parent)
    except OSError as error:
        raise WriteError(error.errno, error.strerror, str(path)) from None
    os.close(handle)
    part = Path(name)
    try:
        yield part
        apply_umask(part)
        flush_to_disk(part)
        os.replace(part, path)
    except WriteError:  # a file staged inside this block, which the error names
        raise
    except OSError as error:
        if error.errno is None:  # NumPy's, for example: "Not enough free space to write 40 bytes after offset 8"
            raise WriteError(f"{path} could not be written: {error}") from None
        if error.errno in CANNOT_WRITE or error.filename in (None, name):
            raise WriteError(error.errno, error.strerror or str(error), str(path)) from None
        raise
    finally:
        part.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    with stage_file(path) as part:
        part.write_text(text, encoding="utf-8")


def open_own(path: Path, mode: str) -> IO[bytes]:
    """Open a file of ours, such as a lock or an unfinished shard, for writing; refuse to follow a symbolic link."""
    flags = os.O_CREAT | {"wb": os.O_WRONLY | os.O_TRUNC, "ab": os.O_WRONLY | os.O_APPEND}[mode]
    if path.is_symlink() or (path.exists() and not stat.S_ISREG(path.stat().st_mode)):
        raise TargetError(f"{path} is not a regular file, so it is not written to; remove it or choose another folder")
    return os.fdopen(os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666), mode)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def apply_umask(path: Path) -> None:
    """Give a file the permissions of any new file here; safetensors and `mkstemp` make it private to its owner."""
    hidden = os.umask(0)
    os.umask(hidden)
    path.chmod(0o666 & ~hidden)


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder's entries to the disk. Windows cannot flush a folder and does not need to."""
    if path.is_dir() and os.name == "nt":
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
