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
from clearhead.nn.cache import BlockState, DecodeState, KVCache, LatentCache, PagedKVCache, Slots
from clearhead.nn.pool import PAGE


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
            cut: dict[str, Any] = {}
            if not is_paged(block):
                cut = {name: buffer[first:last] for name, buffer in tensors(block.mixer)}
            if isinstance(block.mixer, KVCache | LatentCache):
                cut["slots"] = slots[id(block.mixer.slots)]
            blocks.append(BlockState(replace(block.mixer, **cut)))  # type: ignore[type-var]
        return DecodeState(blocks, list(slots.values()), self.state.lengths[first:last].clone())

    def commit(self, view: DecodeState, first: int) -> None:
        """Keep what a pass replaced instead of writing in place: lengths and recurrent states."""
        last = first + len(view.lengths)
        self.state.lengths[first:last] = view.lengths
        for block, mine in zip(view.blocks, self.state.blocks, strict=True):
            if is_paged(mine):
                continue
            for (_, new), (_, kept) in zip(tensors(block.mixer), tensors(mine.mixer), strict=True):
                if new.data_ptr() != kept[first].data_ptr():
                    kept[first:last] = new

    def clear(self, row: int) -> None:
        """Forget a row. Slots keep old numbers, which no mask reads; recurrent states start from zero."""
        self.state.lengths[row] = 0
        for slots in self.state.slots:
            slots.positions[row] = -1
            if slots.pages is not None:
                slots.pages.release(row)
        for block in self.state.blocks:
            if not has_slots(block):
                for _, buffer in tensors(block.mixer):
                    buffer[row] = 0

    def copy(self, source: int, target: int) -> None:
        """Make `target` equal to `source`. Pages are shared until one of the two writes to them."""
        length = int(self.state.lengths[source])
        self.state.lengths[target] = length
        for slots in self.state.slots:
            slots.positions[target] = slots.positions[source]
            if slots.pages is not None:
                slots.pages.share(source, target)
        for block in self.state.blocks:
            if is_paged(block):
                continue
            for _, buffer in tensors(block.mixer):
                if has_slots(block):
                    buffer[target, :, :length] = buffer[source, :, :length]
                else:
                    buffer[target] = buffer[source]

    def save(self, row: int, start: int, stop: int) -> Saved:
        """Copy positions start … stop−1 of a row that has read exactly `stop` tokens."""
        slots: list[list[Tensor]] = []
        whole: list[list[Tensor]] = []
        for block in self.state.blocks:
            pages = self.pages_of(block, row)
            if pages is not None:
                held = pages[start // PAGE : stop // PAGE] if splits(block) else pages[pages >= 0]
                parts = [buffer[held] for _, buffer in tensors(block.mixer)]
            else:
                cut = slice(start, stop) if splits(block) else slice(None)
                parts = [
                    (buffer[row][:, cut] if has_slots(block) else buffer[row]).clone()
                    for _, buffer in tensors(block.mixer)
                ]
            (slots if splits(block) else whole).append(parts)
        rings = [each.positions[row].clone() for each in self.state.slots if each.ring]
        return Saved(slots, whole, rings)

    def load(self, row: int, saved: list[Saved], chunk: int) -> None:
        """Restore a row from consecutive pieces of `chunk` positions each, the first at position 0."""
        self.clear(row)
        if not saved:
            return
        length, rings = len(saved) * chunk, iter(saved[-1].positions)
        self.state.lengths[row] = length
        for each in self.state.slots:
            if each.ring:
                each.positions[row] = next(rings)
            else:
                each.positions[row, :length] = torch.arange(length)
            if each.pages is not None:
                used = int((each.positions[row] >= 0).sum())
                each.pages.take(row, -(-used // PAGE))
        split, whole = 0, iter(saved[-1].whole)
        for block in self.state.blocks:
            if splits(block):
                parts = [torch.cat([one.slots[split][i] for one in saved], 0 if is_paged(block) else 1)
                         for i in range(len(saved[0].slots[split]))]  # fmt: skip
                split += 1
            else:
                parts = next(whole)
            pages = self.pages_of(block, row)
            for (_, buffer), part in zip(tensors(block.mixer), parts, strict=True):
                if pages is not None:
                    buffer[pages[: len(part)]] = part
                elif splits(block):
                    buffer[row, :, :length] = part
                else:
                    buffer[row] = part

    def pages_of(self, block: BlockState, row: int) -> Tensor | None:
        """The pages of a row; None if the block is not paged."""
        if not isinstance(block.mixer, PagedKVCache):
            return None
        assert block.mixer.slots.pages is not None
        return block.mixer.slots.pages.table[row]


def is_paged(block: BlockState) -> bool:
    return isinstance(block.mixer, PagedKVCache)


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
    filled = int(used[-1]) + 1 if len(used) else 0
    pages = None if slots.pages is None else slots.pages.view(first, last)
    return Slots(positions, slots.ring, slots.spare, filled, pages=pages)


def lazy_zeros(like: Tensor) -> Tensor:
    """Zeros that take memory only when they are written (masked slots must hold numbers, because 0·NaN is NaN)."""
    if like.device.type != "cpu" or like.dtype == torch.bfloat16:
        return torch.zeros_like(like)
    kind = np.dtype(str(like.dtype).removeprefix("torch."))
    return torch.from_numpy(np.zeros(tuple(like.shape), kind))
