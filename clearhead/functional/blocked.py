"""Attention by tiles: only the scores that a mask leaves are computed, forward and backward, in time and in memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Real
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.configs import Mask
from clearhead.configs.tiles import Tile, Tokens, tiles, tiles_within
from clearhead.functional.softmax import narrow, widen_alike
from clearhead.reference.attention import default_scale

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
    keys = np.arange(k.shape[2])
    same = q.shape[2] == len(keys)
    plan = (
        tiles_within((mask,), len(keys))
        if same
        else tiles((mask,), Tokens(keys[len(keys) - q.shape[2] :]), Tokens(keys))
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
    given = (*queries, k, v)
    *wide, k, v = widen_alike(*given)
    seed = int(torch.randint(2**62, ())) if dropout else 0
    with torch.autocast(k.device.type, enabled=False):
        mixed = ByTiles.apply(Work(plans, default_scale(k, scale), dropout, seed, bias), k, v, *wide)
    return narrow(mixed, *given)


class ByTiles(torch.autograd.Function):
    """Keeps nothing but its inputs: backward, the weights of each tile are computed anew."""

    @staticmethod
    def forward(ctx: Any, work: Work, k: Tensor, v: Tensor, *queries: Tensor) -> Tensor:
        ctx.work = work
        ctx.save_for_backward(k, v, *queries)
        batch, heads, length, _ = queries[0].shape
        mixed = k.new_zeros(batch, length, heads, v.shape[3]).transpose(1, 2)
        side_by_side(work.shares(k, v, queries), lambda share: share.forward(share.own(mixed)))
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_mixed: Tensor) -> tuple[Tensor | None, ...]:
        k, v, *queries = ctx.saved_tensors
        gradients = [torch.zeros_like(x) for x in (k, v, *queries)]

        def run(share: Share) -> None:
            d_k, d_v, *d_queries = map(share.own, gradients)
            share.backward(share.own(d_mixed), d_k, d_v, d_queries)

        side_by_side(ctx.work.shares(k, v, queries), run)
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

    def hiding(self, allowed: Bool[np.ndarray, "T C"], like: Tensor) -> Float[Tensor, "T C"]:
        """0 where a query may read, −∞ where not; tiles with the same pattern share it."""
        if id(allowed) not in self.hidden:
            may = torch.from_numpy(allowed).to(like.device)
            self.hidden[id(allowed)] = torch.where(may, 0.0, -torch.inf).to(like.dtype)
        return self.hidden[id(allowed)]

    def shares(self, k: Tensor, v: Tensor, queries: Sequence[Tensor]) -> list[Share]:
        """Every row of the batch, its heads in as many parts as there are threads."""
        batch, groups = k.shape[:2]
        size = max(1, groups * batch // torch.get_num_threads())
        parts = [slice(start, min(start + size, groups)) for start in range(0, groups, size)]
        return [Share(self, row, part, k, v, queries) for row in range(batch) for part in parts]


class Share:
    """Some heads of one row of the batch: G heads of keys and values, G·R of queries."""

    def __init__(self, work: Work, row: int, part: slice, k: Tensor, v: Tensor, queries: Sequence[Tensor]) -> None:
        self.work, self.row, self.part, self.groups = work, row, part, k.shape[1]
        self.k, self.v, self.queries = self.own(k), self.own(v), [self.own(q) for q in queries]
        self.tiles = work.plans[row if len(work.plans) > 1 else 0]
        most = max((tile.area for tile in self.tiles), default=0)
        self.room = k.new_empty(2, len(self.queries[0]) * most)  # for the scores of one tile after the other

    def own(self, x: Float[Tensor, "B H N W"]) -> Float[Tensor, "H2 N W"]:
        """This share of x."""
        return self.heads(x[self.row])

    def heads(self, x: Float[Tensor, "H N W"]) -> Float[Tensor, "H2 N W"]:
        repeats = len(x) // self.groups
        return x[self.part.start * repeats : self.part.stop * repeats]

    def forward(self, mixed: Float[Tensor, "H T U"]) -> None:
        for tile in self.tiles:
            weights = self.weights(tile, self.scaled(tile), gather(self.k, tile))
            kept, _ = self.drop(tile, weights)
            self.grouped(mixed, tile)[:] = self.split(torch.bmm(kept, gather(self.v, tile)), tile)

    def backward(self, d_mixed: Tensor, d_k: Tensor, d_v: Tensor, d_queries: Sequence[Tensor]) -> None:
        """With P the weights and M the multipliers of dropout: d_P = M ∘ (d_out vᵀ), d_S = P ∘ (d_P − Σ d_P ∘ P)."""
        for tile in self.tiles:
            q, k = self.scaled(tile), gather(self.k, tile)
            weights = self.weights(tile, q, k)
            kept, multipliers = self.drop(tile, weights)
            d_out, d_scores = self.stacked(d_mixed, tile), self.scores(1, tile)
            scatter(d_v, tile, torch.bmm(kept.mT, d_out))
            torch.bmm(d_out, gather(self.v, tile).mT, out=d_scores)
            if multipliers is not None:
                d_scores *= multipliers
            torch._softmax_backward_data(d_scores, weights, -1, weights.dtype, grad_input=d_scores)
            d_keys = torch.empty_like(k)
            for which, at in kinds(tile):
                torch.bmm(d_scores[..., at].mT, q[which], out=d_keys[:, at])
                d_q = torch.bmm(d_scores[..., at], k[:, at]).mul_(self.work.scale)
                self.grouped(d_queries[which], tile)[:] = self.split(d_q, tile)
            scatter(d_k, tile, d_keys)

    def scaled(self, tile: Tile) -> list[Float[Tensor, "G RT K"]]:
        return [self.stacked(q, tile) * self.work.scale for q in self.queries]

    def weights(
        self, tile: Tile, q: Sequence[Float[Tensor, "G RT K"]], k: Float[Tensor, "G C K"]
    ) -> Float[Tensor, "G RT C"]:
        scores = self.scores(0, tile)
        for which, at in kinds(tile):
            torch.bmm(q[which], k[:, at].mT, out=scores[..., at])
        by_head = self.split(scores, tile)
        for check in tile.checks:
            by_head[..., check.start : check.stop] += self.work.hiding(check.allowed, scores)
        if self.work.bias is not None:
            by_head += self.heads(self.work.bias(self.row, tile)).view(by_head.shape)
        torch.softmax(scores, -1, out=scores)
        if tile.blind is not None:
            by_head.masked_fill_(torch.from_numpy(tile.blind).to(scores.device)[:, None], 0)
        return scores

    def drop(self, tile: Tile, weights: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights that dropout leaves, and its multipliers: the same whenever they are drawn for this tile."""
        if not self.work.dropout:
            return weights, None
        place = self.work.seed, self.row, self.part.start, tile.start
        rng = torch.Generator(weights.device).manual_seed(hash(place) % 2**62)
        chance = torch.rand(weights.shape, generator=rng, dtype=weights.dtype, device=weights.device)
        multipliers = (chance >= self.work.dropout) / (1 - self.work.dropout)
        return weights * multipliers, multipliers

    def scores(self, which: int, tile: Tile) -> Float[Tensor, "G RT C"]:
        heads = len(self.queries[0])
        return self.room[which, : heads * tile.area].view(len(self.k), -1, tile.columns)

    def grouped(self, x: Float[Tensor, "H N W"], tile: Tile) -> Float[Tensor, "G R T W"]:
        """The tile's rows of x."""
        return x[:, tile.start : tile.stop].unflatten(0, (len(self.k), -1))

    def stacked(self, x: Float[Tensor, "H N W"], tile: Tile) -> Float[Tensor, "G RT W"]:
        """The same, the R heads of a group below each other, for they read the same keys."""
        return self.grouped(x, tile).flatten(1, 2)

    @staticmethod
    def split(x: Float[Tensor, "G RT W"], tile: Tile) -> Float[Tensor, "G R T W"]:
        return x.unflatten(1, (-1, tile.stop - tile.start))


