"""The KV cache: what decoding remembers between forward passes. A recurrent mixer's state is in the mixer's own file.

A mixer makes its own state in `init_state(allocator)`. The model passes the state back in at every forward pass, and
the pass updates it in place. No state is ever stored on a module.

A cache is divided into slots. The token at position p is stored in slot p. If the mask only ever reads the last
`reach` positions (a sliding window), the cache is a ring: position p is stored in slot p mod reach, over the oldest
token. Rows of a batch may be at different positions:

    row 0  ▪ ▪ ▪ ▪ ·      slots.positions   0  1  2  3 −1
    row 1  ▪ ▪ · · ·                        0  1 −1 −1 −1

Masks read positions and not slots, so a ring needs no case of its own: a slot that was overwritten has the position of
its new token, and the mask decides by that. Layers with the same reach share one `Slots`, which is updated once per
pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .context import Context
from .pages import Pages


@runtime_checkable
class MixerState(Protocol):
    """What a mixer's `init_state` returns. Any class with these two members works.

    Speculative decoding needs `can_rewind`: it takes back the tokens that the model rejects.
    """

    can_rewind: ClassVar[bool]
    """True if every token is stored in a slot of its own, so that `Slots.rewind` can forget the latest ones."""

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keep, repeat or reorder rows of the batch: row i becomes the old row `rows[i]`."""


