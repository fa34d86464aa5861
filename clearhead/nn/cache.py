"""What decoding remembers. A state is made by its mixer, passed in, and written by the forward pass it is passed to.

A cache has slots. A token at position p is kept in slot p, or, where the mask's reach bounds what is ever read again,
in slot p mod reach of a ring. Rows of a batch may stand at different positions:

    row 0  ▪ ▪ ▪ ▪ ·      slots.at   0  1  2  3 −1
    row 1  ▪ ▪ · · ·                 0  1 −1 −1 −1
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .context import Context


@dataclass
class Slots:
    """Which position each slot of a cache holds; shared by all layers that keep equally many."""

    at: Int[Tensor, "B N"]  # −1: empty
    ring: bool
    spare: int = 0  # of a ring: slots beyond the mask's reach, so many positions can be taken back
    filled: int = 0  # slots in use, from the front, by any row
    # of the forward pass under way:
    start: int | None = None  # the first slot written, where all rows write the same run of slots
    rows: Int[Tensor, "W"] | None = None  # else: the row, the place in the input and the slot of each token kept
    columns: Int[Tensor, "W"] | None = None
    slots: Int[Tensor, "W"] | None = None
    before: int = 0  # filled slots that are read beside the new keys, because writing would overwrite some of them
    beside: bool = False
    fresh: slice | None = None  # slots that are read from now on, where some rows leave theirs empty
    reads: tuple[Int[Tensor, "B S"], Bool[Tensor, "B S"] | None] | None = None  # positions read, and which are real

    def check(self, positions: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]) -> None:
        size = self.at.shape[1]
        if positions.numel() and int(positions.min()) < 0:
            raise ValueError(f"position {int(positions.min())} is before the first, which is 0")
        if not self.ring and positions.numel() and int(positions.max()) >= size:
            raise ValueError(f"position {int(positions.max())} does not fit a state made for {size} positions")
        if self.ring and self.filled and bool((real & (positions <= self.at.amax(dim=1, keepdim=True))).any()):
            raise ValueError("a state that keeps a window cannot go back to positions it has passed")

    def place(self, positions: Int[Tensor, "B T"], readable: Bool[Tensor, "B T"] | None) -> None:
        """Decide where the tokens of this pass are kept and what they read; done once for all layers."""
        length, size = positions.shape[1], self.at.shape[1]
        self.beside = self.ring and length > 1
        self.before = self.filled if self.beside else 0
        old = self.at[:, : self.before].clone()
        last = positions.amax(dim=1, keepdim=True) if length else positions
        kept = torch.ones_like(positions, dtype=torch.bool) if readable is None else readable
        if self.ring:
            kept = kept & (positions > last - size)  # only the last `size` tokens of a row stay
        slots = positions % size if self.ring else positions
        self.start = self._run(slots, kept)
        if self.start is None:
            self.rows, self.columns = kept.nonzero(as_tuple=True)
            self.slots = slots[self.rows, self.columns]
            self.at[self.rows, self.slots] = positions[self.rows, self.columns]
        else:
            self.at[:, self.start : self.start + length] = positions
        before = self.filled
        if bool(kept.any()):
            self.filled = max(self.filled, int(slots[kept].max()) + 1)
        self.fresh = slice(before, self.filled) if self.start is None else None
        if self.beside:
            new = positions if readable is None else torch.where(readable, positions, -1)
            at = torch.cat((old, new), dim=1)
        else:
            at = self.at[:, : self.filled]
        real = at >= 0
        self.reads = at, None if bool(real.all()) else real

    @staticmethod
    def _run(slots: Int[Tensor, "B T"], kept: Bool[Tensor, "B T"]) -> int | None:
        """The first slot, if every row writes the same slots one after the other."""
        if not slots.numel() or not bool(kept.all()):
            return None
        first = int(slots[0, 0])
        run = torch.arange(first, first + slots.shape[1], device=slots.device)
        return first if bool((slots == run).all()) else None

    def write(self, buffer: Float[Tensor, "B G N K"], new: Float[Tensor, "B G T K"]) -> Float[Tensor, "B G S K"]:
        """Keep the new vectors in a layer's buffer, and give all that this pass reads."""
        old = buffer[:, :, : self.before].clone() if self.beside else None
        kept = narrowed(new.detach(), buffer.dtype)  # what is remembered is a value, not a way to compute it
        if self.fresh is not None:
            buffer[:, :, self.fresh] = 0  # nobody reads what is empty, but it must be a number
        if self.start is not None:
            buffer[:, :, self.start : self.start + new.shape[2]] = kept
        else:
            buffer[self.rows, :, self.slots] = kept.transpose(1, 2)[self.rows, self.columns]
        if old is not None:
            return torch.cat((old, new), dim=2)
        whole = self.start == 0 and self.filled == new.shape[2]  # what was rounded is not read back
        return new if whole and buffer.dtype != new.dtype else buffer[:, :, : self.filled].to(new.dtype)

    def reading(self, context: Context) -> Context:
        assert self.reads is not None, "place() comes before reading()"
        at, real = self.reads
        return context.once(("reading", id(self), context.path), lambda: context.reading(at, real))

    def select(self, rows: Int[Tensor, "R"]) -> None:
        self.at = self.at[rows]

    def taken(self, buffer: Float[Tensor, "B G N K"], rows: Int[Tensor, "R"]) -> Float[Tensor, "R G N K"]:
        """Rows of a layer's buffer: within its own memory where there are no more of them than before."""
        if len(rows) > len(buffer):
            wide = buffer.new_empty(len(rows), *buffer.shape[1:])
            wide[:, :, : self.filled] = buffer[rows, :, : self.filled]
            return wide
        moved = (rows != torch.arange(len(rows), device=rows.device)).nonzero()[:, 0]
        if len(moved):
            buffer[moved, :, : self.filled] = buffer[rows[moved], :, : self.filled]
        return buffer[: len(rows)]

    def rewind(self, lengths: Int[Tensor, "B"]) -> None:
        back = int((self.at.amax(dim=1) + 1 - lengths).max())
        if self.ring and back > self.spare and self.filled == self.at.shape[1]:
            raise ValueError(f"a state that keeps a window cannot go back {back} positions, only {self.spare}")
        self.at[self.at >= lengths[:, None]] = -1
        self.filled = self.filled if self.ring else int(lengths.max())


