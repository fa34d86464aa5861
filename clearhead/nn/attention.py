"""Multi-head, grouped-query and multi-query attention in one module. They differ only in `kv_heads`.

The file in reading order: the module, then `attend`, which chooses one of the paths below, then the paths.
`attention_view.py` shows what attention reads, without changing the result.

    x B T D ── qkv ──┬── q B H T K ── norm ── rotate ───────────────────┐
                     ├── k B G S K ── norm ── rotate ── cache ── scores ─┴── softmax ── ∘ v ── out B T D
                     └── v B G S U ──────────────────── cache ───────────────────────────┘
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from clearhead.configs import AttentionConfig, HeadwiseNormConfig, ProjectionNormConfig, SinksConfig
from clearhead.configs.masks import check_causal
from clearhead.functional.attention import attention_scores, attention_weights, drop, fused_sdpa
from clearhead.functional.blocked import TileBias, attention_by_tiles
from clearhead.precision.matrix import Linear, linear

from .attention_view import MaskedQueries, ScoreBias, attention_view, union_of_masks
from .build import build_part, builds
from .cache import CrossCache, KVCache, StateAllocator
from .context import Context

FEW_QUERIES = 8
"""Up to this many queries (one token of up to 8 beams), two plain products beat torch's kernel on a CPU."""


@builds(AttentionConfig)
class MultiHeadAttention(nn.Module):
    """x -> q, k, v by one matrix -> heads -> softmax(qkᵀ/√K)·v -> heads side by side -> out.

    x  B T D      q  B H T K      k  B G S K      v  B G S U      out  B T D

    G = H is multi-head, G = 1 multi-query, anything between grouped-query attention: H/G query heads share a key head.
    For cross-attention the context holds a source: keys and values are projected from it, queries from x.

    One matrix for q, k and v is one large product instead of three small ones. `fused` tells loaders and LoRA where the
    three are inside it. Dropout acts on the weights, in training only.
    """

    def __init__(self, config: AttentionConfig, dim: int) -> None:
        super().__init__()
        key, value = config.widths(dim)
        self.heads, self.groups = config.heads, config.groups
        # Rows of the matrix for queries, keys and values.
        self.rows = (self.heads * key, self.groups * key, self.groups * value)
        self.widths = (key, value)
        self.mask, self.dropout = config.mask, config.dropout
        self.ring = config.ring
        self.fused = {"qkv": self.rows}  # matrices stored as one: their rows, for loaders and LoRA
        self.qkv = Linear(dim, sum(self.rows), bias=config.qkv_bias)
        joint = isinstance(config.qk_norm, ProjectionNormConfig | HeadwiseNormConfig)
        self.query_norm = build_part(config.qk_norm, self.heads * key if joint else key)
        self.key_norm = build_part(config.qk_norm, self.groups * key if joint else key)
        self.scale, self.softcap, self.clip = config.scale, config.softcap, config.qkv_clip
        self.sinks = None if config.sinks is None else build_part(config.sinks, self.heads)
        self.rotary = None if config.rotary is None else build_part(config.rotary, key)
        self.score_bias = None if config.score_bias is None else build_part(config.score_bias, self.heads)
        self.out = Linear(self.heads * value, dim, bias=config.out_bias)

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: KVCache | CrossCache | None = None
    ) -> Float[Tensor, "B T D"]:
        """The layer's output, B T D.

        x        B T D: projected to queries and, if there is no source, to keys and values
        context  positions, padding, documents; for cross-attention also the source
        state    None: read x alone. `KVCache`: append the new keys, and read all. `CrossCache`: read a source that
                 was projected before
        """
        q, k, v = self.project(x, context, state)
        q = context.tap("query_norm", self.query_norm(context.tap("query", q)))
        if not isinstance(state, CrossCache):
            k = self.key_norm(context.tap("key", k))
        k = context.tap("key_norm", k)
        v = context.tap("value", v)
        queries = [(q, self.mask)]
        if self.rotary is not None:
            queries = self.rotary.queries(q, self.mask, context)
            k = context.tap("key_rotated", self.rotary.keys(k, context))
        if isinstance(state, KVCache):
            k, v, context = state.append(k, v, context)
        score_bias = context.score_bias if self.score_bias is None and context.source is None else self.score_bias
        sinks = None if self.sinks is None else context.tap("sinks", self.sinks())
        dropout = self.dropout if self.training else 0.0
        shared = state.shared if isinstance(state, CrossCache) else 1
        if shared > 1:
            queries = [(fold_rows(q, shared), mask) for q, mask in queries]
        mixed = attend(
            queries,
            k,
            v,
            context,
            score_bias=score_bias,
            scale=self.scale,
            softcap=self.softcap,
            sinks=sinks,
            dropout=dropout,
        )
        mixed = context.tap("mixed", mixed if shared == 1 else unfold_rows(mixed, shared))
        return context.tap("out", self.out(context.tap("concat", merge_heads(mixed))))

    def project(
        self, x: Float[Tensor, "B T D"], context: Context, state: KVCache | CrossCache | None
    ) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "N G S K"], Float[Tensor, "N G S U"]]:
        """Queries of x, and keys and values of x, of the context's source, or of a source cached earlier.

        A cache may hold fewer rows (N) than the batch: beams share one source.
        """
        (key, value), (queries, *_) = self.widths, self.rows
        source = state if isinstance(state, CrossCache) else None
        if context.source is not None and source is None:
            source = self.project_source(context.source)
        if source is None:
            q, k, v = context.tap("qkv", clip(self.qkv(x), self.clip)).split(self.rows, dim=-1)
            return split_heads(q, key), split_heads(k, key), split_heads(v, value)
        q = linear(x, self.qkv.weight[:queries], None if self.qkv.bias is None else self.qkv.bias[:queries])
        return split_heads(clip(q, self.clip), key), source.key, source.value

    def project_source(self, source: Float[Tensor, "B S D"]) -> CrossCache:
        """Keys and values of a source, before the key norm."""
        (key, value), (queries, keys, _) = self.widths, self.rows
        kv = linear(source, self.qkv.weight[queries:], None if self.qkv.bias is None else self.qkv.bias[queries:])
        kv = clip(kv, self.clip)
        k, v = split_heads(kv[..., :keys], key), split_heads(kv[..., keys:], value)
        return CrossCache(k.contiguous(), v.contiguous())  # every decoding step reads them

    def cache_source(self, source: Float[Tensor, "B S D"]) -> CrossCache:
        """Keys and values of a source for a whole decode, key norm included."""
        cache = self.project_source(source)
        return replace(cache, key=self.key_norm(cache.key))

    def init_state(self, allocator: StateAllocator) -> KVCache:
        """A KV cache for every position, or a ring for the last `reach` if the mask is a sliding window.

        Raise if the mask is not causal: the keys of later tokens are not in the cache yet.
        """
        check_causal(self.mask)
        slots = allocator.slots_for(self.ring)
        (key, value), size = self.widths, slots.positions.shape[1]
        return KVCache(slots, allocator.buffer(self.groups, size, key), allocator.buffer(self.groups, size, value))


