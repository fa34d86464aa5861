"""Linear attention: sums over keys, made once, or chunk by chunk where no query may read ahead.

    all keys   φ(q)·(Σ_j φ(k_j)[v_j 1]): two products, in any order of keys; the column of ones is the denominator
    causal     the text in chunks: each chunk is compared with itself, and with everything before it through the sums

The Performer's features are exponentials that leave the range of floats for long vectors. They are passed as exponents,
log φ, and every product is stabilised by the largest exponent of each query against each block of keys.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from clearhead.configs.linear_attention import CHUNK, favor_chunk
from clearhead.reference.linear_attention import check_linear_attention, check_recurrent

EMPTY = -1e30
"""The exponent of a weight of 0. Not −∞, so that it can be subtracted from itself."""


def elu_features(x: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """elu(x) + 1: x + 1 above zero, eˣ below; always positive.

    >>> elu_features(torch.tensor([-1.0, 0.0, 2.0])).round(decimals=3)
    tensor([0.3680, 1.0000, 3.0000])
    """
    return F.elu(x) + 1


def positive_features(x: Float[Tensor, "... K"], directions: Float[Tensor, "W K"]) -> Float[Tensor, "... W"]:
    """exp(ω·x − |x|²/2)/√W for every direction ω. Over ω ~ N(0, I), E[φ(q)·φ(k)] = exp(q·k).

    >>> positive_features(torch.ones((5, 2)), torch.ones((4, 2))).shape
    torch.Size([5, 4])
    """
    exponent = x @ directions.T - 0.5 * x.square().sum(-1, keepdim=True)
    return exponent.exp() / math.sqrt(len(directions))


def linear_attention(
    q: Float[Tensor, "... T W"],
    k: Float[Tensor, "... S W"],
    v: Float[Tensor, "... S U"],
    causal: bool = False,
) -> Float[Tensor, "... T U"]:
    """Σ_j (q·k_j) v_j / Σ_j q·k_j, where q and k are features already, and positive.

    causal: over the keys up to the query's own position; the last query reads the last key.

    >>> q, k, v = torch.ones((3, 4, 2))
    >>> linear_attention(q, k, v, causal=True).shape
    torch.Size([4, 2])
    """
    check_linear_attention(q, k, v)
    if not causal:
        return over_all_keys(q, k, v)
    queries, keys = q.shape[-2], k.shape[-2]
    lead = torch.broadcast_shapes(q.shape[:-2], k.shape[:-2], v.shape[:-2])
    q, k, v = (x.expand(*lead, *x.shape[-2:]).reshape(1, math.prod(lead), *x.shape[-2:]) for x in (q, k, v))
    if queries < keys:  # the first keys − queries keys are read by every query
        q = F.pad(q, (0, 0, keys - queries, 0))
    elif queries > keys:  # the first queries − keys queries read nothing
        k, v = (F.pad(x, (0, 0, queries - keys, 0)) for x in (k, v))
    mixed = over_keys_so_far(q, k, v)[0]
    return mixed[:, :, mixed.shape[2] - queries :].reshape(*lead, queries, v.shape[-1])


def gated_linear_attention(
    q: Float[Tensor, "... T K"],
    k: Float[Tensor, "... T K"],
    v: Float[Tensor, "... T U"],
    gate: Float[Tensor, "... T K"],
) -> Float[Tensor, "... T U"]:
    """out_t = S_tᵀ q_t with S_t = gate_t ∘ S_{t−1} + k_t v_tᵀ, starting from S = 0.

    gate = 1 is causal linear attention without the denominator, a constant gate per head is RetNet, a gate computed
    from the input is GLA (Yang et al. 2024).

    >>> x = torch.ones(1, 3, 1)
    >>> gated_linear_attention(x, x, x, gate=0.5 * x)[0, :, 0]           # 1, 1 + 1/2, 1 + 1/2 + 1/4
    tensor([1.0000, 1.5000, 1.7500])
    """
    check_recurrent(q, k, v, gate=gate)
    state, out = (k[..., :1, :, None] * v[..., :1, None, :]).sum(-3) * 0, []
    for t in range(q.shape[-2]):
        state = gate[..., t, :, None] * state + k[..., t, :, None] * v[..., t, None, :]
        out.append((q[..., t, None, :] @ state)[..., 0, :])
    return torch.stack(out, -2) if out else torch.zeros_like(v)


def delta_linear_attention(
    q: Float[Tensor, "... T K"],
    k: Float[Tensor, "... T K"],
    v: Float[Tensor, "... T U"],
    beta: Float[Tensor, "... T"],
) -> Float[Tensor, "... T U"]:
    """out_t = S_tᵀ q_t with S_t = S_{t−1} + beta_t · k_t (v_t − S_{t−1}ᵀ k_t)ᵀ, starting from S = 0: the delta rule.

    What is stored under a key is overwritten, not added to (DeltaNet; Schlag et al. 2021, Yang et al. 2024).

    >>> key, values = torch.ones(1, 2, 1), torch.tensor([[[5.0], [7.0]]])
    >>> delta_linear_attention(key, key, values, beta=torch.ones(1, 2))[0, :, 0]  # the second replaces the first
    tensor([5., 7.])
    """
    check_recurrent(q, k, v, beta=beta)
    state, out = (k[..., :1, :, None] * v[..., :1, None, :]).sum(-3) * 0, []
    for t in range(q.shape[-2]):
        key = k[..., t, :, None]
        error = v[..., t, None, :] - (state * key).sum(-2, keepdim=True)
        state = state + beta[..., t, None, None] * key * error
        out.append((q[..., t, None, :] @ state)[..., 0, :])
    return torch.stack(out, -2) if out else torch.zeros_like(v)


# --- Features that are numbers: elu + 1, or the vector itself ---


def over_all_keys(
    q: Float[Tensor, "... T W"], k: Float[Tensor, "... S W"], v: Float[Tensor, "... S U"], shares: bool = True
) -> Float[Tensor, "... T U"]:
    """Every query reads the same two sums, Σφ(k)·v and Σφ(k). Without `shares`, the first is returned."""
    both = q @ (k.mT @ with_ones(v))
    return divide(both) if shares else both[..., :-1]


def over_keys_so_far(
    q: Float[Tensor, "B H T W"],
    k: Float[Tensor, "B H T W"],
    v: Float[Tensor, "B H T U"],
    documents: Int[Tensor, "B T"] | None = None,
    start: Float[Tensor, "B H W U1"] | None = None,
    shares: bool = True,
) -> tuple[Float[Tensor, "B H T U"], Float[Tensor, "B H W U1"]]:
    """The outputs, and the sums Σφ(k)·[v 1] after the last token; `start` holds those before the first.

    Within a chunk every pair is compared; earlier chunks are read through their sums. Documents, if any, must stand one
    after the other in a row.
    """
    sums = v.new_zeros(*q.shape[:2], q.shape[3], v.shape[3] + 1) if start is None else start
    length, chunk = q.shape[2], min(CHUNK, q.shape[2])
    if 0 in v.shape[:3]:
        return v, sums
    more = -length % chunk
    beside = with_ones(v)
    if more:  # a copy, which whole chunks do not need
        q, k, beside = (F.pad(x, (0, 0, 0, more)) for x in (q, k, beside))
    q, k, beside = (x.unflatten(2, (-1, chunk)) for x in (q, k, beside))  # B H N C …
    if documents is not None:
        documents = F.pad(documents[:, None], (0, more), value=-1).unflatten(2, (-1, chunk))  # B 1 N C
    links = Links.of(q[..., 0], documents)
    added = k.mT @ (beside * links.adds.unsqueeze(-1))  # B H N W U1
    before = []
    for i, new in enumerate(added.unbind(2)):
        before.append(sums)
        sums = sums * links.stays[..., i, None, None] + new
    within = (q @ k.mT) * links.within
    both = within @ beside + (q @ torch.stack(before, 2)) * links.reads.unsqueeze(-1)
    mixed = divide(both) if shares else both[..., :-1]
    return mixed.flatten(2, 3)[:, :, :length], sums


@dataclass(frozen=True)
class Links:
    """Which keys reach which queries, chunk by chunk. Without documents: every key reaches all later queries."""

    within: Bool[Tensor, "*within C C"]  # True where a query reads a key of its own chunk
    reads: Bool[Tensor, "*reads #C"]  # True where a query reads the sums before its chunk
    adds: Bool[Tensor, "*adds #C"]  # True where a key is added to the sums after its chunk
    stays: Bool[Tensor, "*stays N"]  # True where the sums before a chunk stay in those after it

    @classmethod
    def of(cls, like: Float[Tensor, "B H N C"], document: Int[Tensor, "B 1 N C"] | None) -> Links:
        """The sums after a chunk are of the document that the chunk ends in."""
        _, _, count, size = like.shape
        within = torch.ones(size, size, dtype=torch.bool, device=like.device).tril()
        if document is None:
            return cls(within, within[0, :1], within[0, :1], within[0, :1].expand(count))
        last = document[..., -1:]
        reads = document == F.pad(last[:, :, :-1], (0, 0, 1, 0), value=-2)
        same = document.unsqueeze(-1) == document.unsqueeze(-2)
        return cls(within & same, reads, document == last, reads[..., -1])


# --- Features that are exponents: the Performer's ---


def favor_exponents(x: Float[Tensor, "B H T K"], directions: Float[Tensor, "W K"]) -> Float[Tensor, "B H T W"]:
    """log(√W·φ(x/√√K)) = ω·x/√√K − |x|²/(2√K): exponents of `positive_features`, which cannot overflow.

    The softmax of attention is of q·k/√K, so q and k are divided by √√K each.
    """
    root = x.shape[-1] ** -0.25
    return x @ (directions * root).T - 0.5 * (x * root).square().sum(-1, keepdim=True)


@dataclass(frozen=True)
class FavorSums:
    """What all keys so far add up to. Feature w is stored relative to its own largest exponent, so none underflows.

    N is absent, or the blocks of keys that are summed apart.
    """

    sums: Float[Tensor, "B H *N W U1"]  # Σ_j exp(k_jw − top_w)·[v_j 1]
    top: Float[Tensor, "B H *N W"]  # the largest k_jw of all keys j

    def read(self, q: Float[Tensor, "B H *C W"]) -> tuple[Float[Tensor, "B H *C U1"], Float[Tensor, "B H *C 1"]]:
        """Σ_w exp(q_w + top_w)·sums_w relative to the largest exponent of each query, and that exponent.

        For the feature of the largest exponent the sum has a key with exp(0) = 1, so the denominator is at least 1.
        """
        exponents = q + self.top.unsqueeze(-2)
        largest = exponents.amax(-1, keepdim=True).detach()
        return (exponents - largest).exp() @ self.sums, largest

    def add(self, other: FavorSums) -> FavorSums:
        """The sums over the keys of both."""
        top = torch.maximum(self.top, other.top)
        mine, theirs = ((each.top - top).exp().unsqueeze(-1) * each.sums for each in (self, other))
        return FavorSums(mine + theirs, top)

    @classmethod
    def of(cls, k: Float[Tensor, "B H *C W"], beside: Float[Tensor, "B H *C U1"]) -> FavorSums:
        """The sums over the keys of a block."""
        top = k.amax(-2).detach()  # it cancels between the sums and their readers, so no gradient flows through it
        return cls((k - top.unsqueeze(-2)).exp().mT @ beside, top)


def favor_over_all_keys(
    q: Float[Tensor, "B H T W"], k: Float[Tensor, "B H S W"], v: Float[Tensor, "B H S U"]
) -> Float[Tensor, "B H T U"]:
    """Σ_j φ(q)·φ(k_j)·v_j / Σ_j φ(q)·φ(k_j), from the exponents of φ. A key of exponents `EMPTY` counts as 0."""
    if 0 in q.shape or 0 in v.shape:
        return q.new_zeros(*q.shape[:-1], v.shape[-1])
    return divide(FavorSums.of(k, with_ones(v)).read(q)[0])


def favor_over_keys_so_far(
    q: Float[Tensor, "B H T W"],
    k: Float[Tensor, "B H T W"],
    v: Float[Tensor, "B H T U"],
    start: FavorSums,
) -> tuple[Float[Tensor, "B H T U"], FavorSums]:
    """Causal Performer attention: each query reads the keys up to its own. Also returns the sums after the last token.

    Earlier chunks are read through their sums. Within a chunk the keys that a query reads are cut into blocks that lie
    wholly in its past, so that no future key has a say in a block's stabiliser:

        keys      0 1 2 3 4 5 6 7
        query 6   ├─ 4 ─┤├2 ┤1     blocks of 4, 2 and 1 keys (the 1 is its own key)
    """
    if 0 in v.shape[:3]:
        return v, start
    length = q.shape[2]
    chunk = favor_chunk(length)
    more = -length % chunk
    beside = with_ones(v)
    if more:
        q, beside = F.pad(q, (0, 0, 0, more)), F.pad(beside, (0, 0, 0, more))
        k = F.pad(k, (0, 0, 0, more), value=EMPTY)
    q, k, beside = (x.unflatten(2, (-1, chunk)) for x in (q, k, beside))  # B H N C …
    exponents = q + k
    largest = exponents.amax(-1, keepdim=True).detach()
    both = (exponents - largest).exp().sum(-1, keepdim=True) * beside  # every query with its own key
    size = 1
    while size < chunk:
        # pairs of neighbouring blocks: the queries of the second read the keys of the first
        halves = [x.unflatten(3, (-1, 2, size)) for x in (q, k, beside, both, largest)]  # B H N M 2 size …
        read = read_block(halves[0][..., 1, :, :], halves[1][..., 0, :, :], halves[2][..., 0, :, :])
        second = merge(halves[3][..., 1, :, :], halves[4][..., 1, :, :], *read)
        both, largest = (
            torch.stack((old[..., 0, :, :], new), 4).flatten(3, 5) for old, new in zip(halves[3:], second, strict=True)
        )
        size *= 2
    blocks = FavorSums.of(k, beside)  # of each chunk
    now, before = start, []
    for sums, top in zip(blocks.sums.unbind(2), blocks.top.unbind(2), strict=True):
        before.append(now)
        now = now.add(FavorSums(sums, top))
    past = FavorSums(torch.stack([each.sums for each in before], 2), torch.stack([each.top for each in before], 2))
    both, _ = merge(both, largest, *past.read(q))
    return divide(both).flatten(2, 3)[:, :, :length], now


def read_block(
    q: Float[Tensor, "*lead C W"], k: Float[Tensor, "*lead C W"], beside: Float[Tensor, "*lead C U1"]
) -> tuple[Float[Tensor, "*lead C U1"], Float[Tensor, "*lead C 1"]]:
    """`FavorSums.of(k, beside).read(q)` by way of the weight of every pair, which is cheaper for a few keys."""
    top = k.amax(-2, keepdim=True).detach()
    exponents = q + top
    largest = exponents.amax(-1, keepdim=True).detach()
    return ((exponents - largest).exp() @ (k - top).exp().mT) @ beside, largest


def merge(
    a: Float[Tensor, "*lead U1"], a_top: Float[Tensor, "*lead 1"], b: Float[Tensor, "*lead U1"], b_top: Tensor
) -> tuple[Float[Tensor, "*lead U1"], Float[Tensor, "*lead 1"]]:
    """a·exp(a_top) + b·exp(b_top), relative to the larger exponent, and that exponent."""
    top = torch.maximum(a_top, b_top)
    return a * (a_top - top).exp() + b * (b_top - top).exp(), top


def log_products(q: Float[Tensor, "B H T W"], k: Float[Tensor, "B H S W"]) -> Float[Tensor, "B H T S"]:
    """log Σ_w exp(q_w + k_w) of every pair, some keys at a time, so that memory stays bounded."""
    if 0 in q.shape or 0 in k.shape:
        return q.new_zeros(*q.shape[:-1], k.shape[-2])
    some = max(1, 2**23 // q.numel())
    return torch.cat([torch.logsumexp(q.unsqueeze(-2) + part.unsqueeze(-3), -1) for part in k.split(some, -2)], -1)


def no_favor_sums(q: Float[Tensor, "B H T W"], v: Float[Tensor, "B H T U"]) -> FavorSums:
    """The sums before the first key."""
    batch, heads, _, width = q.shape
    return FavorSums(v.new_zeros(batch, heads, width, v.shape[-1] + 1), v.new_full((batch, heads, width), EMPTY))


def with_ones(v: Float[Tensor, "... S U"]) -> Float[Tensor, "... S U1"]:
    """The values with a column of ones: what the weights do to it is the denominator."""
    return torch.cat((v, v.new_ones(*v.shape[:-1], 1)), dim=-1)


def divide(both: Float[Tensor, "... T U1"]) -> Float[Tensor, "... T U"]:
    """The numerator divided by the last column, the denominator; 0 where nothing was read."""
    total = both[..., -1:]
    return both[..., :-1] / torch.where(total == 0, 1, total)
