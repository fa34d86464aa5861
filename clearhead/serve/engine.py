"""The engine in a thread of its own.

with Engine(model) as engine:
    for delta in engine.submit("Once upon a time", max_new_tokens=50):
        print(delta.text, end="")
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Unpack

from clearhead.configs.decoding import DecodingOptions
from clearhead.generate.complete import TextGenerator
from clearhead.generate.engine import EngineCore, EngineOptions, EngineSettings, QueueFull
from clearhead.generate.job import AsyncReader, Job, JobError, JobOptions, ring
from clearhead.generate.speculate import Draft
from clearhead.models.model import Model
from clearhead.tokenize import Tokenizer


class Engine:
    """`EngineCore` in a thread. Every method may be called from any thread; `options` are those of `EngineOptions`.

    draft  a smaller model that proposes tokens; it changes the speed and not the text
    lock   engines that share a lock take turns, one step each
    """

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer | None = None,
        *,
        draft: Draft | None = None,
        lock: threading.Lock | None = None,
        **options: Unpack[EngineSettings],
    ) -> None:
        self.core = EngineCore(TextGenerator.of(model, tokenizer, draft), EngineOptions(**options))
        self.commands: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self.failure: BaseException | None = None
        self.stopping = False
        self.pending = 0  # submitted, not taken by the engine yet
        self.counting, self.turn = threading.Lock(), lock or threading.Lock()
        self.bell: list[AsyncReader] = []
        self.thread = threading.Thread(target=self.run, name="clearhead-engine", daemon=True)
        self.thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def submit(
        self, prompt: str | Sequence[int], *, logprobs: int | None = None, **options: Unpack[DecodingOptions]
    ) -> Job:
        """Start a request. `options` are the fields of `configs.DecodingConfig`."""
        generator = TextGenerator.of(self.core.model, self.core.tokenizer, **options)
        ids = generator.encode(prompt)
        limit = min(generator.limit(ids), self.core.length - len(ids) + 1)
        wanted = JobOptions(config=generator.config, limit=limit, choices=generator.config.n, logprobs=logprobs)
        return self.submit_jobs([ids], wanted)[0]

    def submit_jobs(self, prompts: Sequence[Sequence[int]], options: JobOptions) -> list[Job]:
        """Start one job per prompt, all or none; raises `JobError` if one can never run or the queue is full."""
        if self.failure is not None or self.stopping:
            raise JobError("the engine has stopped", "stopped")
        with self.counting:
            jobs = [self.core.new_job(ids, options) for ids in prompts]
            if self.pending + len(self.core.waiting) >= self.core.options.queue:
                raise QueueFull(self.core.options.queue)
            self.pending += len(jobs)
        for job in jobs:
            job.bell = self.bell
        self.commands.put(lambda: self.take(jobs))
        return jobs

    def take(self, jobs: list[Job]) -> None:
        with self.counting:
            self.pending -= len(jobs)
            self.core.waiting += jobs

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
                        with self.turn:
                            command()
                        block = False
                with self.turn:
                    self.safe_step()
                self.wake_readers()
        except BaseException as error:
            self.failure = error
        finally:
            self.end_all(JobError("the server is stopping", "stopped"))

    def safe_step(self) -> None:
        """One step. An exception ends the requests that were running, and the engine goes on."""
        try:
            self.core.step()
        except Exception as error:
            for job in self.core.running():
                job.finish(JobError(f"a forward pass failed: {error}", "server_error"))
                self.core.remove(job)

    def end_all(self, error: JobError) -> None:
        for job in [*self.core.waiting, *self.core.running()]:
            job.finish(error)
        self.wake_readers()

    def wake_readers(self) -> None:
        """Wake everybody who got news in this step, at once: their work then takes the fewest turns with ours."""
        readers = self.bell.copy()
        self.bell.clear()
        ring(readers)

    @property
    def idle(self) -> bool:
        return not self.core.busy and self.pending == 0

    def stop(self) -> None:
        self.stopping = True
        self.commands.put(None)
        self.thread.join(timeout=30)
