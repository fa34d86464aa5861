"""A request inside the engine: what to generate, and the inbox through which its text comes back."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from clearhead.configs import DecodingConfig

from .row import Reason

if TYPE_CHECKING:
    from .grammar import Grammar


@dataclass(frozen=True)
class TokenScore:
    """A token, its log-probability under the model, and the most likely alternatives."""

    token: int
    logprob: float | None  # None for the first token of a prompt
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Delta:
    """News of one choice: new text, the tokens behind it, and at the end the reason why it ended."""

    choice: int
    text: str = ""
    tokens: tuple[TokenScore, ...] = ()
    reason: Reason | None = None


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """How to answer a request."""

    config: DecodingConfig
    limit: int  # new tokens; 0 only scores the prompt
    choices: int = 1  # texts to write
    logprobs: int | None = None  # alternatives per token; None: no log-probabilities
    echo_logprobs: bool = False  # score the tokens of the prompt too
    presence: float = 0.0
    frequency: float = 0.0
    bias: tuple[tuple[int, float], ...] = ()
    grammar: Grammar | None = None
    user: str = ""
    deadline: float | None = None  # time.monotonic() at which the request fails


@dataclass
class Usage:
    prompt: int = 0
    cached: int = 0
    completion: int = 0


class JobError(ValueError):
    """The engine could not finish a request."""

    def __init__(self, message: str, code: str = "server_error") -> None:
        super().__init__(message)
        self.code = code


class AsyncReader(NamedTuple):
    """A coroutine that waits for news of a job."""

    loop: asyncio.AbstractEventLoop
    ready: asyncio.Event


def ring(readers: Sequence[AsyncReader]) -> None:
    """Wake readers from another thread, with one call for each event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Event]] = {}
    for reader in readers:
        by_loop.setdefault(reader.loop, []).append(reader.ready)
    for loop, events in by_loop.items():
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nobody reads any more
            loop.call_soon_threadsafe(set_all, events)


def set_all(events: Sequence[asyncio.Event]) -> None:
    for event in events:
        event.set()


@dataclass
class Job:
    """A submitted request. Iterate over it (`for` or `async for`) to get its deltas."""

    number: int
    ids: list[int]
    options: JobOptions
    prompt_scores: list[TokenScore] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    arrived: float = field(default_factory=time.monotonic)
    first_token: float | None = None
    cancelled: bool = False
    unfinished: list[int] = field(default_factory=list)  # choices that have not ended
    sent: list[int] = field(default_factory=list)  # tokens of each choice that were handed over
    drafted: list[int] = field(default_factory=list)  # tokens of each choice that the draft model proposed
    accepted: list[int] = field(default_factory=list)  # proposed tokens that were kept
    _news: list[Delta] = field(default_factory=list)
    _error: JobError | None = None
    _done: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _reader: AsyncReader | None = None
    bell: list[AsyncReader] | None = None  # readers to wake after the step; None: wake each at once

    def __post_init__(self) -> None:
        self.unfinished = list(range(self.options.choices))
        self.sent, self.drafted, self.accepted = ([0] * self.options.choices for _ in range(3))

    @property
    def done(self) -> bool:
        return self._done

    def put(self, delta: Delta) -> None:
        """Add news. Unread news wait here, so a slow reader costs only its own text."""
        with self._changed:
            self._news.append(delta)
            self._wake()

    def finish(self, error: JobError | None = None) -> None:
        with self._changed:
            if not self._done:
                self._error, self._done = error, True
            self._wake()

    def cancel(self) -> None:
        """Stop the request. The engine frees its rows after at most one pass."""
        self.cancelled = True

    def _wake(self) -> None:
        self._changed.notify_all()
        if self._reader is None:
            return
        if self.bell is None:
            ring([self._reader])
        else:
            self.bell.append(self._reader)

    def take(self) -> list[Delta]:
        """The unread news; none if there is nothing new yet."""
        with self._changed:
            return self._take()[0]

    def _take(self) -> tuple[list[Delta], bool]:
        """Unread news, and whether more will come."""
        news, self._news = self._news, []
        if not news and self._done and self._error is not None:
            raise self._error
        return news, not self._done

    def __iter__(self) -> Iterator[Delta]:
        more = True
        while more:
            with self._changed:
                while not self._news and not self._done:
                    self._changed.wait()
                news, more = self._take()
            yield from news
            if not more and self._error is not None:
                raise self._error

    async def __aiter__(self) -> AsyncIterator[Delta]:
        ready = asyncio.Event()
        with self._changed:
            self._reader = AsyncReader(asyncio.get_running_loop(), ready)
            ready.set()
        try:
            more = True
            while more:
                await ready.wait()
                ready.clear()
                with self._changed:
                    news, more = self._take()
                for delta in news:
                    yield delta
            if self._error is not None:
                raise self._error
        finally:
            self._reader = None
            if not self._done:
                self.cancel()