@builds(SinksConfig)
class Sinks(nn.Module):
    """Attention sinks: one learned score per head joins the softmax, but has no value to read (gpt-oss)."""

    def __init__(self, config: SinksConfig, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads))

    def forward(self) -> Float[Tensor, "H"]:
        """A copy of the scores: taps read values, not parameters."""
        return self.weight.clone()


def clip(x: Tensor, limit: float | None) -> Tensor:
    """x clamped to ±limit; unchanged if the limit is None."""
    return x if limit is None else x.clamp(-limit, limit)


def fold_rows(q: Float[Tensor, "B H T K"], rows: int) -> Float[Tensor, "N H RT K"]:
    """Fold `rows` consecutive rows into one row's query axis: beams that share a source become queries of one row.

    4 beams of one sentence read the same source keys. As 4 rows they would need 4 copies of them; as 4 queries of one
    row they need one, and the product is larger and so faster.
    """
    return q.unflatten(0, (-1, rows)).transpose(1, 2).flatten(2, 3)


def unfold_rows(mixed: Float[Tensor, "N H RT U"], rows: int) -> Float[Tensor, "B H T U"]:
    """Undo `fold_rows`."""
    return mixed.unflatten(2, (rows, -1)).transpose(1, 2).flatten(0, 1)


def attend(
    queries: MaskedQueries,
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    context: Context,
    *,
    score_bias: ScoreBias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
    dropout: float = 0.0,
) -> Float[Tensor, "B H T U"]:
    """softmax(scale·qkᵀ + bias)·v over the keys that the mask allows, by the cheapest path that gives that result.

    written out   plain operations: `fused=False`, a softcap, sinks, or a tap that replaces scores or weights
    fused         torch's kernel: no mask, a causal mask, or a boolean table of all pairs
    tiles         only the tiles of the scores that the mask does not hide: sparse masks over long texts

    If a tap only reads scores or weights, they are computed in addition to the fused kernel. The result is the same.
    """
    for view in context.viewers():
        view(attention_view(queries, k, v, context, score_bias, scale, softcap, sinks))
    if context.aligned and not torch.compiler.is_exporting():  # an exported model reads texts of any length
        queries = [(q, mask.within(k.shape[2])) for q, mask in queries]
    plain = partial(
        written_out_attention, queries, k, v, context, score_bias=score_bias, scale=scale, softcap=softcap, sinks=sinks
    )
    if not context.fused or softcap is not None or sinks is not None or context.replaces("scores", "weights"):
        return plain(dropout=dropout)
    if context.reads("scores", "weights"):
        plain(dropout=0.0)  # only for the taps
    (q, mask), *others = queries
    if not others and score_bias is None and (context.is_causal(mask) or context.is_full(mask)):
        return fused_attention(q, k, v, None, context.is_causal(mask), None, scale, dropout)
    plans = context.tiles(tuple(mask for _, mask in queries))
    learned = score_bias is not None and score_bias is context.score_bias and torch.is_grad_enabled()
    if plans is not None and not learned:  # tiles compute no gradient for the bias
        bias = None if score_bias is None else tile_bias(score_bias, context, q.dtype)
        return attention_by_tiles([q for q, _ in queries], k, v, plans, scale=scale, dropout=dropout, bias=bias)
    if others:
        return plain(dropout=dropout)
    added = None if score_bias is None else score_bias(context, q.dtype)
    return fused_attention(q, k, v, context.attention_mask(mask), False, added, scale, dropout)


