"""The KV cache of an engine: one state with a row for every text being written, and one row for prefill.

    row 0 … active−1    texts that are being written; one pass reads all of them
    row `rows`          the prompt that is being read, chunk by chunk

Rows in use are always the first ones: when a text ends, the last active row moves into its place. So a pass over all
texts is a pass over a slice, and no row is ever copied while it is written.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.models.model import SequenceModel
from clearhead.nn.cache import BlockState, DecodeState, KVCache, LatentCache, Slots


@dataclass(frozen=True)
class Saved:
    """Part of a row, copied out of the state: the slots of some positions, and all that cannot be cut by position."""

    slots: list[list[Tensor]]  # of each block with one slot per position: its tensors, for the saved positions only
    whole: list[list[Tensor]]  # of each other block (rings, recurrent states): its tensors, whole
    positions: list[Tensor]  # of each `Slots` that is a ring: its positions

    @property
    def size(self) -> int:
        """Bytes in use."""
        return sum(x.nbytes for group in (*self.slots, *self.whole, self.positions) for x in group)


class RowMemory:
    """A state for `rows` texts of up to `length` tokens each, and one more row for prefill."""

    def __init__(self, model: SequenceModel, rows: int, length: int) -> None:
        self.rows, self.length, self.active = rows, length, 0
        self.state = model.init_state(rows + 1, length)
        for block in self.state.blocks:
            for name, buffer in tensors(block.mixer):
                setattr(block.mixer, name, lazy_zeros(buffer))

    @property
    def staging(self) -> int:
        """The row in which prompts are read."""
        return self.rows

    @property
    def size(self) -> int:
        """Bytes that the state can grow to."""
        return sum(buffer.nbytes for block in self.state.blocks for _, buffer in tensors(block.mixer))

    def view(self, first: int, last: int) -> DecodeState:
        """A state that shares the memory of rows first … last−1. After a pass, `commit` it."""
        slots = {id(each): slice_slots(each, first, last) for each in self.state.slots}
        blocks = []
        for block in self.state.blocks:
            cut: dict[str, Any] = {name: buffer[first:last] for name, buffer in tensors(block.mixer)}
            if isinstance(block.mixer, KVCache | LatentCache):
                cut["slots"] = slots[id(block.mixer.slots)]
            blocks.append(BlockState(replace(block.mixer, **cut)))  # type: ignore[type-var]
        return DecodeState(blocks, list(slots.values()), self.state.lengths[first:last].clone())

    def commit(self, view: DecodeState, first: int) -> None:
        """Keep what a pass replaced instead of writing in place: lengths and recurrent states."""
        last = first + len(view.lengths)
        self.state.lengths[first:last] = view.lengths
        for block, mine in zip(view.blocks, self.state.blocks, strict=True):
            for (_, new), (_, kept) in zip(tensors(block.mixer), tensors(mine.mixer), strict=True):
                if new.data_ptr() != kept[first].data_ptr():
                    kept[first:last] = new

    def clear(self, row: int) -> None:
        """Forget a row. Slots keep old numbers, which no mask reads; recurrent states start from zero."""
        self.state.lengths[row] = 0
        for slots in self.state.slots:
            slots.positions[row] = -1
        for block in self.state.blocks:
            if not has_slots(block):
                for _, buffer in tensors(block.mixer):
                    buffer[row] = 0

    def copy(self, source: int, target: int) -> None:
        length = int(self.state.lengths[source])
        self.state.lengths[target] = length
        for slots in self.state.slots:
            slots.positions[target] = slots.positions[source]
        for block in self.state.blocks:
            for _, buffer in tensors(block.mixer):
                if has_slots(block):
                    buffer[target, :, :length] = buffer[source, :, :length]
                else:
                    buffer[target] = buffer[source]

    def save(self, row: int, start: int, stop: int) -> Saved:
        """Copy positions start … stop−1 of a row that has read exactly `stop` tokens."""
        slots, whole = [], []
        for block in self.state.blocks:
            parts = [buffer[row] for _, buffer in tensors(block.mixer)]
            if splits(block):
                slots.append([part[:, start:stop].clone() for part in parts])
            else:
                whole.append([part.clone() for part in parts])
        rings = [each.positions[row].clone() for each in self.state.slots if each.ring]
        return Saved(slots, whole, rings)

    def load(self, row: int, saved: list[Saved], chunk: int) -> None:
        """Restore a row from consecutive pieces of `chunk` positions each, the first at position 0."""
        self.clear(row)
        length = len(saved) * chunk
        self.state.lengths[row] = length
        for each in self.state.slots:
            if not each.ring:
                each.positions[row, :length] = torch.arange(length)
        if not saved:
            return
        rings = iter(saved[-1].positions)
        for each in self.state.slots:
            if each.ring:
                each.positions[row] = next(rings)
        number = 0
        for block, whole in self.pair_whole(saved[-1]):
            for place, (_, buffer) in enumerate(tensors(block.mixer)):
                if whole is not None:
                    buffer[row] = whole[place]
                    continue
                for piece, one in enumerate(saved):
                    buffer[row, :, piece * chunk : (piece + 1) * chunk] = one.slots[number][place]
            number += whole is None

    def pair_whole(self, saved: Saved) -> list[tuple[BlockState, list[Tensor] | None]]:
        """Each block with its whole tensors; None if its tensors are saved by position."""
        whole = iter(saved.whole)
        return [(block, None if splits(block) else next(whole)) for block in self.state.blocks]


def has_slots(block: BlockState) -> bool:
    return isinstance(block.mixer, KVCache | LatentCache)


def splits(block: BlockState) -> bool:
    """Whether the block keeps one slot per position, so that a prefix of it can be cut off."""
    return isinstance(block.mixer, KVCache | LatentCache) and not block.mixer.slots.ring


def tensors(mixer: Any) -> list[tuple[str, Tensor]]:
    return [(f.name, value) for f in fields(mixer) if isinstance(value := getattr(mixer, f.name), Tensor)]


def slice_slots(slots: Slots, first: int, last: int) -> Slots:
    positions = slots.positions[first:last]
    used = (positions >= 0).any(dim=0).nonzero()
    return Slots(positions, slots.ring, slots.spare, int(used[-1]) + 1 if len(used) else 0)


def lazy_zeros(like: Tensor) -> Tensor:
    """Zeros that take memory only when they are written (masked slots must hold numbers, because 0·NaN is NaN)."""
    if like.device.type != "cpu" or like.dtype == torch.bfloat16:
        return torch.zeros_like(like)
    kind = np.dtype(str(like.dtype).removeprefix("torch."))
    return torch.from_numpy(np.zeros(tuple(like.shape), kind))
