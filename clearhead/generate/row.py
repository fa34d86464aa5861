"""One text under way: its tokens, its text as far as it is certain, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from clearhead.tokenize import Tokenizer

Reason = Literal["end", "stop", "length"]
"""It wrote an end token; a stop text; all that it was allowed to."""

UNFINISHED = "\ufffd"  # what bytes that are no character yet are shown as
LEAD = 8  # tokens before the first new one that decide how it is spelled: whether a space goes before it


class Pieces:
    """Tokens to text, piece by piece. Only the last few tokens are decoded anew, however long the text is."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        first = max(0, len(before) - LEAD)
        while first > 0 and tokenizer.is_byte(before[first]):  # a run of bytes is text only as a whole
            first -= 1
        self.ids = list(before[first:])
        self.ends = [len(self.ids)]  # where pieces end that have been given, and with them characters

    def add(self, token: int) -> str:
        """The text that this token completes; nothing while a character lacks bytes."""
        self.ids.append(token)
        text = self.new()
        if text.endswith(UNFINISHED):
            return ""
        self.ends.append(len(self.ids))
        if len(self.ends) > LEAD:
            cut = self.ends[0]
            self.ids, self.ends = self.ids[cut:], [end - cut for end in self.ends[1:]]
        return text

    def new(self) -> str:
        """The text after what has been given, whole characters or not."""
        given, whole = (self.tokenizer.decode(ids) for ids in (self.ids[: self.ends[-1]], self.ids))
        if not whole.startswith(given):  # bytes that are no character yet undo those before them
            return self.tokenizer.decode(self.ids[self.ends[-1] :])
        return whole[len(given) :]


@dataclass
class Row:
    """What is written from the `prompt`-th prompt."""

    prompt: int
    limit: int  # tokens it may write
    pieces: Pieces | None
    stop: tuple[str, ...] = ()
    sample: int = 0  # which of the prompt's texts it is: they draw different numbers
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    held: str = ""  # text that may be the beginning of a stop text
    reason: Reason | None = None
    drafted: int = 0  # tokens that a draft proposed, and how many of them were kept
    accepted: int = 0

    def take(self, token: int, logprob: float | None, ends: Sequence[int]) -> str:
        """Write a token, and give the text that is certain now."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in ends:
            self.reason = "end"
        elif len(self.tokens) >= self.limit:
            self.reason = "length"
        if self.pieces is None:
            return ""
        if self.reason != "end":  # what ends a text is no part of it, special token or not
            self.held += self.pieces.add(token)
        if self.reason is not None:
            self.held += self.pieces.new()
        return self.release()

    def release(self) -> str:
        """What is held, up to a stop text or to what may become one."""
        found = [at for stop in self.stop if (at := self.held.find(stop)) >= 0]
        if found:
            self.reason, safe = "stop", min(found)
        elif self.reason is not None:
            safe = len(self.held)
        else:
            safe = len(self.held) - max((overlap(self.held, stop) for stop in self.stop), default=0)
        given, self.held = self.held[:safe], self.held[safe:]
        self.text += given
        return given


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of a text are the beginning of a stop text."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
