"""Sentences into another language, or whatever an encoder–decoder has learned to write for a source."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_all_start_methods, get_context
from typing import Any

import torch

from clearhead.configs import Wu
from clearhead.generate.complete import Completion, Task, searched, written
from clearhead.inspect.grid import Grid
from clearhead.inspect.look import Inspection, inspect
from clearhead.models.assemble import EncoderDecoder, Model
from clearhead.tokenize import Tokenizer

BATCH = 32  # sentences worked on together
LONGEST = 512  # tokens of a sentence that are read, where the model itself sets no bound
STRETCH = 3, 32  # a translation has at most so many times its source's tokens, and so many more


class Translating(Task):
    """A task whose texts end: how long one may become is a matter of its own source alone."""

    def limit(self, ids: Sequence[int]) -> int:
        return min(super().limit(ids), STRETCH[0] * len(ids) + STRETCH[1])

    def read(self, text: str, number: int) -> list[int]:
        """The tokens of a sentence; of one that is too long its beginning, and it is said."""
        assert self.tokenizer is not None
        ids, most = self.tokenizer.prompt(text), min(self.context or LONGEST, LONGEST)
        if len(ids) > most:
            warnings.warn(f"line {number + 1} has {len(ids):,} tokens; its first {most} are translated", stacklevel=2)
            ids = [*ids[: most - 1], ids[-1]]
        return ids


def translate(
    model: Model,
    texts: Sequence[str],
    *,
    tokenizer: Tokenizer | None = None,
    batch: int = BATCH,
    workers: int = 1,
    progress: Callable[[int], object] = lambda done: None,
    **options: Any,
) -> list[list[Completion]]:
    """For each text the best `n` translations, best first; an empty text stays empty.

    Texts of about one length are worked on together, which changes nothing in what is written, by so many `workers` at
    once, where processes can be forked. `progress` is told how many are done; options as of
    `generate.complete.generate`, of which `beams` is 5 and `length_penalty` Wu(0.6) here.
    """
    if not isinstance(model, EncoderDecoder):
        raise ValueError(f"a {model.config.kind()} reads no source, so it does not translate; see `clearhead generate`")
    if batch < 1:
        raise ValueError(f"batch is {batch}, but must be at least 1")
    asked: dict[str, Any] = {"beams": 5, "length_penalty": Wu(0.6)} | options
    task = Translating.of(model, tokenizer, **asked)
    if task.tokenizer is None:
        raise ValueError("the model came with no tokenizer; give tokenizer=")
    assert isinstance(task, Translating)
    sources = [(i, task.read(text, i)) for i, text in enumerate(texts) if text.strip()]
    empty = len(texts) - len(sources)
    made = written_for(task, sources, batch, lambda done: progress(empty + done), workers)
    nothing = [Completion(-1, "", [], "end", score=0.0)] * task.config.n
    found = [made.get(i, nothing) for i in range(len(texts))]
    return [[replace(one, prompt=i, text=one.text.strip()) for one in best] for i, best in enumerate(found)]


def written_for(
    task: Task,
    sources: Sequence[tuple[int, list[int]]],
    batch: int,
    progress: Callable[[int], object] = lambda done: None,
    workers: int = 1,
) -> dict[int, list[Completion]]:
    """What is written for numbered sources, best first; those of about one length are worked on together."""
    workers = min(workers, len(sources)) if can_fork(task.model) else 1
    size = min(batch, -(-len(sources) // max(workers, 1))) or 1
    ordered = sorted(sources, key=lambda source: len(source[1]), reverse=True)  # the longest first: none is waited for
    parts = [ordered[first : first + size] for first in range(0, len(ordered), size)]
    found: dict[int, list[Completion]] = {}
    for made in parted(task, parts, workers) if workers > 1 else (work(task, part) for part in parts):
        for one in made:
            found.setdefault(one.prompt, []).append(one)
        progress(len(found))
    return found


def work(task: Task, part: Sequence[tuple[int, list[int]]]) -> list[Completion]:
    return searched(task, part, False) if task.config.beams > 1 else written(task, part, False)


# ---- several processes: two batches that have a core each are done sooner than two that share both, one by one


def can_fork(model: Model) -> bool:
    """Whether a process can have copies that share its memory, and with it the model."""
    return "fork" in get_all_start_methods() and next(model.parameters()).device.type == "cpu"


def parted(task: Task, parts: Sequence[Sequence[tuple[int, list[int]]]], workers: int) -> Iterator[list[Completion]]:
    """What each part comes to, as soon as it does, by so many copies of this process, which share its threads."""
    threads = max(1, torch.get_num_threads() // workers)
    with ProcessPoolExecutor(workers, get_context("fork"), begin_work, (task, threads)) as pool:
        for done in as_completed([pool.submit(work_here, part) for part in parts]):
            yield done.result()


HERE: list[Task] = []  # of a copy: the task that it was made with


def begin_work(task: Task, threads: int) -> None:
    torch.set_num_threads(threads)
    HERE.append(task)


def work_here(part: Sequence[tuple[int, list[int]]]) -> list[Completion]:
    return work(HERE[0], part)


def look_at_translation(model: Model, text: str, one: Completion, tokenizer: Tokenizer | None = None) -> Inspection:
    """The model as it reads a source and what it has written for it."""
    task = Translating.of(model, tokenizer)
    assert task.config.start is not None
    return inspect(model, text, [task.config.start, *one.tokens[:-1]], tokenizer=tokenizer)


def alignment(looked: Inspection) -> Grid:
    """What each token was written from: the mean of all cross-attention, a row for the token that was to be written."""
    maps = [map for map in looked.maps if map.place == "cross"]
    weights = sum(map.weights().mean(0) for map in maps) / len(maps)
    rows, columns = looked.names(maps[0])
    return Grid(
        title=f"{looked.subject.name}: what is read of the source",
        values=weights,
        rows=[*rows[1:], "end"],
        columns=columns,
        row_axis="is written",
        column_axis="is read",
        unit="weight",
        note=f"mean of {len(maps)} layers and their heads",
    )