def gather(x: Float[Tensor, "G S W"], tile: Tile) -> Float[Tensor, "G C W"]:
    """The keys or values that a tile reads; of a single run, a view."""
    parts = [x[:, run.start : run.stop] for run in tile.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)


def scatter(x: Float[Tensor, "G S W"], tile: Tile, part: Float[Tensor, "G C W"]) -> None:
    """Add to each key what its columns got."""
    at = 0
    for run in tile.runs:
        x[:, run.start : run.stop] += part[:, at : at + run.stop - run.start]
        at += run.stop - run.start


def kinds(tile: Tile) -> list[tuple[int, slice]]:
    """Each kind of queries in the tile, and its columns."""
    ends: dict[int, list[int]] = {}
    at = 0
    for run in tile.runs:
        ends.setdefault(run.which, [at, at])[1] = at = at + run.stop - run.start
    return [(which, slice(*columns)) for which, columns in ends.items()]


def side_by_side(shares: Sequence[Share], run: Callable[[Share], None]) -> None:
    """Each share in a thread of its own, on a core of its own: the products of one tile are too small to be split."""
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()

    def alone(share: Share) -> None:
        with torch.inference_mode(inference), torch.no_grad():  # a new thread knows nothing of the caller's mode
            run(share)

    if min(threads, len(shares)) < 2 or shares[0].k.device.type != "cpu":
        for share in shares:
            run(share)
        return
    with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        list(pool.map(alone, shares))
    torch.set_num_threads(threads)  # what the workers have set holds for threads to come too
