"""Multi-head, grouped-query and multi-query attention: one module, told apart by `kv_heads`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.configs import AttentionConfig, Mask
from clearhead.configs.masks import check_causal
from clearhead.functional.attention import attention_scores, attention_weights, drop
from clearhead.functional.blocked import TileBias, attention_by_tiles
from clearhead.precision.matrix import Linear, linear

from .build import build_part, builds
from .cache import KVState, Room, SourceState
from .context import Context

FEW = 8  # queries, as many as beams


@builds(AttentionConfig)
class MultiHeadAttention(nn.Module):
    """x -> q, k, v by one matrix -> heads -> softmax(qkᵀ/√K)·v -> heads side by side -> out.

    Cross-attention is the same module with a source in its context: the key and value rows of the matrix read it.
    """

    def __init__(self, config: AttentionConfig, dim: int) -> None:
        super().__init__()
        key, value = config.widths(dim)
        self.heads, self.groups = config.heads, config.groups
        self.rows = (self.heads * key, self.groups * key, self.groups * value)  # of queries, keys and values
        self.widths = (key, value)
        self.mask, self.dropout = config.mask, config.dropout
        self.ring = config.ring
        self.fused = {"qkv": self.rows}  # rows of the matrices that lie under each other in one
        self.qkv = Linear(dim, sum(self.rows), bias=config.qkv_bias)
        self.query_norm = build_part(config.qk_norm, key)
        self.key_norm = build_part(config.qk_norm, key)
        self.rotary = None if config.rotary is None else build_part(config.rotary, key)
        self.score_bias = None if config.score_bias is None else build_part(config.score_bias, self.heads)
        self.out = Linear(self.heads * value, dim, bias=config.out_bias)

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: KVState | SourceState | None = None
    ) -> Float[Tensor, "B T D"]:
        q, k, v = self.project(x, context, state)
        q = context.tap("query_norm", self.query_norm(context.tap("query", q)))
        if not isinstance(state, SourceState):
            k = self.key_norm(context.tap("key", k))
        k = context.tap("key_norm", k)
        v = context.tap("value", v)
        readers = [(q, self.mask)]
        if self.rotary is not None:
            readers = self.rotary.readers(q, self.mask, context)
            k = context.tap("key_turned", self.rotary.keys(k, context))
        if isinstance(state, KVState):
            k, v, context = state.append(k, v, context)
        dropout = self.dropout if self.training else 0.0
        shared = state.shared if isinstance(state, SourceState) else 1
        if shared > 1:  # rows that read one source are queries of one row
            readers = [(together(q, shared), mask) for q, mask in readers]
        mixed = attend(readers, k, v, context, score_bias=self.score_bias, dropout=dropout)
        mixed = context.tap("mixed", mixed if shared == 1 else apart(mixed, shared))
        return context.tap("out", self.out(context.tap("concat", merge_heads(mixed))))

    def project(
        self, x: Float[Tensor, "B T D"], context: Context, state: KVState | SourceState | None
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "N G S K"], Float[Tensor, "N G S U"]]:
        """Queries of x; keys and values of x too, or of the source, or those that a state has kept of the source, of
        which N may be fewer than rows."""
        (key, value), (queries, *_) = self.widths, self.rows
        read = state if isinstance(state, SourceState) else None
        if context.source is not None and read is None:
            read = self.read(context.source)
        if read is None:
            q, k, v = context.tap("qkv", self.qkv(x)).split(self.rows, dim=-1)
            return split_heads(q, key), split_heads(k, key), split_heads(v, value)
        q = linear(x, self.qkv.weight[:queries], None if self.qkv.bias is None else self.qkv.bias[:queries])
        return split_heads(q, key), read.key, read.value

    def read(self, source: Float[Tensor, "B S D"]) -> SourceState:
        """The source's keys and values, which do not change while a target is decoded."""
        (key, value), (queries, keys, _) = self.widths, self.rows
        kv = linear(source, self.qkv.weight[queries:], None if self.qkv.bias is None else self.qkv.bias[queries:])
        k, v = split_heads(kv[..., :keys], key), split_heads(kv[..., keys:], value)
        return SourceState(k.contiguous(), v.contiguous())  # they are read over and over

    def remember(self, source: Float[Tensor, "B S D"]) -> SourceState:
        """The same for a state, the keys normed already."""
        read = self.read(source)
        return replace(read, key=self.key_norm(read.key))

    def init_state(self, room: Room) -> KVState:
        check_causal(self.mask)
        slots = room.slots_for(self.ring)
        (key, value), size = self.widths, slots.at.shape[1]
        return KVState(slots, room.buffer(self.groups, size, key), room.buffer(self.groups, size, value))


