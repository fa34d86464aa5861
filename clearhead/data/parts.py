"""Where a long text may be cut so that its tokens stay the same.

Within a line words follow each other in ways that a tokenizer may join. After a line end that has a character before
and after it, none of the usual rules for words (GPT-2's, GPT-4's, white space) joins anything; nor do they before a
single space. A tokenizer that marks the beginning of a text, as SentencePiece's do, marks each part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PART = 2**16  # characters that are encoded in one go: small enough to keep every core busy

AFTER_LINE = re.compile(r"(?<=\S\n)(?=\S)")
BEFORE_WORD = re.compile(r"(?<=\S)(?= \S)")


def cut_at(text: str, place: int) -> int:
    """The first good place to cut at `place` or within as much again; `place` itself where there is none."""
    for pattern in (AFTER_LINE, BEFORE_WORD):
        if found := pattern.search(text, place, 2 * place):
            return found.start()
    return place


def parts(text: str, size: int = PART) -> Iterator[str]:
    """The text in parts of about `size` characters."""
    start = 0
    while len(text) - start > 2 * size:
        window = text[start : start + 2 * size + 1]
        end = start + cut_at(window, size)
        yield text[start:end]
        start = end
    yield text[start:]
