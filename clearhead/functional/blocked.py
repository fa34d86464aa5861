"""Attention by tiles: only the scores that a mask leaves are computed, forward and backward, in time and in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor

from clearhead.configs import Mask
from clearhead.configs.tiles import Tile, Tokens, tiles, tiles_within
from clearhead.functional.derivatives import plain_needed, refuse_second_derivative
from clearhead.functional.softmax import narrow, widen_alike
from clearhead.reference.attention import default_scale

CACHED = 2**21
"""Scores that are computed together: 8 MB. Fewer stay nearer to the cores, but products of more are quicker."""

TileBias = Callable[[int, Tile], Float[Tensor, "H T C"]]


def sparse_attention(
    q: Real[Tensor, "B H T K"],
    k: Real[Tensor, "B G S K"],
    v: Real[Tensor, "B G S U"],
    mask: Mask,
    *,
    scale: float | None = None,
) -> Float[Tensor, "B H T U"]:
    """`attention` under a mask of `clearhead.configs`, in time and memory that grow with what the mask allows.

    The last query stands at the last key. H is a multiple of G: the query heads of a group share its keys and values.
    """
    queries, keys = q.shape[2], k.shape[2]
    plan = (
        tiles_within((mask,), keys)
        if queries == keys
        else tiles((mask,), Tokens(np.arange(keys - queries, keys)), Tokens(np.arange(keys)))
    )
    return attention_by_tiles((q,), k, v, [plan], scale=scale)


def attention_by_tiles(
    queries: Sequence[Real[Tensor, "B H T K"]],
    k: Real[Tensor, "B G S K"],
    v: Real[Tensor, "B G S U"],
    plans: Sequence[Sequence[Tile]],
    *,
    scale: float | None = None,
    dropout: float = 0.0,
    bias: TileBias | None = None,
) -> Float[Tensor, "B H T U"]:
    """softmax over the columns of each tile; the columns of a run are scores of its kind of queries with its keys.

    plans  the tiles of each row of the batch, or one plan for all rows
    bias   gives what is added to the scores of a tile, for a row of the batch and the tile; it has no gradient
    """
    if plain_needed(*queries, k, v):
        raise RuntimeError("attention by tiles does not support torch.func; pass fused=False for plain operations")
    given = (*queries, k, v)
    *wide, k, v = widen_alike(*given)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    with torch.autocast(k.device.type, enabled=False):
        mixed = ByTiles.apply(Work(plans, default_scale(k, scale), dropout, seed, bias), k, v, *wide)
    return narrow(mixed, *given)


class ByTiles(torch.autograd.Function):
    """Save only the inputs for the backward pass, which computes the weights of each tile again."""

    @staticmethod
    def forward(ctx: Any, work: Work, k: Tensor, v: Tensor, *queries: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(k, v, *queries)
        batch, heads, length, _ = queries[0].shape
        mixed = k.new_zeros(batch, length, heads, v.shape[3]).transpose(1, 2)
        for share in work.shares(k, v, queries):
            share.forward(mixed)
        return mixed

    @staticmethod
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:
        refuse_second_derivative("attention by tiles", "pass fused=False for plain operations")
        k, v, *queries = ctx.saved_tensors
        gradients = [torch.zeros_like(x) for x in (k, v, *queries)]
        d_k, d_v, *d_queries = gradients
        for share in ctx.work.shares(k, v, queries):
            share.backward(d_mixed, d_k, d_v, d_queries)
        return None, *gradients


@dataclass
class Work:
    """What is the same for all rows of the batch, forward and backward."""

    plans: Sequence[Sequence[Tile]]
    scale: float
    dropout: float
    seed: int
    bias: TileBias | None
    hidden: dict[int, Tensor] = field(default_factory=dict)

    def mask_term(self, allowed: Bool[np.ndarray, "T C"], like: Tensor) -> Float[Tensor, "T C"]:
        """0 where a query may read, −∞ where not; tiles with the same pattern share it."""
        if id(allowed) not in self.hidden:
            may = torch.from_numpy(allowed).to(like.device)
            self.hidden[id(allowed)] = torch.where(may, 0.0, -torch.inf).to(like.dtype)
        return self.hidden[id(allowed)]

    def shares(self, k: Tensor, v: Tensor, queries: Sequence[Tensor]) -> Iterator[Share]:
        """Row after row of the batch, as many heads and tiles of a form at a time as have their scores in the cache."""
        (batch, groups), repeats = k.shape[:2], queries[0].shape[1] // k.shape[1]
        rooms, plans = Rooms(k), [group_tiles(plan) for plan in self.plans]
        for row in range(batch):
            for same in plans[row if len(plans) > 1 else 0]:
                most = max(1, CACHED // (repeats * same[0].area))
                heads = 1 if len(same) >= groups and evenly_spaced(same) else min(groups, most)
                for head, at in product(range(0, groups, heads), range(0, len(same), max(1, most // heads))):
                    part = slice(head, min(head + heads, groups))
                    yield Share(self, row, part, same[at : at + max(1, most // heads)], k, v, queries, rooms)


class Rooms:
    """Memory for the scores of one share after the other."""

    def __init__(self, like: Tensor) -> None:
        self.made = [like.new_empty(0), like.new_empty(0)]

    def of(self, which: int, *shape: int) -> Tensor:
        size = math.prod(shape)
        if len(self.made[which]) < size:
            self.made[which] = self.made[which].new_empty(size)
        return self.made[which][:size].view(shape)


def group_tiles(plan: Sequence[Tile]) -> list[list[Tile]]:
    """Group tiles of the same form; one product computes each group."""
    found: dict[object, list[Tile]] = {}
    for tile in plan:
        checks = tuple((check.start, check.stop, id(check.allowed)) for check in tile.checks)
        columns = tuple((which, at.stop) for which, at in kinds(tile))
        form = tile.stop - tile.start, columns, checks, None if tile.blind is None else tile.start
        found.setdefault(form, []).append(tile)
    return list(found.values())


def evenly_spaced(same: Sequence[Tile]) -> bool:
    """Whether each tile of a form reads one run of keys, as far on from the last tile's as its queries are."""
    first = same[0]
    step = first.stop - first.start
    places = [(first.start + i * step, first.runs[0].start + i * step) for i in range(len(same))]
    return len(first.runs) == 1 and [(tile.start, tile.runs[0].start) for tile in same] == places


