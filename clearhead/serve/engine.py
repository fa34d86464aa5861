"""The engine: continuous batching of many requests, in one thread.

    with Engine(model) as engine:
        for delta in engine.submit("Once upon a time", max_new_tokens=50):
            print(delta.text, end="")

One step writes one token in every text and reads at most one chunk of one prompt:

    take commands → start the next request → decode pass → prefill chunk → choose tokens, hand over text

A request gives the same text and log-probabilities alone and among others, with and without the prefix cache: prompts
are read alone, in chunks that start at multiples of CHUNK, and tokens are chosen row by row.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from clearhead.generate.complete import TextGenerator
from clearhead.generate.loop import check_numbers
from clearhead.generate.row import Detokenizer, Row
from clearhead.models.model import Model, SequenceModel
from clearhead.tokenize import Tokenizer

from .choose import Chooser, score
from .job import Delta, Job, JobError, JobOptions, TokenScore
from .memory import RowMemory
from .plan import Ticket, next_ticket, passes
from .prefix import PrefixCache

CHUNK = 64  # tokens of a prompt per pass
PASS = 32  # rows per decode pass; the kernels read each matrix once for so many
LENGTH = 2048  # tokens per text, if the model has no context length
QUEUE = 64


class QueueFull(JobError):
    """Too many requests are waiting."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} requests are waiting already; try again later", "queue_full")


@dataclass
class Text:
    """One text being written, in the decode row of the same index."""

    job: Job
    choice: int
    row: Row
    chooser: Chooser
    token: int = 0  # sampled, not yet fed to the model


@dataclass
class Prefill:
    """The prompt that is being read."""

    job: Job
    read: int


@dataclass(frozen=True)
class EngineOptions:
    rows: int = 8  # texts written at once
    length: int | None = None  # tokens per text, prompt included; None: the model's context
    queue: int = QUEUE
    cache_bytes: int = 256 * 2**20  # of the prefix cache; 0: off


