"""Ablation and activation patching: change one value in a run and measure the effect on log p(token)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from clearhead.nn.tap import Taps

from .grid import Grid
from .lens import logits_at
from .maps import Map, resolve_indices
from .model_input import ModelInput, block_output_tap
from .replay import Replay

TOKENS_AT_ONCE = 4096  # limit on tokens in a batch of copies
PatchPart = Literal["residual", "mixer", "ffn", "heads"]


def log_probabilities(
    model_input: ModelInput, token: int, row: int, taps: Taps | None = None, copies: int = 1
) -> np.ndarray:
    """log p(token) at position `row`, or log p(class), in each copy."""
    return logits_at(model_input, model_input.run(taps, copies), row).double().log_softmax(-1)[:, token].numpy()


def top_token(model_input: ModelInput, row: int) -> int:
    return int(logits_at(model_input, model_input.run(), row)[0].argmax())


def ablate(replay: Replay, maps: Sequence[Map], logits: Tensor, token: str | int | None = None, row: int = -1) -> Grid:
    """Change in log p(token) when one head's output is set to zero, by layer and head."""
    model_input = replay.model_input
    if not maps:
        raise ValueError(f"no inspected layer of {model_input.name} has attention heads to ablate")
    at = logits_at(model_input, logits, row)[0].double().log_softmax(-1)
    id = int(at.argmax()) if token is None else model_input.find_token(token)
    values = np.full((len(maps), max(max(map.heads) for map in maps) + 1), np.nan)
    for line, map in enumerate(maps):
        values[line, list(map.heads)] = ablate_layer(replay, map, id, row) - float(at[id])
    return Grid(
        title=f"head ablation: change in log p({model_input.token_text(id)!r}), which is {float(at[id]):.3g}",
        values=values,
        rows=[f"{map.place} {map.layer}" for map in maps],
        columns=[str(head) for head in range(values.shape[1])],
        row_axis="layer",
        column_axis="head set to zero",
        unit="change in log p (nats)",
        signed=True,
    )


def ablate_layer(replay: Replay, map: Map, token: int, row: int, heads: Sequence[int] | None = None) -> np.ndarray:
    """log p(token) at `row` without each head of one layer, or of some heads. Only this block and later ones run."""
    path, out = attention_path(map), []
    stack, row = path.partition(".")[0], resolve_indices([row], len(replay.model_input.labels), "row", "positions")[0]
    for head in heads or ():
        if head not in map.heads:
            raise ValueError(f"layer {map.layer} has no head {head}; it has {len(map.heads)}")
    wanted = map.heads if heads is None else heads
    for batch in split_batches(range(len(wanted)), len(replay.model_input.labels)):
        chosen = [wanted[n] for n in batch]
        taps = Taps(replace={f"{path}.mixed": replace_in_copies(chosen, 0)})
        logits = replay.logits_from(stack, map.layer, row, taps, len(chosen))
        out.append(logits.double().log_softmax(-1)[:, token].numpy())
    return np.concatenate(out)


def patch(
    model_input: ModelInput,
    other: ModelInput,
    maps: Sequence[Map],
    token: str | int | None = None,
    row: int = -1,
    part: PatchPart = "residual",
) -> Grid:
    """Copy one value of `model_input`'s run into `other`'s and return the change in log p(token) there.

    token  default: the top prediction for `model_input`
    part   residual, mixer, ffn: by layer and position; heads: by layer and head, over all positions
    """
    check_same_length(model_input.labels, other.labels)
    if torch.equal(model_input.inputs, other.inputs) and same_or_none(model_input.source, other.source):
        raise ValueError("both prompts are the same, so patching changes nothing: give a different prompt")
    if part == "heads":
        check_same_length(model_input.source_labels or [], other.source_labels or [])
    id = top_token(model_input, row) if token is None else model_input.find_token(token)
    here, there = (log_probabilities(each, id, row)[0] for each in (model_input, other))
    if part == "heads":
        lines = [(f"{map.place} {map.layer}", f"{attention_path(map)}.mixed", list(map.heads)) for map in maps]
    else:
        every = list(range(len(model_input.labels)))
        lines = [
            (f"layer {i}", f"{model_input.final_stack_name}.blocks.{i}.{patch_tap(block, part)}", every)
            for i, block in enumerate(model_input.blocks)
            if part == "residual" or getattr(block, part) is not None
        ]
    if not lines:
        raise ValueError(f"no inspected layer of {model_input.name} has {part} to patch")
    clean = Taps(read=[path for _, path, _ in lines])
    model_input.run(clean)
    width = max(max(at) for _, _, at in lines) + 1
    values = np.full((len(lines), width), np.nan)
    for line, (_, path, places) in enumerate(lines):
        for at in split_batches(places, len(model_input.labels)):
            taps = Taps(replace={path: replace_in_copies(at, clean.values[path][0, at])})
            values[line, at] = log_probabilities(other, id, row, taps, len(at)) - there
    columns = (
        [str(head) for head in range(width)]
        if part == "heads"
        else [a if a == b else f"{b}→{a}" for a, b in zip(model_input.labels, other.labels, strict=True)]
    )
    return Grid(
        title=f"patching {part} of this prompt into the other: change in log p({model_input.token_text(id)!r})",
        values=values,
        rows=[name for name, _, _ in lines],
        columns=columns,
        row_axis="layer",
        column_axis="head" if part == "heads" else "position",
        unit="change in log p (nats)",
        signed=True,
        note=f"log p is {here:.2f} for this prompt and {there:.2f} for the other",
    )


def same_or_none(one: Tensor | None, other: Tensor | None) -> bool:
    return other is None if one is None else other is not None and torch.equal(one, other)


def check_same_length(these: Sequence[str], those: Sequence[str]) -> None:
    if len(these) != len(those):
        raise ValueError(
            f"the prompts have {len(these)} and {len(those)} tokens, but patching needs equal lengths: "
            f"{'|'.join(these)} and {'|'.join(those)}"
        )


def replace_in_copies(at: Sequence[int], value: Tensor | int) -> Callable[[Tensor], Tensor]:
    """Copy n of the batch gets value n at head or position at[n]."""

    def change(x: Tensor) -> Tensor:
        x = x.clone()
        x[torch.arange(len(at)), list(at)] = value
        return x

    return change


def patch_tap(block: object, part: PatchPart) -> str:
    """The tap of a branch's output, or of the block's output for `residual`."""
    if part == "residual":
        return block_output_tap(block)  # type: ignore[arg-type]
    return f"{part}_residual.inside"


def attention_path(map: Map) -> str:
    """The module path of a map's attention layer."""
    return f"decoder.blocks.{map.layer}.cross" if map.place == "cross" else f"{map.place}.blocks.{map.layer}.mixer"


def split_batches(numbers: Sequence[int], length: int) -> list[list[int]]:
    """Split into batches of at most TOKENS_AT_ONCE tokens."""
    size = max(1, TOKENS_AT_ONCE // max(length, 1))
    return [list(numbers[at : at + size]) for at in range(0, len(numbers), size)]