@dataclass
class KVState:
    """Keys and values of an attention layer, `B G N K`, one slot per position kept."""

    slots: Slots
    key: Float[Tensor, "B G N K"]
    value: Float[Tensor, "B G N U"]

    def append(
        self, k: Float[Tensor, "B G T K"], v: Float[Tensor, "B G T U"], context: Context
    ) -> tuple[Float[Tensor, "B G S K"], Float[Tensor, "B G S U"], Context]:
        return self.slots.write(self.key, k), self.slots.write(self.value, v), self.slots.reading(context)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        self.key, self.value = self.slots.taken(self.key, rows), self.slots.taken(self.value, rows)


@dataclass
class LatentState:
    """The latent and the one rotary key of each position, side by side, for all heads of a latent attention layer."""

    slots: Slots
    joint: Float[Tensor, "B 1 N LR"]

    def append(self, joint: Float[Tensor, "B 1 T LR"], context: Context) -> tuple[Float[Tensor, "B 1 S LR"], Context]:
        return self.slots.write(self.joint, joint), self.slots.reading(context)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        self.joint = self.slots.taken(self.joint, rows)


@dataclass
class SourceState:
    """Keys and values that cross-attention reads at every step: the source's, computed once.

    Where `shared` rows of targets in a row have one source, as beams do, it is kept once for them.
    """

    key: Float[Tensor, "B G S K"]
    value: Float[Tensor, "B G S U"]
    shared: int = 1

    def select(self, rows: Int[Tensor, "R"]) -> None:
        sources = self.sources(rows)
        self.key, self.value = self.key[sources], self.value[sources]

    def sources(self, rows: Int[Tensor, "R"]) -> Int[Tensor, "N"]:
        """The sources of these rows of targets, each once."""
        return rows[:: self.shared] // self.shared


@dataclass
class LSTMState:
    """The last h and c of each row: as much for a long text as for a short one."""

    hidden: Float[Tensor, "B I"]
    cell: Float[Tensor, "B I"]

    def select(self, rows: Int[Tensor, "B"]) -> None:
        self.hidden, self.cell = self.hidden[rows], self.cell[rows]


@dataclass
class SumState:
    """What the keys of a linear attention layer come to, however many they are, and the scale it is kept in."""

    sums: Float[Tensor, "B H W U1"]
    top: Float[Tensor, "B H"]

    def select(self, rows: Int[Tensor, "B"]) -> None:
        self.sums, self.top = self.sums[rows], self.top[rows]


@dataclass
class FilterState:
    """The inputs that a short filter reads again."""

    recent: Float[Tensor, "B O I"]

    def select(self, rows: Int[Tensor, "B"]) -> None:
        self.recent = self.recent[rows]


@dataclass
class MambaState(FilterState):
    """And what each channel of a selective state space remembers."""

    memory: Float[Tensor, "B Z I"]

    def select(self, rows: Int[Tensor, "B"]) -> None:
        super().select(rows)
        self.memory = self.memory[rows]


@dataclass
class BlockState:
    """What one block remembers."""

    mixer: KVState | LatentState | LSTMState | SumState | MambaState | FilterState
    cross: SourceState | None = None


