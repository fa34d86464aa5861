"""Cut a long text where no token crosses the cut.

The usual rules for words (GPT-2's, GPT-4's, white space) never join text across a line end between two visible
characters, nor before a single space. A tokenizer that marks the start of a text, as SentencePiece does, marks each
part.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

PART = 2**16  # characters in a part: small enough to keep every core busy

AFTER_LINE = re.compile(r"(?<=\S\n)(?=\S)")
BEFORE_WORD = re.compile(r"(?<=\S)(?= \S)")


def cut_at(text: str, place: int) -> int:
    """The first good place to cut between `place` and `2·place`; `place` itself if there is none."""
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
