"""What a part is for: take a head away, or put one prompt's values into another, and see what the model says then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from clearhead.nn.tap import Taps

from .grid import Grid
from .lens import said_at
from .maps import Map
from .subject import Subject, output_of

TOKENS_AT_ONCE = 4096  # how many tokens a batch of copies may hold
Part = Literal["residual", "mixer", "ffn", "heads"]


def log_probabilities(subject: Subject, token: int, row: int, taps: Taps | None = None, copies: int = 1) -> np.ndarray:
    """log p(token) after position `row`, or of a class, in each copy."""
    return said_at(subject, subject.run(taps, copies), row).double().log_softmax(-1)[:, token].numpy()


def likeliest(subject: Subject, row: int) -> int:
    return int(said_at(subject, subject.run(), row)[0].argmax())


def ablate(subject: Subject, maps: Sequence[Map], token: str | int | None = None, row: int = -1) -> Grid:
    """What each head adds to log p(token): the change when what the head mixed is set to zero."""
    if not maps:
        raise ValueError(f"no layer of {subject.name} that was looked at has heads to take away")
    id = likeliest(subject, row) if token is None else subject.token(token)
    before = log_probabilities(subject, id, row)[0]
    values = np.full((len(maps), max(max(map.heads) for map in maps) + 1), np.nan)
    for line, map in enumerate(maps):
        for heads in batches(map.heads, len(subject.labels)):
            taps = Taps(replace={f"{path_of(map)}.mixed": putting(heads, 0)})
            values[line, heads] = log_probabilities(subject, id, row, taps, len(heads)) - before
    return Grid(
        title=f"without a head: change in log p({subject.word(id)!r}), which is {before:.3g}",
        values=values,
        rows=[f"{map.place} {map.layer}" for map in maps],
        columns=[str(head) for head in range(values.shape[1])],
        row_axis="layer",
        column_axis="head set to zero",
        unit="change in log p (nats)",
        signed=True,
    )


def patch(
    subject: Subject,
    other: Subject,
    maps: Sequence[Map],
    token: str | int | None = None,
    row: int = -1,
    part: Part = "residual",
) -> Grid:
    """What carries the answer: one value of `subject`'s run put into `other`'s, and the change in log p(token) there.

    token  by default what the model says after `subject`
    part   residual, mixer, ffn: by layer and position; heads: by layer and head, over all positions
    """
    check_alike(subject.labels, other.labels)
    if torch.equal(subject.inputs, other.inputs) and alike(subject.source, other.source):
        raise ValueError(
            "both prompts are the same, so nothing of one changes the other; give another one to compare with"
        )
    if part == "heads":
        check_alike(subject.source_labels or [], other.source_labels or [])
    id = likeliest(subject, row) if token is None else subject.token(token)
    here, there = (log_probabilities(each, id, row)[0] for each in (subject, other))
    if part == "heads":
        lines = [(f"{map.place} {map.layer}", f"{path_of(map)}.mixed", list(map.heads)) for map in maps]
    else:
        every = list(range(len(subject.labels)))
        lines = [
            (f"layer {i}", f"{subject.place}.blocks.{i}.{patched(block, part)}", every)
            for i, block in enumerate(subject.blocks)
            if part == "residual" or getattr(block, part) is not None
        ]
    if not lines:
        raise ValueError(f"no layer of {subject.name} that was looked at has {part} to be put into another run")
    clean = Taps(read=[path for _, path, _ in lines])
    subject.run(clean)
    width = max(max(at) for _, _, at in lines) + 1
    values = np.full((len(lines), width), np.nan)
    for line, (_, path, places) in enumerate(lines):
        for at in batches(places, len(subject.labels)):
            taps = Taps(replace={path: putting(at, clean.values[path][0, at])})
            values[line, at] = log_probabilities(other, id, row, taps, len(at)) - there
    columns = (
        [str(head) for head in range(width)]
        if part == "heads"
        else [a if a == b else f"{b}→{a}" for a, b in zip(subject.labels, other.labels, strict=True)]
    )
    return Grid(
        title=f"{part} of this prompt put into the other: change in log p({subject.word(id)!r})",
        values=values,
        rows=[name for name, _, _ in lines],
        columns=columns,
        row_axis="layer",
        column_axis="head" if part == "heads" else "position",
        unit="change in log p (nats)",
        signed=True,
        note=f"log p is {here:.2f} after this prompt and {there:.2f} after the other",
    )


def alike(one: Tensor | None, other: Tensor | None) -> bool:
    return other is None if one is None else other is not None and torch.equal(one, other)


def check_alike(these: Sequence[str], those: Sequence[str]) -> None:
    if len(these) != len(those):
        raise ValueError(
            f"the prompts are {len(these)} and {len(those)} tokens; values of one can stand in the "
            f"other only if they are equally long: {'|'.join(these)} and {'|'.join(those)}"
        )


def putting(at: Sequence[int], value: Tensor | int) -> Callable[[Tensor], Tensor]:
    """In the first copy the first of these heads or positions gets its value, in the second the second, and so on."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[torch.arange(len(at)), list(at)] = value
        return x

    return change


def patched(block: object, part: Part) -> str:
    """The tap of a branch before it is added, or of what the block hands on."""
    if part == "residual":
        return output_of(block)  # type: ignore[arg-type]
    return f"{part}_residual.inside"


def path_of(map: Map) -> str:
    """The path of the attention that a map is of."""
    return f"decoder.blocks.{map.layer}.cross" if map.place == "cross" else f"{map.place}.blocks.{map.layer}.mixer"


def batches(numbers: Sequence[int], length: int) -> list[list[int]]:
    """So many copies at a time as keep a batch small."""
    size = max(1, TOKENS_AT_ONCE // max(length, 1))
    return [list(numbers[at : at + size]) for at in range(0, len(numbers), size)]