@dataclass
class Room:
    """How much a new state must hold; layers that keep equally many positions share their slots."""

    batch: int
    length: int
    dtype: torch.dtype
    device: torch.device
    spare: int = 0  # positions that can be taken back
    slots: dict[tuple[int, bool], Slots] = field(default_factory=dict)

    def slots_for(self, reach: int | None) -> Slots:
        """Slots for all positions, or for the last `reach` of them, and the spare, where that is fewer."""
        ring = reach is not None and reach + self.spare < self.length
        size = reach + self.spare if ring and reach is not None else self.length
        if (size, ring) not in self.slots:
            at = torch.full((self.batch, size), -1, dtype=torch.long, device=self.device)
            self.slots[size, ring] = Slots(at, ring, self.spare)
        return self.slots[size, ring]

    def buffer(self, *shape: int) -> Tensor:
        """Memory for slots, each of which is written before it is read."""
        return torch.empty(self.batch, *shape, dtype=self.dtype, device=self.device)

    def zeros(self, *shape: int) -> Tensor:
        """Memory that is read from the start."""
        return torch.zeros(self.batch, *shape, dtype=self.dtype, device=self.device)


@dataclass
class State:
    """What a model remembers between forward passes: every block's state, and how far each row has come."""

    blocks: list[BlockState]
    slots: list[Slots]
    lengths: Int[Tensor, "B"]
    source_readable: Bool[Tensor, "B S"] | None = None  # of an encoder–decoder: which source tokens are real

    def next_positions(self, readable: Bool[Tensor, "B T"] | None, length: int) -> Int[Tensor, "B T"]:
        count = count_positions(readable, len(self.lengths), length, self.lengths.device)
        positions = self.lengths[:, None] + count
        return positions if readable is None else torch.where(readable, positions, 0)

    def advance(self, positions: Int[Tensor, "B T"], readable: Bool[Tensor, "B T"] | None) -> None:
        """Make room in every block for the tokens of one forward pass; if one has none, none is changed."""
        real = torch.ones_like(positions, dtype=torch.bool) if readable is None else readable
        for slots in self.slots:
            slots.check(positions, real)
        for slots in self.slots:
            slots.place(positions, readable)
        if positions.shape[1]:
            last = positions if readable is None else torch.where(readable, positions, -1)
            self.lengths = torch.maximum(self.lengths, last.max(dim=1).values + 1)

    def select(self, rows: Int[Tensor, "R"]) -> None:
        """Keep, repeat and reorder rows; those that share a source stay together."""
        self.reorder(rows)
        for block in self.blocks:
            if block.cross is not None:
                sources = block.cross.sources(rows)
                block.cross.select(rows)
        if self.source_readable is not None:
            self.source_readable = self.source_readable[sources]

    def spread(self, width: int) -> None:
        """Make `width` rows of each, which share its source."""
        self.reorder(torch.arange(len(self.lengths), device=self.lengths.device).repeat_interleave(width))
        for block in self.blocks:
            if block.cross is not None:
                block.cross.shared *= width

    def reorder(self, rows: Int[Tensor, "R"]) -> None:
        """As `select`, where every row takes the place of one that reads the same source, as in beam search."""
        self.lengths = self.lengths[rows]
        for slots in self.slots:
            slots.select(rows)
        for block in self.blocks:
            block.mixer.select(rows)

    @property
    def can_rewind(self) -> bool:
        """Whether every mixer keeps its tokens apart."""
        return all(isinstance(block.mixer, KVState | LatentState) for block in self.blocks)

    def rewind(self, lengths: Int[Tensor, "B"]) -> None:
        """Forget what each row holds from position `lengths` on, as if it had not been read."""
        if not self.can_rewind:
            raise ValueError("a mixer of this model keeps a summary of what it has read, and cannot go back")
        for slots in self.slots:
            slots.rewind(lengths)
        self.lengths = torch.minimum(self.lengths, lengths)


def narrowed(x: Float[Tensor, "..."], dtype: torch.dtype) -> Float[Tensor, "..."]:
    """In that type; what is too large for it becomes the largest that it has."""
    most = torch.finfo(dtype).max
    return x.clamp(-most, most).to(dtype) if most < torch.finfo(x.dtype).max else x.to(dtype)


def count_positions(
    readable: Bool[Tensor, "B T"] | None, batch: int, length: int, device: torch.device
) -> Int[Tensor, "#B T"]:
    """0, 1, 2 …, counting only real tokens, so that padding on either side moves nobody."""
    if readable is None:
        return torch.arange(length, device=device).expand(batch, length)
    return torch.where(readable, readable.cumsum(dim=1) - 1, 0)