class EngineCore:
    """The engine without its thread: `submit`, then `step` until it returns False."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None = None, options: EngineOptions | None = None) -> None:
        self.options = options or EngineOptions()
        self.generator = TextGenerator.of(model, tokenizer)
        if not isinstance(model, SequenceModel):
            raise ValueError("an encoder–decoder cannot be served yet; use `clearhead translate` or `generate`")
        self.model, self.tokenizer = model, self.generator.tokenizer
        bound = self.generator.context or LENGTH
        self.length = min(self.options.length or bound, bound)
        self.memory = RowMemory(model, max(2, self.options.rows), self.length)
        self.prefix = PrefixCache(CHUNK, self.options.cache_bytes)
        self.device = next(model.parameters()).device
        self.texts: list[Text] = []
        self.waiting: list[Job] = []
        self.prefill: Prefill | None = None
        self.last_turn: dict[str, int] = {}
        self.steps = 0
        self.submitted = 0

    # ---- requests

    def new_job(self, ids: Sequence[int], options: JobOptions) -> Job:
        """Check a request and give it a number. It is not in the queue yet."""
        self.generator.check(ids)
        if options.choices > self.options.rows:
            raise JobError(f"n={options.choices} is more than the {self.options.rows} rows of this server", "n")
        if len(ids) + max(options.limit, 1) - 1 > self.length:
            raise JobError(
                f"the prompt has {len(ids):,} tokens and {options.limit:,} new ones are wanted, but this server's "
                f"context is {self.length:,} tokens",
                "context_length_exceeded",
            )
        self.submitted += 1
        return Job(self.submitted, list(ids), options)

    def add(self, job: Job) -> None:
        if len(self.waiting) >= self.options.queue:
            job.finish(QueueFull(self.options.queue))
        else:
            self.waiting.append(job)

    @property
    def busy(self) -> bool:
        return bool(self.texts or self.waiting or self.prefill)

    # ---- one step

    @torch.inference_mode()
    def step(self) -> bool:
        """Write one token in every text and read one chunk of one prompt; False if there is nothing to do."""
        self.steps += 1
        self.drop_cancelled()
        if self.prefill is None:
            self.start_next()
        if self.texts:
            self.decode()
        if self.prefill is not None:
            self.read_chunk(self.prefill)
        return self.busy

    def drop_cancelled(self) -> None:
        """Free the rows of requests whose client has left or whose time is over."""
        now = time.monotonic()
        jobs = {id(job): job for job in (*self.waiting, *(text.job for text in self.texts))}
        if self.prefill is not None:
            jobs[id(self.prefill.job)] = self.prefill.job
        for job in jobs.values():
            if job.options.deadline is not None and now > job.options.deadline and not job.done:
                job.finish(JobError("the request took longer than this server's --timeout", "timeout"))
            if job.cancelled or job.done:
                self.remove(job)

    def remove(self, job: Job) -> None:
        self.waiting = [one for one in self.waiting if one is not job]
        if self.prefill is not None and self.prefill.job is job:
            self.prefill = None
        for index in reversed(range(len(self.texts))):
            if self.texts[index].job is job:
                self.free(index)
        job.finish()

    def free(self, index: int) -> None:
        """End the text in a row; the last active row takes its place."""
        last = len(self.texts) - 1
        if index != last:
            self.memory.copy(last, index)
            self.texts[index] = self.texts[last]
        self.memory.clear(last)
        self.texts.pop()

    def start_next(self) -> None:
        tickets = [Ticket(job.number, job.options.user, job.options.choices) for job in self.waiting]
        chosen = next_ticket(tickets, self.options.rows - len(self.texts), self.last_turn)
        if chosen is None:
            return
        job = next(one for one in self.waiting if one.number == chosen.number)
        self.waiting.remove(job)
        self.last_turn[chosen.user] = self.steps
        if len(self.last_turn) > 10_000:
            self.last_turn = {chosen.user: self.steps}
        saved = [] if job.options.echo_logprobs else self.prefix.match(job.ids[:-1])
        self.memory.load(self.memory.staging, saved, CHUNK)
        job.usage.prompt, job.usage.cached = len(job.ids), len(saved) * CHUNK
        if job.options.echo_logprobs:
            job.prompt_scores.append(TokenScore(job.ids[0], None))
        self.prefill = Prefill(job, len(saved) * CHUNK)

    # ---- passes

    def decode(self) -> None:
        """Read the last token of every text, and choose the next one."""
        logits = []
        for first, last in passes(len(self.texts), PASS):
            chosen = [[text.token] for text in self.texts[first:last]]
            alone = len(chosen) == 1  # kernels for one row round differently: an idle row beside it keeps the answer
            view = self.memory.view(first, last + alone)
            tokens = torch.tensor(chosen + [[0]] * alone, device=self.device)
            logits.append(self.model.next_logits(tokens, view)[: len(chosen)])
            self.memory.commit(view, first)
            if alone:
                self.memory.clear(last)
        self.extend(list(enumerate(self.texts)), torch.cat(logits))

    def read_chunk(self, prefill: Prefill) -> None:
        """Read the next chunk of the prompt; after the last one, the request starts to write."""
        job, start = prefill.job, prefill.read
        stop = min(start + CHUNK, len(job.ids))
        row, tokens = self.memory.staging, torch.tensor([job.ids[start:stop]], device=self.device)
        view = self.memory.view(row, row + 1)
        if job.options.echo_logprobs:
            every = self.model(tokens, state=view)[0]
            for place in range(start, stop):
                if place + 1 < len(job.ids):
                    job.prompt_scores.append(score(every[place - start], job.ids[place + 1], job.options.logprobs))
            logits = every[-1:]
        else:
            logits = self.model.next_logits(tokens, view)
        self.memory.commit(view, row)
        prefill.read = stop
        if stop % CHUNK == 0 and not job.options.echo_logprobs and self.prefix.limit:
            self.prefix.insert(job.ids[:stop], self.memory.save(row, start, stop))
        if stop == len(job.ids):
            self.prefill = None
            self.start_writing(job, logits)

    def start_writing(self, job: Job, logits: Tensor) -> None:
        config, started = job.options.config, []
        job.open_choices = job.options.choices
        if job.options.limit == 0:
            for choice in range(job.options.choices):
                job.put(Delta(choice, reason="length"))
            job.finish()
            return
        for choice in range(job.options.choices):
            self.memory.copy(self.memory.staging, len(self.texts))
            detokenizer = None if self.tokenizer is None else Detokenizer(self.tokenizer, job.ids)
            row = Row(0, job.options.limit, detokenizer, config.stop, choice)
            chooser = Chooser(job.options, choice, job.ids)
            if job.options.grammar is not None:
                chooser.matcher = job.options.grammar.matcher()
            self.texts.append(Text(job, choice, row, chooser))
            started.append((len(self.texts) - 1, self.texts[-1]))
        self.extend(started, logits.expand(job.options.choices, -1))

    def extend(self, texts: Sequence[tuple[int, Text]], logits: Tensor) -> None:
        """Choose the next token of each text, hand over what it completes, and free the texts that end."""
        nan = logits.isnan().any(dim=1).tolist()
        best = logits.argmax(dim=1).tolist() if any(text.chooser.plain for _, text in texts) else []
        ended = []
        for place, (index, text) in enumerate(texts):
            if nan[place]:
                self.fail(text.job, logits[place : place + 1])
                ended.append(index)
                continue
            plain = text.chooser.plain
            chosen = TokenScore(best[place], None) if plain else text.chooser.choose(logits[place])
            text.token = chosen.token
            piece = text.chooser.accept(chosen.token, text.row)
            self.hand_over(text, chosen, piece)
            if text.row.reason is not None:
                ended.append(index)
        for index in sorted(ended, reverse=True):
            self.free(index)

    def fail(self, job: Job, logits: Tensor) -> None:
        """End a request whose logits are NaN, with a sentence that names the layer."""
        try:
            check_numbers(self.model, logits)
        except ValueError as error:
            job.finish(JobError(str(error), "nan"))

    def hand_over(self, text: Text, chosen: TokenScore, piece: str) -> None:
        job, reason = text.job, text.row.reason
        job.usage.completion += 1
        if job.first_token is None:
            job.first_token = time.monotonic()
        finish = None if reason is None else "length" if reason == "length" else "stop"
        job.put(Delta(text.choice, piece, (chosen,), finish))  # type: ignore[arg-type]
        if reason is not None:
            job.open_choices -= 1
            if job.open_choices == 0:
                job.finish()


class Engine:
    """`EngineCore` in a thread of its own. Every method may be called from any thread."""

    def __init__(self, model: Model, tokenizer: Tokenizer | None = None, **options: Any) -> None:
        self.core = EngineCore(model, tokenizer, EngineOptions(**options))
        self.commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self.stopping = False
        self.pending = 0  # submitted, not taken by the engine yet
        self.lock = threading.Lock()
        self.thread = threading.Thread(target=self.run, name="clearhead-engine", daemon=True)
        self.thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit(self, prompt: str | Sequence[int], *, logprobs: int | None = None, **options: Any) -> Job:
        """Start a request. `options` are the fields of `configs.DecodingConfig`."""
        generator = TextGenerator.of(self.core.model, self.core.tokenizer, **options)
        ids = generator.encode(prompt)
        limit = min(generator.limit(ids), self.core.length - len(ids) + 1)
        wanted = JobOptions(config=generator.config, limit=limit, choices=generator.config.n, logprobs=logprobs)
        return self.submit_job(ids, wanted)

    def submit_job(self, ids: Sequence[int], options: JobOptions) -> Job:
        """Start a request with all its options; raises `JobError` if it can never run or the queue is full."""
        if self.failure is not None or self.stopping:
            raise JobError("the engine has stopped", "stopped")
        job = self.core.new_job(ids, options)
        with self.lock:
            if self.pending + len(self.core.waiting) >= self.core.options.queue:
                raise QueueFull(self.core.options.queue)
            self.pending += 1
        self.commands.put(lambda: self.take(job))
        return job

    def take(self, job: Job) -> None:
        with self.lock:
            self.pending -= 1
        self.core.add(job)

    def call(self, work: Callable[[], Any]) -> Future[Any]:
        """Run other work on the engine's thread, between two steps."""
        future: Future[Any] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except Exception as error:
                    future.set_exception(error)

        self.commands.put(run)
        return future

    def run(self) -> None:
        try:
            while True:
                block = not self.core.busy
                with contextlib.suppress(queue.Empty):
                    while True:
                        command = self.commands.get(block=block)
                        if command is None:
                            return
                        command()
                        block = False
                self.safe_step()
        except BaseException as error:
            self.failure = error
        finally:
            self.end_all(JobError("the server is stopping", "stopped"))

    def safe_step(self) -> None:
        """One step. An exception ends the requests that were running, and the engine goes on."""
        try:
            self.core.step()
        except Exception as error:
            jobs = {id(text.job): text.job for text in self.core.texts}
            if self.core.prefill is not None:
                jobs[id(self.core.prefill.job)] = self.core.prefill.job
            for job in jobs.values():
                job.finish(JobError(f"a forward pass failed: {error}", "server_error"))
                self.core.remove(job)

    def end_all(self, error: JobError) -> None:
        core = self.core
        for job in [*core.waiting, *(text.job for text in core.texts), *([core.prefill.job] if core.prefill else [])]:
            job.finish(error)

    @property
    def idle(self) -> bool:
        return not self.core.busy and self.pending == 0

    def drain(self, seconds: float) -> None:
        """Take no new requests, and wait until those that run are done."""
        self.stopping = True
        end = time.monotonic() + seconds
        while not self.idle and time.monotonic() < end:
            time.sleep(0.02)

    def stop(self) -> None:
        self.stopping = True
        self.commands.put(None)
        self.thread.join(timeout=30)
