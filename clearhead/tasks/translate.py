"""Sentences into another language, or whatever an encoder–decoder has learned to write for a source."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from itertools import islice
from multiprocessing import get_context
from typing import Unpack

import torch

from clearhead.configs import Wu
from clearhead.configs.decoding import DecodingOptions
from clearhead.generate.complete import Completion, TextGenerator, complete_batch
from clearhead.kernels.build import kernels
from clearhead.models.model import EncoderDecoder, Model
from clearhead.models.origin import SAMPLING
from clearhead.tokenize import Tokenizer

BATCH = 32  # sentences worked on together
LONGEST = 512  # tokens of a sentence that are read, where the model itself sets no bound
STRETCH = 3, 32  # a translation has at most so many times its source's tokens, and so many more


class Translating(TextGenerator):
    """A text generator whose default length limit depends on the length of the source."""

    def default_limit(self, ids: Sequence[int]) -> int:
        return STRETCH[0] * len(ids) + STRETCH[1]

    def read(self, text: str, number: int | None = None) -> list[int]:
        """The tokens of a sentence. A sentence that is too long is cut; if it has a number, with a warning."""
        assert self.tokenizer is not None
        ids, most = self.tokenizer.encode_source(text), min(self.context or LONGEST, LONGEST)
        if len(ids) > most and number is not None:
            warnings.warn(
                f"line {number + 1} has {len(ids):,} tokens; only the first {most} are translated", stacklevel=2
            )
        return ids if len(ids) <= most else [*ids[: most - 1], ids[-1]]


def translate(
    model: Model,
    texts: Sequence[str],
    *,
    tokenizer: Tokenizer | None = None,
    batch: int = BATCH,
    workers: int = 1,
    progress: Callable[[int], object] = lambda done: None,
    **options: Unpack[DecodingOptions],
) -> list[list[Completion]]:
    """The best `n` translations of each text, best first. An empty text stays empty.

    batch     texts of similar length that are translated together; the result does not depend on it
    workers   processes to use, if the system can fork
    progress  called with the number of finished texts
    options   those of `generate.complete.generate`; by default `beams` is 5 and `length_penalty` Wu(0.6)
    """
    if not isinstance(model, EncoderDecoder):
        raise ValueError(f"a {model.config.kind()} has no encoder, so it cannot translate; use `clearhead generate`")
    if batch < 1:
        raise ValueError(f"batch is {batch}, but must be at least 1")
    asked: DecodingOptions = {"beams": 5, "length_penalty": Wu(0.6), **options}
    if asked["beams"] == 1 and not asked.keys() & SAMPLING:
        asked["temperature"] = 0.0  # greedy, even if the checkpoint's defaults ask for sampling
    task = Translating.of(model, tokenizer, **asked)
    if task.tokenizer is None:
        raise ValueError("the model has no tokenizer; pass tokenizer=")
    sources = [(i, task.read(text, i)) for i, text in enumerate(texts) if text.strip()]
    empty = len(texts) - len(sources)
    written = complete_all(task, sources, batch, lambda done: progress(empty + done), workers)
    nothing = [Completion(-1, "", [], "end", score=0.0)] * task.config.n
    found = [written.get(i, nothing) for i in range(len(texts))]
    return [[replace(one, prompt=i, text=one.text.strip()) for one in best] for i, best in enumerate(found)]


def complete_all(
    task: TextGenerator,
    sources: Sequence[tuple[int, list[int]]],
    batch: int,
    progress: Callable[[int], object] = lambda done: None,
    workers: int = 1,
) -> dict[int, list[Completion]]:
    """Completions of numbered sources, best first. Sources of similar length share a batch."""
    workers = min(workers, len(sources)) if can_fork(task.model) else 1
    size = min(batch, -(-len(sources) // max(workers, 1))) or 1
    ordered = sorted(
        sources, key=lambda source: len(source[1]), reverse=True
    )  # the longest first, so that no worker finishes late
    parts = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    found: dict[int, list[Completion]] = {}
    for some in (
        complete_in_workers(task, parts, workers) if workers > 1 else (complete_batch(task, part) for part in parts)
    ):
        for one in some:
            found.setdefault(one.prompt, []).append(one)
        progress(len(found))
    return found


# ---- several processes: two batches that have a core each are done sooner than two that share both, one by one


def can_fork(model: Model) -> bool:
    """Whether forked processes can share the model. Outside Linux, system libraries do not survive a fork."""
    return sys.platform == "linux" and next(model.parameters()).device.type == "cpu"


def complete_in_workers(
    task: TextGenerator, parts: Sequence[Sequence[tuple[int, list[int]]]], workers: int
) -> Iterator[list[Completion]]:
    """Yield the completions of each part as soon as they are ready, from forked workers with one thread each."""
    kernels()  # compiled here, if they must be, once for all
    pool = ProcessPoolExecutor(workers, get_context("fork"), begin_work, (task, os.getpid()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads, which wait for work
            waiting = iter(parts)
            running = {pool.submit(work_here, part) for part in islice(waiting, workers)}
        while running:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            running |= {pool.submit(work_here, part) for part in islice(waiting, len(done))}
            for one in done:
                yield one.result()
    except BrokenProcessPool:
        raise ValueError("a worker process was killed, probably because memory ran out; use a smaller batch") from None
    finally:
        pool.shutdown()


HERE: list[TextGenerator] = []  # of a copy: the task that it was made with
DEATH_SIGNAL = 1  # prctl's PR_SET_PDEATHSIG


def begin_work(task: TextGenerator, parent: int) -> None:
    """Prepare a worker: it dies with its parent, ignores interrupts and uses one thread."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(DEATH_SIGNAL, signal.SIGKILL)
    if os.getppid() != parent:  # it had left before it could be asked
        os._exit(1)
    torch.set_num_threads(1)
    HERE.append(task)


def work_here(part: Sequence[tuple[int, list[int]]]) -> list[Completion]:
    return complete_batch(HERE[0], part)