@dataclass
class Slots:
    """Which position each slot holds, and where the tokens of the current pass go.

    All layers that keep the same number of positions share one `Slots`, so this is worked out once per pass.
    """

    positions: Int[Tensor, "B N"]  # −1 if the slot is empty
    ring: bool
    spare: int = 0  # extra slots of a ring beyond the mask's reach: how many positions `rewind` can take back
    filled: int = 0  # slots 0 … filled−1 are in use in at least one row
    # The rest describes the current forward pass.
    start: int | None = None  # the first slot written, if all rows write the same consecutive slots
    rows: Int[Tensor, "W"] | None = None  # otherwise: the row, input column and slot of each stored token
    columns: Int[Tensor, "W"] | None = None
    slots: Int[Tensor, "W"] | None = None
    before: int = 0  # old slots to copy first, because this pass overwrites some that its queries still read
    beside: bool = False  # keys are read as (old slots, new keys) instead of from the buffer
    fresh: slice | None = None  # slots that become readable in this pass although some rows leave theirs empty
    reads: tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"] | None] | None = None  # key positions, and which are real
    pages: Pages | None = None  # the page table, for layers with a `PagedKVCache`

    def check(self, positions: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]) -> None:
        """Raise `ValueError` if the tokens of a pass cannot be stored. Changes nothing."""
        size = self.positions.shape[1]
        if positions.numel() and int(positions.min()) < 0:
            raise ValueError(f"position {int(positions.min())} is negative; positions start at 0")
        if not self.ring and positions.numel() and int(positions.max()) >= size:
            raise ValueError(f"position {int(positions.max())} does not fit a state made for {size} positions")
        if self.ring and self.filled and bool((real & (positions <= self.positions.amax(dim=1, keepdim=True))).any()):
            raise ValueError(
                f"position {int(positions.min())} was passed already, and a state that keeps a window cannot go back; "
                "start again with a new state"
            )

    def place(self, positions: Int[Tensor, "B T"], readable: Bool[Tensor, "B T"] | None) -> None:
        """Decide in which slots the tokens of this pass are stored and which keys they read."""
        length, size = positions.shape[1], self.positions.shape[1]
        self.beside = self.ring and length > 1
        self.before = self.filled if self.beside else 0
        old = self.positions[:, : self.before].clone()
        last = positions.amax(dim=1, keepdim=True) if length else positions
        kept = torch.ones_like(positions, dtype=torch.bool) if readable is None else readable
        if self.ring:
            kept = kept & (positions > last - size)  # only the last `size` tokens of a row stay
        slots = positions % size if self.ring else positions
        self.start = self._consecutive_start(slots, kept)
        if self.start is None:
            self.rows, self.columns = kept.nonzero(as_tuple=True)
            self.slots = slots[self.rows, self.columns]
            self.positions[self.rows, self.slots] = positions[self.rows, self.columns]
        else:
            self.positions[:, self.start : self.start + length] = positions
        before = self.filled
        if bool(kept.any()):
            self.filled = max(self.filled, int(slots[kept].max()) + 1)
        self.fresh = slice(before, self.filled) if self.start is None else None
        if self.beside:
            new = positions if readable is None else torch.where(readable, positions, -1)
            keys = torch.cat((old, new), dim=1)
        else:
            keys = self.positions[:, : self.filled]
        real = keys >= 0
        self.reads = keys, None if bool(real.all()) else real
        if self.pages is not None:
            self._claim_pages(length)

    def _claim_pages(self, length: int) -> None:
        """Give every row pages of its own for the slots it writes in this pass."""
        assert self.pages is not None
        if self.start is not None:
            self.pages.claim_run(self.start, length)
        elif self.rows is not None and self.slots is not None:
            self.pages.claim(self.rows, self.slots)

    def written_slots(self, length: int) -> Int[Tensor, "B T"]:
        """The slot that each token of this pass is written to; −1: none."""
        found = torch.full((len(self.positions), length), -1, dtype=torch.long, device=self.positions.device)
        if self.start is not None:
            found[:] = torch.arange(self.start, self.start + length, device=found.device)
        elif self.rows is not None and self.columns is not None and self.slots is not None:
            found[self.rows, self.columns] = self.slots
        return found

    @property
    def gapless(self) -> bool:
        """Whether every row holds positions 0, 1, 2 … in slots 0, 1, 2 …, without one missing."""
        held = self.positions[:, : self.filled]
        return not self.ring and bool(((held >= 0).sum(dim=1) == held.amax(dim=1) + 1).all()) if self.filled else True

    @staticmethod
    def _consecutive_start(slots: Int[Tensor, "B T"], kept: Bool[Tensor, "B T"]) -> int | None:
        """The first slot, if every row writes the same consecutive slots. Then a slice replaces index lists."""
        if not slots.numel() or not bool(kept.all()):
            return None
        first = int(slots[0, 0])
        run = torch.arange(first, first + slots.shape[1], device=slots.device)
        return first if bool((slots == run).all()) else None

    def write(self, buffer: Float[Tensor, "B G N K"], new: Float[Tensor, "B G T K"]) -> Float[Tensor, "B G S K"]:
        """Store the new vectors in a layer's buffer and return everything this pass reads, old and new."""
        old = buffer[:, :, : self.before].clone() if self.beside else None
        kept = clamp_to(new.detach(), buffer.dtype)  # a cache stores values, not the graph that computed them
        if self.fresh is not None:
            buffer[:, :, self.fresh] = 0  # masked slots are still multiplied by 0, and 0·NaN would be NaN
        if self.start is not None:
            buffer[:, :, self.start : self.start + new.shape[2]] = kept
        else:
            buffer[self.rows, :, self.slots] = kept.transpose(1, 2)[self.rows, self.columns]
        if old is not None:
            return torch.cat((old, new), dim=2)
        whole = self.start == 0 and self.filled == new.shape[2]  # a first pass reads its own keys, not rounded ones
        return new if whole and buffer.dtype != new.dtype else buffer[:, :, : self.filled].to(new.dtype)

    def key_context(self, context: Context) -> Context:
        """The context of this pass with the cache's keys in place of the new tokens' own."""
        assert self.reads is not None, "call place() before key_context()"
        keys, real = self.reads
        return context.once(("key_context", id(self), context.path), lambda: context.with_keys(keys, real))

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Reorder the rows. The page table follows, so pages are shared and not copied."""
        self.positions = self.positions[rows]
        if self.pages is not None:
            self.pages.select(rows)

    def select_rows(self, buffer: Float[Tensor, "B G N K"], rows: Int[Tensor, "R"]) -> Float[Tensor, "R G N K"]:
        """Rows of a layer's buffer. Works in place unless there are more rows than before."""
        if len(rows) > len(buffer):
            wide = buffer.new_empty(len(rows), *buffer.shape[1:])
            wide[:, :, : self.filled] = buffer[rows, :, : self.filled]
            return wide
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        if len(moved):
            buffer[moved, :, : self.filled] = buffer[rows[moved], :, : self.filled]
        return buffer[: len(rows)]

    def rewind(self, lengths: Int[Tensor, "B"]) -> None:
        """Empty the slots of positions ≥ `lengths`."""
        back = int((self.positions.amax(dim=1) + 1 - lengths).max())
        if self.ring and back > self.spare and self.filled == self.positions.shape[1]:
            raise ValueError(f"a state that keeps a window cannot go back {back} positions, only {self.spare}")
        self.positions[self.positions >= lengths[:, None]] = -1
        self.filled = self.filled if self.ring else int(lengths.max())