def tile_bias(score_bias: ScoreBias, context: Context, dtype: torch.dtype) -> TileBias:
    """The score bias of one tile of one row of the batch."""
    return lambda row, tile: score_bias(context.tile(row, tile), dtype)[0]


def written_out_attention(
    queries: MaskedQueries,
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    context: Context,
    *,
    score_bias: ScoreBias | None,
    scale: float | None,
    softcap: float | None,
    sinks: Float[Tensor, "H"] | None,
    dropout: float,
) -> Float[Tensor, "B H T U"]:
    """Attention in plain operations, so that scores and weights exist and can be tapped.

    The R = H/G query heads of a group broadcast against its one key head.
    """
    groups = (k.shape[1], -1)

    def products(q: Float[Tensor, "B H T K"]) -> Float[Tensor, "B H T S"]:
        return attention_scores(q.unflatten(1, groups), k.unsqueeze(2), None, scale, softcap).flatten(1, 2)

    (q, _), *others = queries
    scores = products(q)
    for kind, mask in others:
        allowed = context.attention_mask(mask)
        scores = products(kind) if allowed is None else torch.where(allowed, products(kind), scores)
    if score_bias is not None:
        scores = scores + score_bias(context, q.dtype)
    scores = context.tap("scores", scores)
    column = None if sinks is None else sinks[:, None, None]
    weights = attention_weights(scores, context.attention_mask(union_of_masks(queries)), sinks=column)
    weights = context.tap("weights", weights)  # B H T S
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
    """Call torch's fused kernel. A key head is not copied for the R query heads that share it.

    The kernel needs as many key heads as query heads, and keys as wide as values. Views give it the heads: the heads
    of a group become rows of queries (decoding) or rows of the batch (a prompt). The narrower of keys and values is
    padded with zeros, which add nothing to a dot product.
    """
    (batch, heads, length, key), (groups, value) = q.shape, (v.shape[1], v.shape[3])
    repeats = heads // groups
    if k.shape[2] == 0 or batch == 0 or length == 0:
        return q.new_zeros(batch, heads, length, value)
    scale = key**-0.5 if scale is None else scale
    extra: Tensor | None = allowed
    if bias is not None:
        extra = bias if allowed is None else torch.where(allowed, bias, -torch.inf)
    if key != value:  # the kernel needs one width; zeros change neither scores nor results
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
    """torch's kernel, or plain products if there are so few queries that they are faster."""
    plain = not (causal or dropout or torch.is_grad_enabled()) and q.device.type == "cpu" and q.dtype == torch.float32
    if plain and q.shape[2] <= FEW_QUERIES:
        return few_queries(q, k, v, extra, scale)
    return fused_sdpa(q, k, v, extra, causal, scale, dropout)


def few_queries(q: Tensor, k: Tensor, v: Tensor, extra: Tensor | None, scale: float) -> Tensor:
    """softmax(scale·qkᵀ)·v in place. On a CPU this is faster than torch's kernel for a few queries.

    A query whose keys are all masked gets zeros: its maximum (−∞) and its denominator (0) are clamped.
    """
    scores = (q @ k.mT).mul_(scale)
    if extra is not None:
        scores = scores.masked_fill_(~extra, -torch.inf) if extra.dtype == torch.bool else scores.add_(extra)
    limits = torch.finfo(scores.dtype)
    weights = scores.sub_(scores.amax(dim=-1, keepdim=True).clamp_min_(limits.min)).exp_()
    return (weights @ v).div_(weights.sum(dim=-1, keepdim=True).clamp_min_(limits.tiny))


def split_heads(x: Float[Tensor, "B T HK"], width: int) -> Float[Tensor, "B H T K"]:
    """[B, T, H·K] -> [B, H, T, K]."""
    return x.unflatten(-1, (-1, width)).transpose(1, 2)


def merge_heads(x: Float[Tensor, "B H T U"]) -> Float[Tensor, "B T HU"]:
    """[B, H, T, U] -> [B, T, H·U]: undo `split_heads`."""
    return x.transpose(1, 2).flatten(2)
