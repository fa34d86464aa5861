"""Attention maps: who reads whom, computed beside the kernel for the rows that are asked for, and what heads do."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.nn.attention_view import AttentionView, Rows

THUMBNAIL = 128  # most rows and columns of a thumbnail; each of its points is the largest of those it stands for
CHUNK = 2**20  # weights written out at a time
STRONG, EVEN = 0.4, 0.9  # the share of weight, and of the largest entropy, from which a head has its name
TAGS = ("previous token", "first-token sink", "induction", "diagonal", "uniform")


@dataclass(frozen=True)
class Head:
    """What one head does over this input. Means are over the queries; None where there was nothing to measure, as where
    weights are no shares."""

    place: str
    layer: int
    head: int
    tag: str  # one of TAGS, or "" where none fits
    entropy: float | None  # bits
    distance: float | None  # positions between query and key; None between two different sequences
    scores: dict[str, float | None]  # the share of weight that each tag asks about

    @property
    def name(self) -> str:
        return f"{self.place} layer {self.layer} head {self.head}"


@dataclass(frozen=True)
class Map:
    """The attention of one layer over one input: what it read is kept, and rows are computed when asked for."""

    place: str  # stack, encoder, decoder, cross
    layer: int
    heads: tuple[int, ...]
    attending: AttentionView
    tokens: Int[np.ndarray, "T"] | None  # whose repetition makes an induction head; None for patches
    grid: int | None = None  # patches in a row of the image, after one class token

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.attending.q.shape[2], self.attending.k.shape[2]

    def weights(self, head: int | None = None, rows: Sequence[int] | None = None) -> Float[np.ndarray, "H R S"]:
        """The maps of one head or of all, of some queries or all, in memory for these alone."""
        if head is not None and head not in self.heads:
            raise ValueError(f"head {head} was not looked at in layer {self.layer}; there are {listed(self.heads)}")
        at = slice(None) if head is None else slice(self.heads.index(head), self.heads.index(head) + 1)
        of = slice(None) if rows is None else checked(rows, self.shape[0], "row", "queries")
        return self.attending.weights(at, of)[0].float().cpu().numpy()

    def chunks(self, step: int = 1) -> Iterator[tuple[slice, Float[Tensor, "H R Keys"]]]:
        """All rows, a few at a time, in multiples of `step`, over the keys that they may read at all."""
        queries, keys = self.shape
        rows = max(1, CHUNK // max(len(self.heads) * keys * step, 1)) * step
        for start in range(0, queries, rows):
            part = slice(start, min(start + rows, queries))
            yield part, self.attending.weights(slice(None), part, self.attending.reach(part))[0].float().cpu()

    @cached_property
    def thumbnails(self) -> Float[np.ndarray, "H R C"]:
        """Every head, max-pooled to at most 128 × 128."""
        return self.summary[0]

    @cached_property
    def described(self) -> list[Head]:
        return self.summary[1]

    @cached_property
    def summary(self) -> tuple[np.ndarray, list[Head]]:
        """One walk over the rows: thumbnails, and the numbers that tell what a head does."""
        pool = -(-self.shape[0] // THUMBNAIL), -(-self.shape[1] // THUMBNAIL)
        small, sums = [], Sums(len(self.heads))
        for rows, weights in self.chunks(pool[0]):
            pooled = weights if pool == (1, 1) else largest(weights, pool, signed=not self.shares)
            small.append(F.pad(pooled, (0, -(-self.shape[1] // pool[1]) - pooled.shape[2])))
            if self.shares:
                sums.add(self, rows, weights)
        thumbnails = torch.cat(small, 1).numpy() if small else np.zeros((len(self.heads), 0, 0), np.float32)
        return thumbnails, sums.heads(self)

    @property
    def selfish(self) -> bool:
        """Whether queries and keys are the same sequence: not in cross-attention, nor where keys are mixtures."""
        return self.attending.context.key_positions is self.attending.context.positions

    @property
    def shares(self) -> bool:
        """Whether the weights of a query are above 0 and sum to 1: not in linear attention that is never divided."""
        return getattr(self.attending, "shares", True)

    def distances(self, rows: slice) -> Float[Tensor, "R S"]:
        """In positions; between patches of an image in patches, the class token being nowhere."""
        if self.grid is None:
            at = self.attending.context
            return (at.positions[0, rows, None] - at.key_positions[0, None, :]).abs().float().cpu()
        patch = torch.arange(self.shape[1]) - 1
        where = torch.stack((patch // self.grid, patch % self.grid), 1).float()
        far = torch.cdist(where[rows], where)
        far[:, 0] = 0
        return far * (torch.arange(self.shape[0])[rows, None] > 0)

    def followers(self, rows: slice) -> Float[Tensor, "R S"]:
        """1 where the key stands after an earlier copy of the query's token: what an induction head reads."""
        assert self.tokens is not None, "patches do not repeat"
        tokens = torch.from_numpy(self.tokens)
        before = torch.cat((torch.tensor([-1]), tokens[:-1]))
        i, j = torch.arange(len(tokens))[rows, None], torch.arange(len(tokens))[None]
        return ((tokens[rows, None] == before) & (j < i)).float()