class Share:
    """Tiles of one form, of some heads of one row of the batch: G heads of keys and values, G·R of queries, N tiles."""

    def __init__(
        self,
        work: Work,
        row: int,
        part: slice,
        few: Sequence[Tile],
        k: Tensor,
        v: Tensor,
        queries: Sequence[Tensor],
        rooms: Rooms,
    ) -> None:
        self.work, self.row, self.part, self.groups = work, row, part, k.shape[1]
        self.tiles, self.form, self.kinds, self.rooms = few, few[0], kinds(few[0]), rooms
        self.step = few[0].stop - few[0].start
        self.even = part.stop - part.start == 1 and evenly_spaced(few)  # then keys and values are read where they lie
        self.k, self.v = self.gather(k), self.gather(v)
        self.queries = [self.stack_heads(q) for q in queries]

    def forward(self, mixed: Float[Tensor, "B H T U"]) -> None:
        kept, _ = self.drop(self.weights())
        self.store(mixed, torch.bmm(kept, self.v))

    def backward(self, d_mixed: Tensor, d_k: Tensor, d_v: Tensor, d_queries: Sequence[Tensor]) -> None:
        """With P the weights and M the multipliers of dropout: d_P = M ∘ (d_out vᵀ), d_S = P ∘ (d_P − Σ d_P ∘ P)."""
        weights = self.weights()
        kept, multipliers = self.drop(weights)
        d_out, d_scores = self.stack_heads(d_mixed), self.scores(1)
        self.scatter(d_v, torch.bmm(kept.mT, d_out))
        torch.bmm(d_out, self.v.mT, out=d_scores)
        if multipliers is not None:
            d_scores *= multipliers
        torch._softmax_backward_data(d_scores, weights, -1, weights.dtype, grad_input=d_scores)
        d_keys = torch.empty_like(self.k)
        for which, at in self.kinds:
            self.scaled_product(d_scores[..., at].mT, self.queries[which], d_keys[:, at])
            d_q = self.scaled_product(d_scores[..., at], self.k[:, at], torch.empty_like(self.queries[which]))
            self.store(d_queries[which], d_q)
        self.scatter(d_k, d_keys)

    def weights(self) -> Float[Tensor, "GN RT C"]:
        scores = self.scores(0)
        for which, at in self.kinds:
            self.scaled_product(self.queries[which], self.k[:, at].mT, scores[..., at])
        by_tile = self.split(scores)
        for check in self.form.checks:
            by_tile[..., check.start : check.stop] += self.work.mask_term(check.allowed, scores)
        if self.work.bias is not None:
            for i, tile in enumerate(self.tiles):
                by_tile[:, i] += self.heads(self.work.bias(self.row, tile)).view(by_tile[:, i].shape)
        torch.softmax(scores, -1, out=scores)
        if self.form.blind is not None:
            by_tile.masked_fill_(torch.from_numpy(self.form.blind).to(scores.device)[:, None], 0)
        return scores

    def scaled_product(
        self, a: Float[Tensor, "GN I J"], b: Float[Tensor, "GN J L"], out: Tensor
    ) -> Float[Tensor, "GN I L"]:
        """scale·a·b."""
        return torch.baddbmm(out, a, b, beta=0, alpha=self.work.scale, out=out)

    def drop(self, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights that dropout leaves, and its multipliers: the same whenever they are drawn for these tiles."""
        if not self.work.dropout:
            return weights, None
        place = self.work.seed, self.row, self.part.start, self.form.start
        rng = torch.Generator(weights.device).manual_seed(hash(place) % 2**62)
        chance = torch.rand(weights.shape, generator=rng, dtype=weights.dtype, device=weights.device)
        multipliers = (chance >= self.work.dropout) / (1 - self.work.dropout)
        return weights * multipliers, multipliers

    def scores(self, which: int) -> Float[Tensor, "GN RT C"]:
        many, rows, _ = self.queries[0].shape
        return self.rooms.of(which, many, rows, self.form.columns)

    def own(self, x: Float[Tensor, "B H S W"]) -> Float[Tensor, "G R S W"]:
        """These heads of x."""
        return self.heads(x[self.row]).unflatten(0, (self.part.stop - self.part.start, -1))

    def heads(self, x: Float[Tensor, "H S W"]) -> Float[Tensor, "H2 S W"]:
        repeats = len(x) // self.groups
        return x[self.part.start * repeats : self.part.stop * repeats]

    def stack_heads(self, x: Float[Tensor, "B H S W"]) -> Float[Tensor, "GN RT W"]:
        """The tiles' rows of x, the R heads of a group below each other, for they read the same keys."""
        own = self.own(x)
        if self.even and own.shape[1] == 1:
            return self.tile_view(own[0, 0], self.form.start, self.step)
        rows = torch.stack([own[:, :, tile.start : tile.stop] for tile in self.tiles], dim=1)
        return rows.flatten(2, 3).flatten(0, 1)

    def split(self, x: Float[Tensor, "GN RT W"]) -> Float[Tensor, "G N R T W"]:
        return x.unflatten(1, (-1, self.step)).unflatten(0, (-1, len(self.tiles)))

    def store(self, x: Float[Tensor, "B H S W"], rows: Float[Tensor, "GN RT W"]) -> None:
        """Put what was computed of the tiles' rows in its place."""
        own = self.own(x)
        for tile, part in zip(self.tiles, self.split(rows).unbind(1), strict=True):
            own[:, :, tile.start : tile.stop] = part

    def gather(self, x: Float[Tensor, "B G S W"]) -> Float[Tensor, "GN C W"]:
        """The keys or values that the tiles read; of a single run, a view."""
        own = self.own(x).squeeze(1)
        if self.even:
            return self.tile_view(own[0], self.form.runs[0].start, self.form.columns)
        parts = [own[:, run.start : run.stop] for tile in self.tiles for run in tile.runs]
        joint = parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)
        return joint if len(self.tiles) == 1 else joint.unflatten(1, (len(self.tiles), -1)).flatten(0, 1)

    def scatter(self, x: Float[Tensor, "B G S W"], part: Float[Tensor, "GN C W"]) -> None:
        """Add to each key what its columns got."""
        own = self.own(x).squeeze(1)
        if self.even:
            for at in range(0, self.form.columns, self.step):  # so wide that the tiles' parts do not overlap
                rows = min(self.step, self.form.columns - at)
                self.tile_view(own[0], self.form.runs[0].start + at, rows).add_(part[:, at : at + rows])
            return
        for tile, of_tile in zip(self.tiles, part.unflatten(0, (-1, len(self.tiles))).unbind(1), strict=True):
            at = 0
            for run in tile.runs:
                own[:, run.start : run.stop] += of_tile[:, at : at + run.stop - run.start]
                at += run.stop - run.start

    def tile_view(self, x: Float[Tensor, "S W"], start: int, rows: int) -> Float[Tensor, "N I W"]:
        """A view of `rows` rows of x for each tile. It moves with the queries, `step` rows per tile."""
        down, across = x.stride()
        return x[start:].as_strided((len(self.tiles), rows, x.shape[1]), (self.step * down, down, across))


def kinds(tile: Tile) -> list[tuple[int, slice]]:
    """Each kind of queries in the tile, and its columns."""
    ends: dict[int, list[int]] = {}
    at = 0
    for run in tile.runs:
        ends.setdefault(run.which, [at, at])[1] = at = at + run.stop - run.start
    return [(which, slice(*columns)) for which, columns in ends.items()]