def together(q: Float[Tensor, "B H T K"], rows: int) -> Float[Tensor, "N H RT K"]:
    """So many rows in a row as one."""
    return q.unflatten(0, (-1, rows)).transpose(1, 2).flatten(2, 3)


def apart(mixed: Float[Tensor, "N H RT U"], rows: int) -> Float[Tensor, "B H T U"]:
    return mixed.unflatten(2, (rows, -1)).transpose(1, 2).flatten(0, 1)


Readers = Sequence[tuple[Float[Tensor, "B H T K"], Mask]]
"""Queries, and which keys they may read. Several kinds of them read different keys in one softmax."""
ScoreBias = Callable[[Context, torch.dtype], Float[Tensor, "#B H T S"]]


def attend(
    readers: Readers,
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    context: Context,
    *,
    score_bias: ScoreBias | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T U"]:
    """softmax(scale·qkᵀ + bias)·v where the mask allows, by the cheapest kernel that the mask and the watchers permit.

    Who only reads scores or weights has them computed beside the kernel; who replaces them takes the written-out path.
    """
    for look in context.looks():
        look(looked_at(readers, k, v, context, score_bias, scale))
    if context.aligned and not torch.compiler.is_exporting():  # an exported model reads texts of any length
        readers = [(q, mask.within(k.shape[2])) for q, mask in readers]
    if not context.fused or context.replaces("scores", "weights"):
        return written_out_attention(readers, k, v, context, score_bias, scale, dropout)
    if context.reads("scores", "weights"):
        written_out_attention(readers, k, v, context, score_bias, scale, dropout=0.0)  # for the taps alone
    (q, mask), *others = readers
    if not others and score_bias is None and (context.plainly_causal(mask) or context.plainly_full(mask)):
        return fused_attention(q, k, v, None, context.plainly_causal(mask), None, scale, dropout)
    plans = context.tiles(tuple(mask for _, mask in readers))
    if plans is not None:
        bias = None if score_bias is None else tile_bias(score_bias, context, q.dtype)
        return attention_by_tiles([q for q, _ in readers], k, v, plans, scale=scale, dropout=dropout, bias=bias)
    if others:
        return written_out_attention(readers, k, v, context, score_bias, scale, dropout)
    added = None if score_bias is None else score_bias(context, q.dtype)
    return fused_attention(q, k, v, context.allowed(mask), False, added, scale, dropout)


def tile_bias(score_bias: ScoreBias, context: Context, dtype: torch.dtype) -> TileBias:
    """What is added to the scores of one tile of one row of the batch."""
    return lambda row, tile: score_bias(context.tile(row, tile), dtype)[0]


def of_all(readers: Readers) -> Mask:
    """What any kind of query may read."""
    return reduce(or_, (mask for _, mask in readers))


Rows = slice | list[int]


@dataclass(frozen=True)
class Looked:
    """What somebody who looks at a layer is handed: its queries and keys, and who may read whom."""

    q: Float[Tensor, "B H T K"]
    k: Float[Tensor, "B G S K"]
    mask: Mask
    context: Context

    def weights(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        """What these queries read, in O(heads × rows × keys) memory; `keys` may leave out those that none may read."""
        raise NotImplementedError(f"{type(self).__name__} has no weights")

    def of(self, heads: list[int]) -> Looked:
        """Only these heads, and nothing that holds on to the rest of the pass."""
        lean = replace(self, context=replace(self.context, source=None, cross=None, taps=None, memo={}))
        return lean if heads == list(range(self.q.shape[1])) else lean.only(heads)

    def only(self, heads: list[int]) -> Looked:
        return replace(self, q=self.q[:, heads], k=self.k[:, self.groups(heads)])

    def groups(self, heads: list[int]) -> list[int]:
        """The key head that each of these query heads reads."""
        return [head // (self.q.shape[1] // self.k.shape[1]) for head in heads]

    def allowed(self, rows: Rows) -> Bool[Tensor, "#B 1 Rows S"] | None:
        return self.context.allowed_rows(self.mask, rows)

    def reach(self, rows: Rows) -> int:
        """How many keys, from the first, these queries read at most."""
        allowed = self.allowed(rows)
        if allowed is None:
            return self.k.shape[2]
        found = allowed.any(dim=-2).nonzero()
        return int(found[:, -1].max()) + 1 if len(found) else 1


@dataclass(frozen=True)
class Attending(Looked):
    """What one attention reads, and by what rule: enough to write out any of its rows beside the kernel."""

    v: Float[Tensor, "B G S U"]
    score_bias: ScoreBias | None
    scale: float | None

    def scores(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        """scale·qkᵀ + bias of some heads and queries over the first so many keys, what the mask hides included."""
        group = self.groups(list(range(self.q.shape[1]))[heads])
        bias = bias_of_rows(self.score_bias, self, heads, rows, keys)
        return attention_scores(self.q[:, heads, rows], self.k[:, group, :keys], bias, self.scale)

    def weights(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        allowed = self.allowed(rows)
        return attention_weights(self.scores(heads, rows, keys), None if allowed is None else allowed[..., :keys])

    def only(self, heads: list[int]) -> Attending:
        bias, groups = bias_of_heads(self.score_bias, heads), self.groups(heads)
        return replace(self, q=self.q[:, heads], k=self.k[:, groups], v=self.v[:, groups], score_bias=bias)


@dataclass(frozen=True)
class AttendingKinds(Looked):
    """The same of several kinds of queries: q is the first of them, `mask` what any of them may read."""

    others: Readers
    score_bias: ScoreBias | None
    scale: float | None

    def weights(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        k = self.k[:, self.groups(list(range(self.q.shape[1]))[heads]), :keys]
        scores = attention_scores(self.q[:, heads, rows], k, None, self.scale)
        for q, mask in self.others:
            allowed = self.context.allowed_rows(mask, rows)
            kind = attention_scores(q[:, heads, rows], k, None, self.scale)
            scores = kind if allowed is None else torch.where(allowed[..., :keys], kind, scores)
        bias = bias_of_rows(self.score_bias, self, heads, rows, keys)
        scores = scores if bias is None else scores + bias
        allowed = self.allowed(rows)
        return attention_weights(scores, None if allowed is None else allowed[..., :keys])

    def only(self, heads: list[int]) -> AttendingKinds:
        bias, others = bias_of_heads(self.score_bias, heads), [(q[:, heads], mask) for q, mask in self.others]
        return replace(self, q=self.q[:, heads], k=self.k[:, self.groups(heads)], others=others, score_bias=bias)


def bias_of_rows(
    score_bias: ScoreBias | None, looked: Looked, heads: slice, rows: Rows, keys: int | None
) -> Float[Tensor, "#B Heads Rows Keys"] | None:
    """What is added to the scores of some queries, made for them alone."""
    if score_bias is None:
        return None
    at = looked.context
    return score_bias(Context(at.positions[:, rows], at.key_positions[:, :keys]), looked.q.dtype)[:, heads]


def bias_of_heads(score_bias: ScoreBias | None, heads: list[int]) -> ScoreBias | None:
    return None if score_bias is None else lambda context, dtype: score_bias(context, dtype)[:, heads]


def looked_at(
    readers: Readers,
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    context: Context,
    score_bias: ScoreBias | None,
    scale: float | None,
) -> Looked:
    """What somebody who looks is handed."""
    (q, mask), *others = readers
    if others:
        return AttendingKinds(q, k, of_all(readers), context, others, score_bias, scale)
    return Attending(q, k, mask, context, v, score_bias, scale)


def written_out_attention(
    readers: Readers,
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    context: Context,
    score_bias: ScoreBias | None,
    scale: float | None,
    dropout: float,
) -> Float[Tensor, "B H T U"]:
    """Every intermediate exists and is tapped. The R query heads of a group broadcast against its one key head."""
    groups = (k.shape[1], -1)

    def products(q: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T S"]:
        return attention_scores(q.unflatten(1, groups), k.unsqueeze(2), None, scale).flatten(1, 2)

    (q, _), *others = readers
    scores = products(q)
    for kind, mask in others:
        allowed = context.allowed(mask)
        scores = products(kind) if allowed is None else torch.where(allowed, products(kind), scores)
    if score_bias is not None:
        scores = scores + score_bias(context, q.dtype)
    scores = context.tap("scores", scores)
    weights = context.tap("weights", attention_weights(scores, context.allowed(of_all(readers))))  # B H T S
    kept = drop(weights, dropout).unflatten(1, groups)
    return (kept @ v.unsqueeze(2).to(kept.dtype)).flatten(1, 2).to(v.dtype)


def fused_attention(
    q: Float[Tensor, "B H T K"],
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    allowed: Bool[Tensor, "#B 1 T S"] | None,
    causal: bool,
    bias: Float[Tensor, "#B H T S"] | None,
    scale: float | None,
    dropout: float,
) -> Float[Tensor, "B H T U"]:
    """One call of torch's kernel. The key heads of a group are read where they lie, never copied R times."""
    (batch, heads, length, key), (groups, value) = q.shape, (v.shape[1], v.shape[3])
    repeats = heads // groups
    if k.shape[2] == 0 or batch == 0 or length == 0:
        return q.new_zeros(batch, heads, length, value)
    scale = key**-0.5 if scale is None else scale
    extra: Tensor | None = allowed
    if bias is not None:
        extra = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
    if key != value:  # the kernel wants one width; zeros change neither scores nor mixture
        width = max(key, value)
        q, k, v = F.pad(q, (0, width - key)), F.pad(k, (0, width - key)), F.pad(v, (0, width - value))
    if repeats == 1:
        mixed = sdpa(q, k, v, extra, causal, scale, dropout)
    elif length == 1:
        # decoding: the R heads of a group are R rows of queries              B G R K
        extra = None if extra is None else extra.expand(-1, heads, -1, -1).reshape(-1, groups, repeats, k.shape[2])
        mixed = sdpa(q.unflatten(1, (groups, repeats)).squeeze(3), k, v, extra, False, scale, dropout)
        mixed = mixed.flatten(1, 2).unsqueeze(2)
    else:
        # a group is a row of the batch, its keys seen R times through a stride of 0    B·G R T K
        q = q.unflatten(1, (groups, repeats)).flatten(0, 1)
        k, v = (x.flatten(0, 1).unsqueeze(1).expand(-1, repeats, -1, -1) for x in (k, v))
        if extra is not None:
            extra = extra.expand(batch, heads, -1, -1).unflatten(1, (groups, repeats)).flatten(0, 1)
        mixed = sdpa(q, k, v, extra, causal, scale, dropout).unflatten(0, (batch, groups)).flatten(1, 2)
    return mixed[..., :value]


def sdpa(q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, causal: bool, scale: float, dropout: float) -> Tensor:
    plain = not (causal or dropout or torch.is_grad_enabled()) and q.device.type == "cpu" and q.dtype == torch.float32
    if plain and q.shape[2] <= FEW:
        return few_queries(q, k, v, extra, scale)
    return F.scaled_dot_product_attention(q, k, v, extra, dropout, causal, scale=scale)


def few_queries(q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, scale: float) -> Tensor:
    """Two products and what is between them, which on a CPU is quicker than torch's kernel where there are few scores.
    A query that may read nothing gets zeros."""
    scores = (q @ k.mT).mul_(scale)
    if extra is not None:
        scores = scores.masked_fill_(~extra, -torch.inf) if extra.dtype == torch.bool else scores.add_(extra)
    limits = torch.finfo(scores.dtype)
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True).clamp_min_(limits.min)).exp_()
    return (weights @ v).div_(weights.sum(dim=-1, keepdim=True).clamp_min_(limits.tiny))


def split_heads(x: Float[Tensor, "B T HK"], width: int) -> Float[Tensor, "B H T K"]:
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "B H T U"]) -> Float[Tensor, "B T HU"]:
    return x.transpose(1, 2).flatten(2)
