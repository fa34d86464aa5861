"""One text being written: its tokens, the text they decode to so far, and why it ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from clearhead.tokenize import Tokenizer

Reason = Literal["end", "stop", "length"]
"""Why a text ended: an end token, a stop string, or the token limit."""

UNFINISHED = "\ufffd"  # how an incomplete UTF-8 sequence decodes
LEAD = 8  # earlier tokens that can change how the next one decodes, for example whether it starts with a space


class Detokenizer:
    """Tokens to text, piece by piece. Decodes only the last few tokens again, however long the text is."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        first = max(0, len(before) - LEAD)
        while first > 0 and tokenizer.is_byte(before[first]):  # byte tokens decode only as a complete run
            first -= 1
        self.ids = list(before[first:])
        self.ends = [len(self.ids)]  # where the returned pieces end; complete characters end there too

    def add(self, token: int) -> str:
        """The text that this token completes; empty while a character lacks bytes."""
        self.ids.append(token)
        text = self.rest()
        if text.endswith(UNFINISHED):
            return ""
        self.ends.append(len(self.ids))
        if len(self.ends) > LEAD:
            cut = self.ends[0]
            self.ids, self.ends = self.ids[cut:], [end - cut for end in self.ends[1:]]
        return text

    def rest(self) -> str:
        """The text after the last returned piece, even if its last character is incomplete."""
        given, whole = (self.tokenizer.decode(ids) for ids in (self.ids[: self.ends[-1]], self.ids))
        if not whole.startswith(given):  # an incomplete character can change how the bytes before it decode
            return self.tokenizer.decode(self.ids[self.ends[-1] :])
        return whole[len(given) :]


@dataclass
class Row:
    """A text that continues the `prompt`-th prompt."""

    prompt: int
    limit: int  # maximum number of new tokens
    detokenizer: Detokenizer | None
    stop: tuple[str, ...] = ()
    sample: int = 0  # number of this text among those of its prompt; each has its own random stream
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    pending: str = ""  # text that may be the beginning of a stop string
    reason: Reason | None = None

    def append(self, token: int, logprob: float | None, ends: Sequence[int]) -> str:
        """Add a token and return the text that is now final."""
        self.tokens.append(token)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token in ends:
            self.reason = "end"
        elif len(self.tokens) >= self.limit:
            self.reason = "length"
        if self.detokenizer is None:
            return ""
        if self.reason != "end":  # the end token is not part of the text
            self.pending += self.detokenizer.add(token)
        if self.reason is not None:
            self.pending += self.detokenizer.rest()
        return self.release()

    def release(self) -> str:
        """Return pending text up to a stop string, or up to what may become one."""
        found = [at for stop in self.stop if (at := self.pending.find(stop)) >= 0]
        if found:
            self.reason, safe = "stop", min(found)
        elif self.reason is not None:
            safe = len(self.pending)
        else:
            safe = len(self.pending) - max((overlap(self.pending, stop) for stop in self.stop), default=0)
        final, self.pending = self.pending[:safe], self.pending[safe:]
        self.text += final
        return final


def overlap(text: str, stop: str) -> int:
    """The length of the longest end of `text` that is a beginning of `stop`."""
    return next((size for size in range(min(len(text), len(stop)), 0, -1) if text.endswith(stop[:size])), 0)