@dataclass
class KVCache:
    """Keys and values of an attention layer, one slot per stored position (a ring if the mask is a window)."""

    can_rewind: ClassVar[bool] = True

    slots: Slots
    key: Float[Tensor, "B G N K"]
    value: Float[Tensor, "B G N U"]

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"], context: Context
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S U"], Context]:
        """Store k and v; return all keys and values to read, and the context for reading them."""
        return self.slots.write(self.key, k), self.slots.write(self.value, v), self.slots.key_context(context)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        self.key, self.value = self.slots.select_rows(self.key, rows), self.slots.select_rows(self.value, rows)


@dataclass
class PagedKVCache(KVCache):
    """Keys and values in pages, `pages G 32 K`.

    Rows that share a beginning share its pages, so selecting, repeating and reordering rows copies nothing. A row that
    writes to a shared page gets a copy of it first (`Pages.claim`).

    The compiled kernels read pages in place. `append`, the path of PyTorch, gathers them.
    """

    def prepare(self) -> None:
        """Once for each pass, before anything is written: make the copies that this pass needs."""
        pages = self.slots.pages
        assert pages is not None, "a paged state is made with pages"
        if len(self.key) < pages.count:
            self.key, self.value = (grow(buffer, pages.count) for buffer in (self.key, self.value))
        if pages.copies is not None:
            old, new = pages.copies
            self.key[new], self.value[new] = self.key[old], self.value[old]

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"], context: Context
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S U"], Context]:
        self.prepare()
        return self.write(self.key, k), self.write(self.value, v), self.slots.key_context(context)

    def write(self, buffer: Float[Tensor, "P G L K"], new: Float[Tensor, "B G T K"]) -> Float[Tensor, "B G S K"]:
        """Write the new vectors to their pages; return all that this pass reads."""
        slots = self.slots
        old = self.gather(buffer, slots.before).to(new.dtype) if slots.beside else None
        at = slots.written_slots(new.shape[2])
        rows, columns = (at >= 0).nonzero(as_tuple=True)
        assert slots.pages is not None
        page, offset = slots.pages.find(rows, at[rows, columns])
        buffer[page, :, offset] = clamp_to(new.detach(), buffer.dtype).transpose(1, 2)[rows, columns]
        if old is not None:
            return torch.cat((old, new), dim=2)
        whole = slots.start == 0 and slots.filled == new.shape[2]  # nothing older: read the exact values
        return new if whole else self.gather(buffer, slots.filled).to(new.dtype)

    def gather(self, buffer: Float[Tensor, "P G L K"], count: int) -> Float[Tensor, "B G S K"]:
        """The first `count` slots of every row; zeros where a slot is empty."""
        assert self.slots.pages is not None
        assert self.slots.reads is not None
        found = self.slots.pages.gather(buffer, count)
        real = self.slots.reads[0][:, :count] >= 0
        return found if bool(real.all()) else found.masked_fill(~real[:, None, :, None], 0)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Nothing moves: `Slots.select` reorders the page table."""


def grow(buffer: Float[Tensor, "P G L K"], pages: int) -> Float[Tensor, "Q G L K"]:
    wide = buffer.new_empty(pages, *buffer.shape[1:])
    wide[: len(buffer)] = buffer
    return wide


@dataclass
class LatentCache:
    """The latent and the shared rotary key of each position, side by side (multi-head latent attention)."""

    can_rewind: ClassVar[bool] = True

    slots: Slots
    joint: Float[Tensor, "B 1 N LR"]

    def append(self, joint: Float[Tensor, "B 1 T LR"], context: Context) -> tuple[Float[Tensor, "B 1 S LR"], Context]:
        """Store the new latents; return all of them, and the context for reading them."""
        return self.slots.write(self.joint, joint), self.slots.key_context(context)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        self.joint = self.slots.select_rows(self.joint, rows)


@dataclass
class CrossCache:
    """Keys and values of the source, computed once and read by cross-attention at every step.

    If `shared` consecutive target rows have the same source, as beams do, their keys and values are stored once.
    """

    key: Float[Tensor, "B G S K"]
    value: Float[Tensor, "B G S U"]
    shared: int = 1

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keep the sources of these target rows, each once."""
        sources = self.sources(rows)
        self.key, self.value = self.key[sources], self.value[sources]

    def sources(self, rows: Int[Tensor, "R"]) -> Int[Tensor, "N"]:
        """The source of these target rows, each listed once."""
        return rows[:: self.shared] // self.shared


@dataclass
class BlockState:
    """The state of one block: its mixer's, and its cross-attention's if it has one."""

    mixer: MixerState
    cross: CrossCache | None = None


