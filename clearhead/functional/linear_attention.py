"""Attention through a feature map: the sums over keys, made once, or chunk by chunk where no query may read ahead."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from clearhead.configs.linear_attention import CHUNK

ROWS = 1024
"""Vectors whose features are computed together."""

NOTHING = -1e30
"""The logarithm of no weight at all; less than any other, and still a number that can be subtracted from itself."""


def elu_features(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """elu(x) + 1: x + 1 above zero, eˣ below; always positive."""
    return F.elu(x) + 1


def positive_features(x: Float[Tensor, "... K"], directions: Float[Tensor, "W K"]) -> Float[Tensor, "... W"]:
    """exp(ω·x − |x|²/2)/√W for every direction ω. Over ω ~ N(0, I), E[φ(q)·φ(k)] = exp(q·k)."""
    exponent = x @ directions.T - 0.5 * x.square().sum(-1, keepdim=True)
    return exponent.exp() / math.sqrt(len(directions))


def linear_attention(
    q: Float[Tensor, "... T W"],
    k: Float[Tensor, "... S W"],
    v: Float[Tensor, "... S U"],
    causal: bool = False,
) -> Float[Tensor, "... T U"]:
    """Σ_j (q·k_j) v_j / Σ_j q·k_j over positive features; causal: over the keys up to the query's own place."""
    if not causal:
        return over_all_keys(q, k, v)
    if q.shape[-2] != k.shape[-2]:
        raise ValueError(f"causal linear attention takes as many queries as keys, not {q.shape[-2]} and {k.shape[-2]}")
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (x.expand(*lead, *x.shape[-2:]).reshape(1, -1, *x.shape[-2:]) for x in (q, k, v))
    return over_keys_so_far(q, k, v)[0].reshape(*lead, *v.shape[-2:])


def stable_features(
    x: Float[Tensor, "B H T K"], directions: Float[Tensor, "W K"]
) -> tuple[Float[Tensor, "B H T W"], Float[Tensor, "B H T"]]:
    """√W·`positive_features`(x/√√K), each vector's largest made 1, and the logarithm of what they were divided by.

    That is a constant of the computation: whatever it is, it cancels, so no gradient flows through it.
    """
    features, top = Features.apply(x, directions * x.shape[-1] ** -0.25)
    return features, top


