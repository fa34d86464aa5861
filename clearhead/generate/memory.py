"""The KV cache of an engine: a row for every text being written, one row for prefill, and a pool of pages for all.

    row 0 … active−1    texts that are being written; one pass reads all of them
    row `rows`          the prompt that is being read, chunk by chunk

Rows in use are always the first ones: when a text ends, the last active row moves into its place. So a pass over all
texts is a pass over a slice. Attention layers keep their keys and values in pages (`nn.pages`), which rows and the
prefix cache share, so moving, repeating and caching a row copies none of them. Other states are copied row by row.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from clearhead.models.model import SequenceModel
from clearhead.nn.cache import BlockState, DecodeState, KVCache, LatentCache, PagedKVCache, Slots
from clearhead.nn.pages import PAGE, Pages


@dataclass(frozen=True)
class Saved:
    """Part of a row that the prefix cache keeps: the slots of some positions, and what cannot be cut by position."""

    pages: list[list[int]]  # of each page table: the pages of these positions, shared with the rows that read them
    copies: list[list[Tensor]]  # of each layer with one slot per position but no pages: its tensors, copied
    snapshot: list[list[Tensor]] | None  # of each ring and recurrent layer: its tensors after the last position
    positions: list[Tensor]  # of each ring: its positions

    @property
    def copied(self) -> int:
        """Bytes outside the pages."""
        return sum(x.nbytes for group in (*self.copies, *(self.snapshot or []), self.positions) for x in group)


class RowMemory:
    """A state for `rows` texts of up to `length` tokens each and one more row for prefill, in `pages` shared pages."""

    def __init__(self, model: SequenceModel, rows: int, length: int, pages: int | None = None, spare: int = 0) -> None:
        self.rows, self.length = rows, length
        self.state = model.init_state(rows + 1, length, spare=spare, pages=pages)
        for block in self.state.blocks:
            for name, buffer in tensors(block.mixer):
                setattr(block.mixer, name, lazy_zeros(buffer))
        self.pools = [slots.pages for slots in self.state.slots if slots.pages is not None and not slots.ring]
        self.needs_snapshot = not all(splits(block) for block in self.state.blocks)

    @property
    def staging(self) -> int:
        """The row in which prompts are read."""
        return self.rows

    def size(self, *, paged: bool) -> int:
        """Bytes that the pages, or everything else, can grow to."""
        chosen = (block for block in self.state.blocks if in_pool(block) == paged)
        return sum(buffer.nbytes for block in chosen for _, buffer in tensors(block.mixer))

    # ---- passes

    def view(self, first: int, last: int) -> DecodeState:
        """A state that shares the memory of rows first … last−1. After a pass, `commit` it."""
        lengths = self.state.lengths[first:last].clone()
        longest = int(lengths.max())
        slots = {id(each): slice_slots(each, first, last, longest) for each in self.state.slots}
        blocks = []
        for block in self.state.blocks:
            cut: dict[str, Any] = {}
            if not is_paged(block):
                cut = {name: buffer[first:last] for name, buffer in tensors(block.mixer)}
            if isinstance(block.mixer, KVCache | LatentCache):
                cut["slots"] = slots[id(block.mixer.slots)]
            blocks.append(BlockState(replace(block.mixer, **cut)))  # type: ignore[type-var]
        return DecodeState(blocks, list(slots.values()), lengths)

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

    def lacks(self, first: int, last: int, count: int) -> bool:
        """Whether there are too few free pages for rows first … last−1 to write `count` tokens each."""
        most = (last - first) * (-(-count // PAGE) + 1)
        lengths = self.state.lengths[first:last]
        return any(len(pool.free) < most and len(pool.free) < pool.pages_to_write(first, last, lengths, count)
                   for pool in self.pools)  # fmt: skip

    def has_room(self, tokens: int, rows: int) -> bool:
        """Whether a prompt of this length could be read, and `rows` texts started, if the prefix cache were empty."""
        return all(pool.unshared >= -(-tokens // PAGE) + rows for pool in self.pools)

    def fits(self, prompt: int, more: int, rows: int) -> bool:
        """Whether an empty pool holds `rows` texts that continue one prompt by `more` tokens each."""
        shared = prompt // PAGE
        return all(shared + rows * (-(-(prompt + more) // PAGE) - shared) <= pool.count for pool in self.pools)

    # ---- rows

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

    # ---- the prefix cache

    def save(self, row: int, start: int, stop: int, *, snapshot: bool) -> Saved:
        """Keep positions start … stop−1 of a row that has read exactly `stop` tokens."""
        held = [pool.table[row, start // PAGE : stop // PAGE].tolist() for pool in self.pools]
        for pool, pages in zip(self.pools, held, strict=True):
            pool.hold(pages)
        copies = [
            [buffer[row][:, start:stop].clone() for _, buffer in tensors(block.mixer)]
            for block in self.state.blocks
            if splits(block) and not is_paged(block)
        ]
        if not snapshot or not self.needs_snapshot:
            return Saved(held, copies, None, [])
        whole = [self.snapshot(block, row) for block in self.state.blocks if not splits(block)]
        return Saved(held, copies, whole, [each.positions[row].clone() for each in self.state.slots if each.ring])

    def snapshot(self, block: BlockState, row: int) -> list[Tensor]:
        """Copies of all that a ring or a recurrent layer keeps of a row."""
        if not is_paged(block):
            return [buffer[row].clone() for _, buffer in tensors(block.mixer)]
        pages = page_table(block).table[row]
        return [buffer[pages[pages >= 0]] for _, buffer in tensors(block.mixer)]

    def forget(self, saved: Saved) -> None:
        """Give back the pages of a part that the prefix cache drops."""
        for pool, pages in zip(self.pools, saved.pages, strict=True):
            pool.drop(pages)

    def load(self, row: int, saved: list[Saved], chunk: int) -> None:
        """Restore a row from consecutive parts of `chunk` positions each, the first at position 0."""
        self.clear(row)
        if not saved:
            return
        length = len(saved) * chunk
        self.state.lengths[row] = length
        for i, pool in enumerate(self.pools):
            pool.adopt(row, [page for one in saved for page in one.pages[i]])
        rings = iter(saved[-1].positions)
        for each in self.state.slots:
            if each.ring:
                each.positions[row] = next(rings)
                if each.pages is not None:
                    each.pages.take(row, -(-int((each.positions[row] >= 0).sum()) // PAGE))
            else:
                each.positions[row, :length] = torch.arange(length, device=each.positions.device)
        parts, whole = 0, iter(saved[-1].snapshot or [])
        for block in self.state.blocks:
            if not splits(block):
                self.restore(block, row, next(whole))
            elif not is_paged(block):
                for number, (_, buffer) in enumerate(tensors(block.mixer)):
                    buffer[row, :, :length] = torch.cat([one.copies[parts][number] for one in saved], 1)
                parts += 1

    def restore(self, block: BlockState, row: int, parts: list[Tensor]) -> None:
        for (_, buffer), part in zip(tensors(block.mixer), parts, strict=True):
            if is_paged(block):
                buffer[page_table(block).table[row][: len(part)]] = part
            else:
                buffer[row] = part


def plan_memory(model: SequenceModel, rows: int, length: int, limit: int | None) -> tuple[int | None, int, int]:
    """How many pages fit into `limit` bytes, how long texts can be then, and the bytes left for copies of the cache.

    Rows that are not in pages are always there. A pool holds at least one text of the full length.
    """
    if limit is None:
        return None, length, 64 * 2**20
    one = RowMemory(model, 0, length)
    fixed, paged = (rows + 1) * one.size(paged=False), one.size(paged=True)
    left = limit - fixed
    if left < 0 or (paged and left < paged / one.pools[0].count):
        raise ValueError(
            f"{limit / 1e9:g} GB is too little memory for {rows} texts of {length:,} tokens, "
            f"which need {fixed / 1e9:.3g} GB; use fewer rows, a shorter context or more memory"
        )
    if not paged:
        return None, length, left
    copies = left // 4 if one.needs_snapshot else 0
    pages = min(int((left - copies) / (paged / one.pools[0].count)), 2 * (rows + 1) * one.pools[0].width)
    return pages, min(length, pages * PAGE), copies


def in_pool(block: BlockState) -> bool:
    """Whether the block keeps its numbers in pages that all rows share; rings have pages of their own."""
    return is_paged(block) and splits(block)


def is_paged(block: BlockState) -> bool:
    return isinstance(block.mixer, PagedKVCache)


def page_table(block: BlockState) -> Pages:
    assert isinstance(block.mixer, PagedKVCache)
    assert block.mixer.slots.pages is not None
    return block.mixer.slots.pages


def has_slots(block: BlockState) -> bool:
    return isinstance(block.mixer, KVCache | LatentCache)


def splits(block: BlockState) -> bool:
    """Whether the block keeps one slot per position, so that a prefix of it can be cut off."""
    return isinstance(block.mixer, KVCache | LatentCache) and not block.mixer.slots.ring


def tensors(mixer: Any) -> list[tuple[str, Tensor]]:
    return [(f.name, value) for f in fields(mixer) if isinstance(value := getattr(mixer, f.name), Tensor)]


def slice_slots(slots: Slots, first: int, last: int, longest: int) -> Slots:
    positions: Int[Tensor, "R N"] = slots.positions[first:last]
    pages = None if slots.pages is None else slots.pages.view(first, last)
    return Slots(positions, slots.ring, slots.spare, min(longest, positions.shape[1]), pages=pages)


def lazy_zeros(like: Tensor) -> Tensor:
    """Zeros that take memory only when they are written (masked slots must hold numbers, because 0·NaN is NaN)."""
    if like.device.type != "cpu":
        return torch.zeros_like(like)
    if like.dtype == torch.bfloat16:
        return lazy_zeros(like.view(torch.int16)).view(torch.bfloat16)
    kind = np.dtype(str(like.dtype).removeprefix("torch."))
    return torch.from_numpy(np.zeros(tuple(like.shape), kind))