@dataclass
class StateAllocator:
    """Allocates the states of all layers. Layers that keep the same number of positions get the same `Slots`."""

    batch: int
    length: int
    dtype: torch.dtype
    device: torch.device
    spare: int = 0  # positions that `rewind` must be able to take back
    kv_dtype: torch.dtype | None = None  # of a paged KV cache; None: dtype
    pages: int | None = None  # pages that all rows share; None: enough for every row
    slots: dict[tuple[int, bool], Slots] = field(default_factory=dict)

    def slots_for(self, reach: int | None) -> Slots:
        """Slots for all positions, or a ring for the last `reach` (plus `spare`) if that is fewer."""
        ring = reach is not None and reach + self.spare < self.length
        size = reach + self.spare if ring and reach is not None else self.length
        if (size, ring) not in self.slots:
            positions = torch.full((self.batch, size), -1, dtype=torch.long, device=self.device)
            self.slots[size, ring] = Slots(positions, ring, self.spare)
        return self.slots[size, ring]

    def buffer(self, *shape: int) -> Tensor:
        """Uninitialised memory `[batch, *shape]` for slots, which are always written before they are read."""
        return torch.empty(self.batch, *shape, dtype=self.dtype, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Zeros `[batch, *shape]`, for states that the first token already reads."""
        return torch.zeros(self.batch, *shape, dtype=self.dtype, device=self.device)


@dataclass
class DecodeState:
    """What a model remembers between forward passes: the state of every block, and the length of every row.

    Made by `model.init_state(batch, length)` and passed as `model(tokens, state=state)`.
    """

    blocks: list[BlockState]
    slots: list[Slots]
    lengths: Int[Tensor, "B"]
    source_readable: Bool[Tensor, "B S"] | None = None  # encoder–decoder: False where a source token is padding

    def next_positions(self, readable: Bool[Tensor, "B T"] | None, length: int) -> Int[Tensor, "B T"]:
        """The positions of the next `length` tokens of each row. Padding counts as position 0."""
        count = count_positions(readable, len(self.lengths), length, self.lengths.device)
        positions = self.lengths[:, None] + count
        return positions if readable is None else torch.where(readable, positions, 0)

    def advance(self, positions: Int[Tensor, "B T"], readable: Bool[Tensor, "B T"] | None) -> None:
        """Reserve slots for the tokens of one forward pass. If any block is full, raise before changing any."""
        real = torch.ones_like(positions, dtype=torch.bool) if readable is None else readable
        for slots in self.slots:
            slots.check(positions, real)
        for slots in self.slots:
            slots.place(positions, readable)
        if positions.shape[1]:
            last = positions if readable is None else torch.where(readable, positions, -1)
            self.lengths = torch.maximum(self.lengths, last.max(dim=1).values + 1)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keep, repeat or reorder rows. Rows that share a source must stay together."""
        self.reorder(rows)
        for block in self.blocks:
            if block.cross is not None:
                sources = block.cross.sources(rows)
                block.cross.select(rows)
        if self.source_readable is not None:
            self.source_readable = self.source_readable[sources]

    def repeat_rows(self, width: int) -> None:
        """Repeat each row `width` times, as beam search does. The copies share their source's keys and values."""
        self.reorder(torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(width))
        for block in self.blocks:
            if block.cross is not None:
                block.cross.shared *= width

    def reorder(self, rows: Int[Tensor, "R"]) -> None:
        """`select` for beam search: row i becomes row `rows[i]`, which must read the same source."""
        self.lengths = self.lengths[rows]
        for slots in self.slots:
            slots.select(rows)
        for block in self.blocks:
            block.mixer.select(rows)

    @property
    def can_rewind(self) -> bool:
        """True if every mixer stores each token in a slot of its own. A recurrence stores only a summary."""
        return all(block.mixer.can_rewind for block in self.blocks)

    def rewind(self, lengths: Int[Tensor, "B"]) -> None:
        """Forget everything from position `lengths` on, as if it had never been read."""
        if not self.can_rewind:
            raise ValueError(
                "a mixer of this model keeps a summary of what it has read, and cannot go back; "
                "start again with a new state, or keep a copy of the state"
            )
        for slots in self.slots:
            slots.rewind(lengths)
        self.lengths = torch.minimum(self.lengths, lengths)


def clamp_to(x: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """x in `dtype`; values too large for it become its largest finite value instead of infinity."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype) if most < torch.finfo(x.dtype).max else x.to(dtype)


def count_positions(
    readable: Bool[Tensor, "B T"] | None, batch: int, length: int, device: torch.device
) -> Int[Tensor, "#B T"]:
    """0, 1, 2 … for the real tokens of each row, so that padding on either side changes no position."""
    if readable is None:
        return torch.arange(length, device=device).expand(batch, length)
    return torch.where(readable, readable.cumsum(dim=1) - 1, 0)
