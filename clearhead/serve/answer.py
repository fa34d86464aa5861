"""Answers to completions and chats, whole and streamed, in the shapes of the OpenAI API."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from clearhead.generate.job import Delta, Job, JobError, TokenScore

from .logprobs import chat_logprobs, completion_logprobs
from .served_model import ServedModel
from .tools import parse_tool_calls


@dataclass
class Answer:
    """One answer to one request, with `choices` per job."""

    served: ServedModel
    asked: Any
    jobs: list[Job]
    name: str = field(default_factory=lambda: uuid.uuid4().hex)
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> dict[str, Any]:
        raise NotImplementedError

    def stream(self) -> AsyncIterator[Any]:
        raise NotImplementedError

    def usage(self) -> dict[str, Any]:
        return usage_json(self.jobs)

    @property
    def count(self) -> int:
        """Choices per job."""
        return self.asked.n or 1

    async def gather(self) -> list[tuple[str, list[TokenScore], str | None]]:
        """Text, tokens and reason of every choice, job by job."""
        found = []
        for job in self.jobs:
            texts, tokens = [""] * self.count, [[] for _ in range(self.count)]  # type: ignore[var-annotated]
            reasons: list[str | None] = [None] * self.count
            async for delta in job:
                texts[delta.choice] += delta.text
                tokens[delta.choice] += delta.tokens
                reasons[delta.choice] = finish_reason(delta) or reasons[delta.choice]
            found += list(zip(texts, tokens, reasons, strict=True))
        return found

    async def merge(self) -> AsyncIterator[tuple[int, Delta]]:
        """The news of all jobs as they come, each with the number of its job."""
        if len(self.jobs) == 1:
            async for delta in self.jobs[0]:
                if self.is_news(0, delta):
                    yield 0, delta
            return
        news: asyncio.Queue[tuple[int, Delta] | BaseException | None] = asyncio.Queue()

        async def follow(number: int, job: Job) -> None:
            try:
                async for delta in job:
                    await news.put((number, delta))
                await news.put(None)
            except JobError as error:
                await news.put(error)

        tasks = [asyncio.ensure_future(follow(number, job)) for number, job in enumerate(self.jobs)]
        try:
            running = len(tasks)
            while running:
                item = await news.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    running -= 1
                elif self.is_news(*item):
                    yield item
        finally:
            for task in tasks:
                task.cancel()

    def is_news(self, number: int, delta: Delta) -> bool:
        """Whether a delta is sent. Without text and log-probabilities it is not."""
        return bool(delta.text or delta.reason or self.jobs[number].options.logprobs is not None)

    @property
    def usage_wanted(self) -> bool:
        options = self.asked.stream_options
        return options is not None and options.include_usage


@dataclass
class CompletionAnswer(Answer):
    prompts: list[str | list[int]] = field(default_factory=list)

    def head(self) -> dict[str, Any]:
        name = f"cmpl-{self.name}"
        return {"id": name, "object": "text_completion", "created": self.created, "model": self.served.name}

    def prompt_text(self, number: int) -> str:
        prompt, tokenizer = self.prompts[number], self.served.writer.core.tokenizer
        return prompt if isinstance(prompt, str) else "" if tokenizer is None else tokenizer.decode(prompt)

    def logprobs(self, job: Job, scores: Sequence[TokenScore], offset: int) -> dict[str, Any] | None:
        if self.asked.logprobs is None:
            return None
        return completion_logprobs(self.served.token_texts, scores, offset)

    async def whole(self) -> dict[str, Any]:
        choices = []
        for number, (text, tokens, reason) in enumerate(await self.gather()):
            job = self.jobs[number // self.count]
            before = self.prompt_text(number // self.count) if self.asked.echo else ""
            scores = [*job.prompt_scores, *tokens] if self.asked.echo else tokens
            offset = 0 if self.asked.echo else len(self.prompt_text(number // self.count))
            logprobs = self.logprobs(job, scores, offset)
            choices.append({"index": number, "text": before + text, "logprobs": logprobs, "finish_reason": reason})
        return self.head() | {"choices": choices, "usage": self.usage()}

    async def stream(self) -> AsyncIterator[Any]:
        extra: dict[str, Any] = {"usage": None} if self.usage_wanted else {}
        offsets: dict[int, int] = {}  # where the next token of each choice begins in its text
        async for number, delta in self.merge():
            index, job, text, scores = number * self.count + delta.choice, self.jobs[number], delta.text, delta.tokens
            if index not in offsets:
                offsets[index] = 0 if self.asked.echo else len(self.prompt_text(number))
                if self.asked.echo:
                    text, scores = self.prompt_text(number) + text, (*job.prompt_scores, *scores)
            logprobs = self.logprobs(job, scores, offsets[index])
            if logprobs is not None:
                offsets[index] += sum(map(len, logprobs["tokens"]))
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason(delta)}
            yield self.head() | {"choices": [choice]} | extra
        if self.usage_wanted:
            yield self.head() | {"choices": [], "usage": self.usage()}


@dataclass
class ChatAnswer(Answer):
    def head(self, kind: str) -> dict[str, Any]:
        return {"id": f"chatcmpl-{self.name}", "object": kind, "created": self.created, "model": self.served.name}

    def logprobs(self, scores: Sequence[TokenScore]) -> dict[str, Any] | None:
        return chat_logprobs(self.served.token_texts, scores) if self.asked.logprobs else None

    async def whole(self) -> dict[str, Any]:
        choices = []
        for number, (text, tokens, reason) in enumerate(await self.gather()):
            message, finish = self.message(text, reason)
            choices.append(
                {"index": number, "message": message, "logprobs": self.logprobs(tokens), "finish_reason": finish}
            )
        return self.head("chat.completion") | {"choices": choices, "usage": self.usage()}

    def message(self, text: str, reason: str | None) -> tuple[dict[str, Any], str | None]:
        """The message of an answer; text that calls tools becomes `tool_calls`."""
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        calls = parse_tool_calls(text) if self.asked.tools and self.asked.tool_choice != "none" else []
        if not calls:
            return message, reason
        if self.asked.parallel_tool_calls is False:
            calls = calls[:1]
        return message | {"content": None, "tool_calls": calls}, "tool_calls"

    async def stream(self) -> AsyncIterator[Any]:
        extra: dict[str, Any] = {"usage": None} if self.usage_wanted else {}
        held = [""] * self.count  # with tools, text waits for the end: it may become a call
        holds = bool(self.asked.tools) and self.asked.tool_choice != "none"
        started: set[int] = set()
        async for _, delta in self.merge():
            news: dict[str, Any] = {} if delta.choice in started else {"role": "assistant"}
            started.add(delta.choice)
            held[delta.choice] += delta.text
            finish = finish_reason(delta)
            if not holds:
                news["content"] = delta.text
            elif delta.reason is not None:
                message, finish = self.message(held[delta.choice], finish)
                calls = message.get("tool_calls", [])
                news |= {"tool_calls": [{"index": i} | call for i, call in enumerate(calls)]} if calls else message
            logprobs = self.logprobs(delta.tokens)
            choice = {"index": delta.choice, "delta": news, "logprobs": logprobs, "finish_reason": finish}
            yield self.head("chat.completion.chunk") | {"choices": [choice]} | extra
        if self.usage_wanted:
            yield self.head("chat.completion.chunk") | {"choices": [], "usage": self.usage()}


def finish_reason(delta: Delta) -> str | None:
    """Why a choice ended, in OpenAI's words; an end token counts as "stop"."""
    return "stop" if delta.reason == "end" else delta.reason


def usage_json(jobs: Sequence[Job]) -> dict[str, Any]:
    """Tokens of all prompts and of all choices."""
    prompt, completion = (sum(getattr(job.usage, name) for job in jobs) for name in ("prompt", "completion"))
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(job.usage.cached for job in jobs)},
    }