class Sums:
    """Running sums over rows, for every head of a layer."""

    def __init__(self, heads: int) -> None:
        self.totals = {name: torch.zeros(heads) for name in ("entropy", "evenness", "distance", *TAGS[:4])}
        self.counts = dict.fromkeys(self.totals, 0)

    def put(self, name: str, values: Float[Tensor, "H R"]) -> None:
        self.totals[name] += values.sum(1)
        self.counts[name] += values.shape[1]

    def add(self, map: Map, rows: slice, weights: Float[Tensor, "H R S"]) -> None:
        i = torch.arange(map.shape[0])[rows]
        allowed = map.attending.allowed(rows)
        readable = torch.full((len(i),), map.shape[1]) if allowed is None else allowed[0, 0].sum(-1).cpu()
        entropy = -torch.einsum("hrs,hrs->hr", weights, weights.clamp(min=1e-30).log_())
        self.put("entropy", entropy[:, readable > 0] / math.log(2))
        choice = readable > 1
        self.put("evenness", entropy[:, choice] / readable[choice].log())
        late = i >= min(2, map.shape[0] - 1)  # before that, first, previous and own token are one another
        self.put("first-token sink", weights[:, late, 0])
        if not map.selfish:
            return
        if map.shape[0] > 1:
            own = i[late & (i < weights.shape[2])]
            self.put("diagonal", weights[:, own - rows.start, own])
            if map.grid is None:
                self.put("previous token", weights[:, own - rows.start, (own - 1).clamp(min=0)])
        keys = weights.shape[2]
        self.put("distance", torch.einsum("hrs,rs->hr", weights, map.distances(rows)[:, :keys]))
        if map.tokens is not None:
            follow = map.followers(rows)[:, :keys]
            self.put("induction", torch.einsum("hrs,rs->hr", weights, follow)[:, follow.any(-1)])

    def mean(self, name: str, head: int) -> float | None:
        return float(self.totals[name][head] / self.counts[name]) if self.counts[name] else None

    def heads(self, map: Map) -> list[Head]:
        out = []
        for at, head in enumerate(map.heads):
            scores = {name: self.mean(name, at) for name in TAGS[:4]} | {"uniform": self.mean("evenness", at)}
            out.append(
                Head(
                    place=map.place,
                    layer=map.layer,
                    head=head,
                    tag=tag_of(scores),
                    entropy=(self.mean("entropy", at) or 0.0) if map.shares else None,
                    distance=self.mean("distance", at),
                    scores=scores,
                )
            )
        return out


def tag_of(scores: dict[str, float | None]) -> str:
    """The pattern that takes the most weight, if it takes enough; else uniform, if the head does not choose."""
    best = max(TAGS[:4], key=lambda name: scores[name] or 0.0)
    if (scores[best] or 0.0) >= STRONG:
        return best
    return "uniform" if (scores["uniform"] or 0.0) >= EVEN else ""


def largest(x: Float[Tensor, "H R S"], pool: tuple[int, int], *, signed: bool) -> Float[Tensor, "H Rows Keys"]:
    """The largest of neighbours; of signed numbers the one farthest from 0."""
    high = F.max_pool2d(x, pool, ceil_mode=True)
    low = -F.max_pool2d(-x, pool, ceil_mode=True) if signed else high
    return torch.where(-low > high, low, high)


@dataclass(frozen=True)
class WithGlobal(AttentionView):
    """A Longformer's layer over one text: its global tokens read by projections of their own."""

    local: AttentionView
    everywhere: AttentionView  # the queries of the global tokens

    def weights(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        at = self.context.positions[0][rows][:, None] == self.everywhere.context.positions[0]
        own = self.everywhere.weights(heads, slice(None), keys)
        own = torch.einsum("rn,bhns->bhrs", at.to(own.dtype), own)
        return torch.where(at.any(-1)[:, None], own, self.local.weights(heads, rows, keys))


def with_global(local: AttentionView, everywhere: AttentionView) -> WithGlobal:
    return WithGlobal(local.q, local.k, local.mask, local.context, local, everywhere)


def rollout(maps: Sequence[Map]) -> Float[np.ndarray, "T S"]:
    """Whose input reached whom through all layers: the product of (mean over heads + identity)/2, from the bottom up.

    Abnar & Zuidema (2020), "Quantifying Attention Flow in Transformers", section 3.
    """
    flow = torch.eye(maps[0].shape[1])
    for map in maps:
        rows = [(weights.mean(0) @ flow[: weights.shape[2]] + flow[part]) / 2 for part, weights in map.chunks()]
        flow = torch.cat(rows)
    return flow.numpy()


def checked(numbers: Sequence[int], size: int, what: str, of: str) -> list[int]:
    """Numbers in range and at least one, negative ones counted from the end."""
    if not len(numbers):
        raise ValueError(f"no {what} is chosen of the {size} {of}, 0 to {size - 1}")
    for number in numbers:
        if not -size <= number < size:
            raise ValueError(f"{what} {number} is not one of the {size} {of}, 0 to {size - 1}")
    return [number % size for number in numbers]


def listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
