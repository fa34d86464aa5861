"""Attention maps, computed for the requested rows beside the kernel, and summaries of what each head does."""

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

THUMBNAIL = 128  # largest side of a thumbnail; larger maps are max-pooled
CHUNK = 2**20  # weights computed at a time
STRONG, EVEN = 0.4, 0.9  # thresholds of a tag: mean weight, and entropy relative to uniform
TAGS = ("previous token", "first-token sink", "induction", "diagonal", "uniform")


@dataclass(frozen=True)
class HeadSummary:
    """Summary of one head on this input. Means are over queries; None if there was nothing to measure."""

    place: str
    layer: int
    head: int
    tag: str  # one of TAGS, or ""
    entropy: float | None  # bits
    distance: float | None  # mean positions between query and key; None for cross-attention
    scores: dict[str, float | None]  # mean weight on the keys of each tag

    @property
    def name(self) -> str:
        return f"{self.place} layer {self.layer} head {self.head}"


@dataclass(frozen=True)
class Map:
    """The attention of one layer on one input. q and k are kept; rows are computed on request."""

    place: str  # stack, encoder, decoder, cross
    layer: int
    heads: tuple[int, ...]
    attending: AttentionView
    tokens: Int[np.ndarray, "T"] | None  # for induction scores; None for image patches
    grid: int | None = None  # patches per image row; position 0 is the class token

    @property
    def shape(self) -> tuple[int, int]:
        """Queries and keys."""
        return self.attending.q.shape[2], self.attending.k.shape[2]

    def weights(self, head: int | None = None, rows: Sequence[int] | None = None) -> Float[np.ndarray, "H R S"]:
        """Weights of one head or all, for some queries or all."""
        if head is not None and head not in self.heads:
            raise ValueError(
                f"head {head} of layer {self.layer} was not inspected; inspected heads: {join_numbers(self.heads)}"
            )
        at = slice(None) if head is None else slice(self.heads.index(head), self.heads.index(head) + 1)
        of = slice(None) if rows is None else resolve_indices(rows, self.shape[0], "row", "queries")
        return self.attending.weights(at, of)[0].float().cpu().numpy()

    def chunks(self, step: int = 1) -> Iterator[tuple[slice, Float[Tensor, "H R Keys"]]]:
        """Yield all rows in chunks (multiples of `step`), over the keys that a chunk can attend to."""
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
    def head_summaries(self) -> list[HeadSummary]:
        return self.summary[1]

    @cached_property
    def summary(self) -> tuple[np.ndarray, list[HeadSummary]]:
        """Thumbnails and head summaries from one pass over the rows."""
        pool = -(-self.shape[0] // THUMBNAIL), -(-self.shape[1] // THUMBNAIL)
        small, sums = [], Sums(len(self.heads))
        for rows, weights in self.chunks(pool[0]):
            pooled = weights if pool == (1, 1) else largest(weights, pool, signed=not self.normalized)
            small.append(F.pad(pooled, (0, -(-self.shape[1] // pool[1]) - pooled.shape[2])))
            if self.normalized:
                sums.add(self, rows, weights)
        thumbnails = torch.cat(small, 1).numpy() if small else np.zeros((len(self.heads), 0, 0), np.float32)
        return thumbnails, sums.heads(self)

    @property
    def is_self_attention(self) -> bool:
        """Whether queries and keys are the same positions (not in cross-attention or Linformer)."""
        return self.attending.context.key_positions is self.attending.context.positions

    @property
    def normalized(self) -> bool:
        """Whether weights are non-negative and sum to 1 (not in unnormalized linear attention)."""
        return getattr(self.attending, "shares", True)

    def distances(self, rows: slice) -> Float[Tensor, "R S"]:
        """Distances in positions, or in patches on an image (0 for the class token)."""
        if self.grid is None:
            at = self.attending.context
            return (at.positions[0, rows, None] - at.key_positions[0, None, :]).abs().float().cpu()
        patch = torch.arange(self.shape[1]) - 1
        where = torch.stack((patch // self.grid, patch % self.grid), 1).float()
        far = torch.cdist(where[rows], where)
        far[:, 0] = 0
        return far * (torch.arange(self.shape[0])[rows, None] > 0)

    def induction_targets(self, rows: slice) -> Float[Tensor, "R S"]:
        """1 where the key follows an earlier copy of the query's token: the target of an induction head."""
        assert self.tokens is not None, "image patches have no induction targets"
        tokens = torch.from_numpy(self.tokens)
        before = torch.cat((torch.tensor([-1]), tokens[:-1]))
        i, j = torch.arange(len(tokens))[rows, None], torch.arange(len(tokens))[None]
        return ((tokens[rows, None] == before) & (j < i)).float()


class Sums:
    """Running sums over rows, per head of a layer."""

    def __init__(self, heads: int) -> None:
        self.totals = {name: torch.zeros(heads) for name in ("entropy", "evenness", "distance", *TAGS[:4])}
        self.counts = dict.fromkeys(self.totals, 0)

    def put(self, name: str, values: Float[Tensor, "H R"]) -> None:
        self.totals[name] += values.sum(1)
        self.counts[name] += values.shape[1]

    def add(self, map: Map, rows: slice, weights: Float[Tensor, "H R S"]) -> None:
        i = torch.arange(map.shape[0])[rows]
        allowed = map.attending.attention_mask(rows)
        readable = torch.full((len(i),), map.shape[1]) if allowed is None else allowed[0, 0].sum(-1).cpu()
        entropy = -torch.einsum("hrs,hrs->hr", weights, weights.clamp(min=1e-30).log_())
        self.put("entropy", entropy[:, readable > 0] / math.log(2))
        choice = readable > 1
        self.put("evenness", entropy[:, choice] / readable[choice].log())
        late = i >= min(2, map.shape[0] - 1)  # in earlier rows the first, previous and own token coincide
        self.put("first-token sink", weights[:, late, 0])
        if not map.is_self_attention:
            return
        if map.shape[0] > 1:
            own = i[late & (i < weights.shape[2])]
            self.put("diagonal", weights[:, own - rows.start, own])
            if map.grid is None:
                self.put("previous token", weights[:, own - rows.start, (own - 1).clamp(min=0)])
        keys = weights.shape[2]
        self.put("distance", torch.einsum("hrs,rs->hr", weights, map.distances(rows)[:, :keys]))
        if map.tokens is not None:
            follow = map.induction_targets(rows)[:, :keys]
            self.put("induction", torch.einsum("hrs,rs->hr", weights, follow)[:, follow.any(-1)])

    def mean(self, name: str, head: int) -> float | None:
        return float(self.totals[name][head] / self.counts[name]) if self.counts[name] else None

    def heads(self, map: Map) -> list[HeadSummary]:
        out = []
        for at, head in enumerate(map.heads):
            scores = {name: self.mean(name, at) for name in TAGS[:4]} | {"uniform": self.mean("evenness", at)}
            out.append(
                HeadSummary(
                    place=map.place,
                    layer=map.layer,
                    head=head,
                    tag=tag_of(scores),
                    entropy=(self.mean("entropy", at) or 0.0) if map.normalized else None,
                    distance=self.mean("distance", at),
                    scores=scores,
                )
            )
        return out


def tag_of(scores: dict[str, float | None]) -> str:
    """The pattern with the most weight if above STRONG; else uniform if the entropy is high; else none."""
    best = max(TAGS[:4], key=lambda name: scores[name] or 0.0)
    if (scores[best] or 0.0) >= STRONG:
        return best
    return "uniform" if (scores["uniform"] or 0.0) >= EVEN else ""


def largest(x: Float[Tensor, "H R S"], pool: tuple[int, int], *, signed: bool) -> Float[Tensor, "H Rows Keys"]:
    """Max-pool; for signed values, keep the value farthest from 0."""
    high = F.max_pool2d(x, pool, ceil_mode=True)
    low = -F.max_pool2d(-x, pool, ceil_mode=True) if signed else high
    return torch.where(-low > high, low, high)


@dataclass(frozen=True)
class GlobalView(AttentionView):
    """A Longformer layer: global tokens use their own projections."""

    local: AttentionView
    everywhere: AttentionView  # queries of the global tokens

    def weights(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        at = self.context.positions[0][rows][:, None] == self.everywhere.context.positions[0]
        own = self.everywhere.weights(heads, slice(None), keys)
        own = torch.einsum("rn,bhns->bhrs", at.to(own.dtype), own)
        return torch.where(at.any(-1)[:, None], own, self.local.weights(heads, rows, keys))


def combine_global(local: AttentionView, everywhere: AttentionView) -> GlobalView:
    return GlobalView(local.q, local.k, local.mask, local.context, local, everywhere)


def rollout(maps: Sequence[Map]) -> Float[np.ndarray, "T S"]:
    """Attention rollout: the product over layers of (mean over heads + identity)/2.

    Abnar & Zuidema (2020), "Quantifying Attention Flow in Transformers", section 3.
    """
    flow = torch.eye(maps[0].shape[1])
    for map in maps:
        rows = [(weights.mean(0) @ flow[: weights.shape[2]] + flow[part]) / 2 for part, weights in map.chunks()]
        flow = torch.cat(rows)
    return flow.numpy()


def resolve_indices(numbers: Sequence[int], size: int, what: str, of: str) -> list[int]:
    """Check a non-empty list of indices; negative ones count from the end."""
    if not len(numbers):
        raise ValueError(f"no {what} is selected; choose from the {size} {of}, 0 to {size - 1}")
    for number in numbers:
        if not -size <= number < size:
            raise ValueError(f"{what} {number} does not exist; choose from the {size} {of}, 0 to {size - 1}")
    return [number % size for number in numbers]


def join_numbers(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
