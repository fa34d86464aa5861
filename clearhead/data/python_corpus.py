"""The built-in corpus: the sources of Python's standard library, and its language reference."""

from __future__ import annotations

import importlib
import os
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path

from .corpus import Corpus, DataError, Document

# Tests, tables of characters, generated and installed files: not text worth learning from.
SKIPPED = {"test", "tests", "idle_test", "__pycache__", "site-packages", "dist-packages", "encodings", "pydoc_data"}
SKIPPED |= {"lib-dynload", "ensurepip"}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")


def standard_library() -> Corpus:
    """A document for each module, in order of names, then one for each topic of `help()`, about 11 MB in all.

    >>> next(iter(standard_library())).characters > 0
    True
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(sources(root), key=lambda path: path.relative_to(root).as_posix())
    if not files:
        raise DataError(f"this Python has no sources of its standard library in {root}; give your own text with --data")
    size = sum(path.stat().st_size for path in files)
    topics = language_reference()
    summary = (
        f"Python's standard library: {len(files):,} modules, {size:,} bytes, and {len(topics):,} topics of the "
        f"language reference, {sum(len(text.encode()) for text in topics.values()):,} bytes"
    )

    def read() -> Iterator[Document]:
        for path in files:
            with tokenize.open(path) as file:  # a source declares its own encoding (PEP 263)
                yield Document(path.relative_to(root).as_posix(), ((file.read(), True),))
        for name, text in topics.items():
            yield Document(f"help({name!r})", ((text, True),))

    return Corpus(read, summary)


def sources(root: Path) -> Iterator[Path]:
    for place, folders, names in os.walk(root):
        folders[:] = [name for name in folders if is_source(name)]
        yield from (Path(place, name) for name in names if name.endswith(".py") and is_source(name))


def is_source(name: str) -> bool:
    return name not in SKIPPED and not name.startswith(SKIPPED_PREFIXES)


def language_reference() -> dict[str, str]:
    """The topics of `help()`, such as `help("for")`; empty if this Python has none."""
    try:
        return dict(sorted(importlib.import_module("pydoc_data.topics").topics.items()))
    except ImportError:
        return {}