class Features(torch.autograd.Function):
    """A few rows at a time, so that between the product and the exponentials they stay in the cache.

    With e = ω·x − |x|²/2√K and φ = exp(e − top):  de = dφ·φ,  dx = de·ω − x·Σ de/√K.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Float[Tensor, "B H T K"], directions: Float[Tensor, "W K"]
    ) -> tuple[Float[Tensor, "B H T W"], Float[Tensor, "B H T"]]:
        rows, columns = x.flatten(0, 2), directions.T
        features, top = x.new_empty(len(rows), len(directions)), x.new_empty(len(rows), 1)
        for few, found, largest in zip(rows.split(ROWS), features.split(ROWS), top.split(ROWS), strict=True):
            half_square = few.square().sum(-1, keepdim=True).mul_(-0.5 * x.shape[-1] ** -0.5)
            torch.addmm(half_square, few, columns, out=found)
            torch.amax(found, -1, keepdim=True, out=largest)
            found.sub_(largest).exp_()
        features, top = features.view(*x.shape[:-1], len(directions)), top.view(x.shape[:-1])
        ctx.save_for_backward(x, directions, features)
        ctx.mark_non_differentiable(top)
        return features, top

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_features: Float[Tensor, "B H T W"], _: Tensor) -> tuple[Tensor, None]:
        x, directions, features = ctx.saved_tensors
        d_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        parts = [part.flatten(0, 2).split(ROWS) for part in (x, features, d_features, d_x)]
        for few, found, d_found, d_few in zip(*parts, strict=True):
            d_exponent = d_found * found
            total = d_exponent.sum(-1, keepdim=True).mul_(-(x.shape[-1] ** -0.5))
            torch.addmm(few * total, d_exponent, directions, out=d_few)
        return d_x, None


def over_all_keys(
    q: Float[Tensor, "... T W"],
    k: Float[Tensor, "... S W"],
    v: Float[Tensor, "... S U"],
    factor: Float[Tensor, "... S"] | None = None,
    shares: bool = True,
) -> Float[Tensor, "... T U"]:
    """Every query reads the same two sums, Σφ(k)·v and Σφ(k); `factor` is of each key in both. Without `shares` the
    first is not divided by the second."""
    beside = with_ones(v)
    sums = k.mT @ (beside if factor is None else beside * factor.unsqueeze(-1))
    return quotient(q @ sums) if shares else (q @ sums)[..., :-1]


@dataclass(frozen=True)
class Sums:
    """What the keys so far come to: Σφ(k)·[v 1], each times exp(its top − the largest top), and that largest top."""

    sums: Float[Tensor, "B H W U1"]
    top: Float[Tensor, "B H"]


def over_keys_so_far(
    q: Float[Tensor, "B H T W"],
    k: Float[Tensor, "B H T W"],
    v: Float[Tensor, "B H T U"],
    top: Float[Tensor, "B H T"] | None = None,
    documents: Int[Tensor, "B T"] | None = None,
    start: Sums | None = None,
    shares: bool = True,
) -> tuple[Float[Tensor, "B H T U"], Sums]:
    """Each chunk is compared with itself, and reads what is before it through its sums.

    A key weighs φ(k)·exp(top). The exponentials are of the distance to the largest top that a query may read, so none
    overflows, and no later key has a say in it. Documents, if any, must stand one after the other. Without `shares`
    the sum is not divided by its weights, and all tops are 0.
    """
    start = start or no_sums(q, v)
    length, chunk = q.shape[2], min(CHUNK, q.shape[2])
    if length == 0:
        return v, start
    more = -length % chunk
    tops = q.new_zeros(q.shape[:3]) if top is None else top
    beside = with_ones(v)
    if more:  # a copy, which whole chunks do not need
        tops = F.pad(tops, (0, more), value=NOTHING)
        q, k, beside = (F.pad(x, (0, 0, 0, more)) for x in (q, k, beside))
    q, k, beside, tops = (x.unflatten(2, (-1, chunk)) for x in (q, k, beside, tops))  # B H N C …
    if documents is not None:
        documents = F.pad(documents[:, None], (0, more), value=-1).unflatten(2, (-1, chunk))  # B 1 N C
    links = Links.of(tops, documents)
    adding_tops = torch.where(links.adds, tops, NOTHING)
    before, after = running_top(adding_tops.amax(-1), links.stays, start.top)  # B H N
    through = torch.where(links.reads, before.unsqueeze(-1), NOTHING)
    factors = torch.where(links.within, tops.unsqueeze(-2), NOTHING)  # B H N C C
    largest = torch.maximum(factors.amax(-1), through)
    within = (q @ k.mT) * factors.sub_(largest.unsqueeze(-1)).exp_()
    adds = k.mT @ (beside * (adding_tops - after.unsqueeze(-1)).exp().unsqueeze(-1))
    sums = [start.sums]
    keeps = (torch.where(links.stays, before, NOTHING) - after).exp()
    for kept, added in zip(keeps.unbind(2), adds.unbind(2), strict=True):
        sums.append(sums[-1] * kept[..., None, None] + added)
    both = within @ beside + (q @ torch.stack(sums[:-1], 2)) * (through - largest).exp().unsqueeze(-1)
    mixed = quotient(both) if shares else both[..., :-1]
    return mixed.flatten(2, 3)[:, :, :length], Sums(sums[-1], after[..., -1])


@dataclass(frozen=True)
class Links:
    """What goes where, chunk by chunk. Without documents: all that is not ahead goes everywhere."""

    within: Bool[Tensor, "*within C C"]  # whether a query reads a key of its own chunk
    reads: Bool[Tensor, "*reads #C"]  # whether it reads the sums before
    adds: Bool[Tensor, "*adds #C"]  # whether a key goes into the sums
    stays: Bool[Tensor, "*stays N"]  # whether the sums go on from those before

    @classmethod
    def of(cls, like: Float[Tensor, "B H N C"], document: Int[Tensor, "B 1 N C"] | None) -> Links:
        """The sums that a chunk leaves are of the document that it ends in."""
        _, _, count, size = like.shape
        within = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
        if document is None:
            return cls(within, within[0, :1], within[0, :1], within[0, :1].expand(count))
        last = document[..., -1:]
        reads = document == F.pad(last[:, :, :-1], (0, 0, 1, 0), value=-2)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        return cls(within & same, reads, document == last, reads[..., -1])


def running_top(
    tops: Float[Tensor, "B H N"], stays: Bool[Tensor, "#B 1 N"] | Bool[Tensor, "N"], start: Float[Tensor, "B H"]
) -> tuple[Float[Tensor, "B H N"], Float[Tensor, "B H N"]]:
    """The largest top of the sums that each chunk finds, and of those that it leaves; begun anew with a document."""
    found = [start]
    for top, stay in zip(tops.unbind(2), stays.unbind(-1), strict=True):
        found.append(torch.maximum(torch.where(stay, found[-1], NOTHING), top))
    return torch.stack(found[:-1], 2), torch.stack(found[1:], 2)


def no_sums(q: Float[Tensor, "B H T W"], v: Float[Tensor, "B H T U"]) -> Sums:
    batch, heads, _, width = q.shape
    return Sums(v.new_zeros(batch, heads, width, v.shape[-1] + 1), v.new_full((batch, heads), NOTHING))


def with_ones(v: Float[Tensor, "... S U"]) -> Float[Tensor, "... S U1"]:
    """A column of ones beside the values: what is done to it becomes the denominator."""
    return torch.cat((v, v.new_ones(*v.shape[:-1], 1)), dim=-1)


def quotient(both: Float[Tensor, "... T U1"]) -> Float[Tensor, "... T U"]:
    """Numerator by denominator; 0 where nothing was read."""
    total = both[..., -1:]
    return both[..., :-1] / torch.where(total == 0, 1, total)
