"""What a forward pass knows besides x: positions of queries and keys, which keys are real, and the taps.

A context answers three questions for every part:

    where      positions of queries and keys, for rotary, ALiBi and masks
    who        which keys are real (`readable`), and which tokens share a document
    what else  taps to read or replace values; `fused=False` computes attention in plain operations

It is made once per pass by the model and handed down. `at(name)` is the same context for a child, with a longer path.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.configs import Full, Mask
from clearhead.configs.tiles import Tile, Tokens, tiles, tiles_within, worthwhile

from .tap import Taps

Made = TypeVar("Made")


@dataclass(frozen=True)
class Distances:
    """The vectors of distances that a stack's layers share, and the row of every query and key of a pass."""

    table: Float[Tensor, "N D"]
    places: Callable[[Context], Int[Tensor, "#B T S"]]


@dataclass(frozen=True)
class Context:
    """Passed down through every part. Frozen: a part that reads other keys (a cache, a source) passes on a copy.

    Everything that varies between passes is here and not on a module, so one model can serve many threads.
    """

    positions: Int[Tensor, "#B T"]  # of the queries
    key_positions: Int[Tensor, "#B S"]
    readable: Bool[Tensor, "B S"] | None = None  # False where a key is padding; None: all are real
    documents: Int[Tensor, "B T"] | None = None  # only tokens of one document read each other; None: all do
    key_documents: Int[Tensor, "B S"] | None = None  # None: the same as the queries'
    aligned: bool = False  # queries and keys are the same 0 … T−1 in every row
    score_bias: Callable[[Context, torch.dtype], Tensor] | None = None  # shared by all layers, added to scores
    distances: Distances | None = None  # vectors of distances, shared by all layers
    source: Float[Tensor, "B S D"] | None = None  # what cross-attention reads
    cross: Context | None = None  # the context for reading it
    fused: bool = True  # False: attention is written out in plain operations
    taps: Taps | None = None
    path: str = ""
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False, repr=False)  # lives for one forward pass

    def path_of(self, name: str) -> str:
        """The full name of one of this part's values, such as stack.blocks.0.mixer.weights."""
        return ".".join(part for part in (self.path, name) if part)

    def at(self, name: str) -> Context:
        """The context of the child `name`. Only the path of its taps differs."""
        if self.taps is None:
            return self
        path = self.path_of(name)
        cross = None if self.cross is None else replace(self.cross, path=path)
        return replace(self, path=path, cross=cross)

    def tap(self, name: str, value: Tensor) -> Tensor:
        """Let the taps read or replace `value`, and return it. Costs nothing without taps."""
        return value if self.taps is None else self.taps(self.path_of(name), value)

    def reads(self, *names: str) -> bool:
        """Whether a tap reads one of these values, so that it must be computed."""
        return self.taps is not None and any(self.taps.reads(self.path_of(name)) for name in names)

    def replaces(self, *names: str) -> bool:
        """Whether a tap replaces one of these values. If so, a fused kernel that never computes it cannot be used."""
        return self.taps is not None and any(self.taps.replaces(self.path_of(name)) for name in names)

    def viewers(self) -> Sequence[Callable[[Any], None]]:
        """The callbacks that get this layer's `AttentionView`."""
        return () if self.taps is None else self.taps.viewers(self.path)

    def once(self, key: Hashable, make: Callable[[], Made]) -> Made:
        """A value that all layers share, such as a mask: computed by the first layer, then reused in this pass."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]

    def with_keys(self, key_positions: Int[Tensor, "#B S"], readable: Bool[Tensor, "B S"] | None) -> Context:
        """The same queries over other keys, such as those of a KV cache."""
        aligned = self.aligned and key_positions.shape[1] == self.positions.shape[1]
        return replace(self, key_positions=key_positions, readable=readable, aligned=aligned)

    def attention_mask(self, mask: Mask) -> Bool[Tensor, "#B 1 T S"] | None:
        """True where query t may read key s: the mask, padding and documents together. None if all are True."""
        return self.once(("allowed", mask, id(self.key_positions)), lambda: self.attention_mask_rows(mask, slice(None)))

    def attention_mask_rows(self, mask: Mask, rows: slice | list[int]) -> Bool[Tensor, "#B 1 Rows S"] | None:
        """The rows of `attention_mask` that belong to some queries; None if all of them are True."""
        if mask == Full() and self.readable is None and self.documents is None:
            return None
        allowed = mask(self.positions[:, None, rows, None], self.key_positions[:, None, None, :])
        if self.readable is not None:
            allowed = allowed & self.readable[:, None, None, :]
        if self.documents is not None:
            keys = self.documents if self.key_documents is None else self.key_documents
            allowed = allowed & (self.documents[:, None, rows, None] == keys[:, None, None, :])
        return allowed if torch.compiler.is_exporting() or not bool(allowed.all()) else None

    def is_causal(self, mask: Mask) -> bool:
        """Whether the mask is the lower triangle and nothing else, which kernels apply without a table."""
        return self.aligned and self.readable is None and self.documents is None and mask.kind() == "Causal"

    def is_full(self, mask: Mask) -> bool:
        """Whether every query reads every key."""
        return self.readable is None and self.documents is None and mask == Full()

    def tiles(self, masks: tuple[Mask, ...]) -> list[tuple[Tile, ...]] | None:
        """The tiles of the scores that the masks do not hide: one plan per row of the batch, or one for all rows.

        None if tiles save too little: then a boolean mask of all pairs is cheaper.
        """
        pairs = self.positions.shape[1] * self.key_positions.shape[1]
        if not worthwhile(0, pairs, len(masks)):
            return None
        plans = self.once(("tiles", masks, id(self.key_positions)), lambda: self._tiles(masks))
        area = sum(tile.area for plan in plans for tile in plan) / max(len(plans), 1)
        return plans if worthwhile(area, pairs, len(masks)) else None

    def _tiles(self, masks: tuple[Mask, ...]) -> list[tuple[Tile, ...]]:
        """One plan for all rows if all rows are alike; otherwise one plan per row, from its positions and documents."""
        if self.aligned and self.readable is None and self.documents is None:
            return [tiles_within(masks, self.positions.shape[1])]
        own = self.readable if self.key_positions is self.positions else None
        theirs = self.documents if self.key_documents is None else self.key_documents
        given = self.positions, self.key_positions, own, self.readable, self.documents, theirs

        def of(row: int) -> tuple[Tile, ...]:
            arrays: list[Any] = [None if x is None else x[row % len(x)].cpu().numpy() for x in given]
            at, keys, own, real, documents, theirs = arrays
            return tiles(masks, Tokens(at, own, documents), Tokens(keys, real, theirs))

        return [of(row) for row in range(max(len(x) for x in given if x is not None))]

    def tile(self, row: int, tile: Tile) -> Context:
        """The context of the queries and keys of one tile, in one row of the batch."""
        queries, keys = (x[row % len(x)] for x in (self.positions, self.key_positions))
        read = torch.cat([keys[run.start : run.stop] for run in tile.runs])
        return Context(queries[None, tile.start : tile.stop], read[None])
