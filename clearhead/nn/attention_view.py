"""Attention maps on request: scores and weights of chosen heads and queries, computed beside the fused kernel.

The whole map of one layer is `B H T S` numbers: at 8,192 tokens and 32 heads, 8 GB in float32. A callback given as
`Taps(on_attention={"stack.blocks.3.mixer": look})` therefore gets an `AttentionView`: the layer's queries and keys and
the rule by which they meet. The view computes only the rows you ask for, and the forward pass itself is unchanged.

    def look(view: AttentionView) -> None:
        print(view.weights(heads=slice(0, 1), rows=[-1]))    # B 1 1 S: what the last token reads in head 0
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import or_

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from clearhead.configs import Mask
from clearhead.functional.attention import attention_scores, attention_weights

from .context import Context

Rows = slice | list[int]
"""Some queries, by number."""
MaskedQueries = Sequence[tuple[Float[Tensor, "B H T K"], Mask]]
"""Queries with the mask of the keys they read. Usually one pair. Dual chunk attention has three: each token's query is
rotated in three ways, each of which reads other keys, all in one softmax."""
ScoreBias = Callable[[Context, torch.dtype], Float[Tensor, "#B H T S"]]
"""What is added to the scores before the softmax, such as ALiBi."""


@dataclass(frozen=True)
class AttentionView:
    """The queries and keys of one layer and who may read whom. Subclasses know how to turn them into weights.

    It holds references to tensors of the pass, not copies. It costs nothing until a method is called.
    """

    q: Float[Tensor, "B H T K"]
    k: Float[Tensor, "B G S K"]
    mask: Mask
    context: Context

    def weights(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        """The attention weights of these heads and queries, over the first `keys` keys (default: all).

        Takes O(heads × rows × keys) memory. `reach` says how many keys are enough.
        """
        raise NotImplementedError(f"{type(self).__name__} has no weights")

    def for_heads(self, heads: list[int]) -> AttentionView:
        """The same view of these heads only, holding no reference to the rest of the forward pass."""
        lean = replace(self, context=replace(self.context, source=None, cross=None, taps=None, memo={}))
        return lean if heads == list(range(self.q.shape[1])) else lean.select_heads(heads)

    def select_heads(self, heads: list[int]) -> AttentionView:
        return replace(self, q=self.q[:, heads], k=self.k[:, self.groups(heads)])

    def groups(self, heads: list[int]) -> list[int]:
        """The key/value head that each of these query heads reads: H/G query heads share one."""
        return [head // (self.q.shape[1] // self.k.shape[1]) for head in heads]

    def attention_mask(self, rows: Rows) -> Bool[Tensor, "#B 1 Rows S"] | None:
        """True where a query may read a key; None if every query may read every key."""
        return self.context.attention_mask_rows(self.mask, rows)

    def reach(self, rows: Rows) -> int:
        """How many keys to compute, counted from the first: no query of `rows` may read a later one."""
        allowed = self.attention_mask(rows)
        if allowed is None:
            return self.k.shape[2]
        found = allowed.any(dim=-2).nonzero()
        return int(found[:, -1].max()) + 1 if len(found) else 1


@dataclass(frozen=True)
class SoftmaxView(AttentionView):
    """softmax(scale·qkᵀ + bias) over the allowed keys: multi-head, grouped-query and latent attention."""

    v: Float[Tensor, "B G S U"]
    score_bias: ScoreBias | None
    scale: float | None
    softcap: float | None = None
    sinks: Float[Tensor, "H"] | None = None

    def scores(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        """scale·qkᵀ + bias before the mask is applied."""
        group = self.groups(list(range(self.q.shape[1]))[heads])
        bias = bias_of_rows(self.score_bias, self, heads, rows, keys)
        return attention_scores(self.q[:, heads, rows], self.k[:, group, :keys], bias, self.scale, self.softcap)

    def weights(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        allowed = self.attention_mask(rows)
        sinks = None if self.sinks is None else self.sinks[heads, None, None]
        scores = self.scores(heads, rows, keys)
        return attention_weights(scores, None if allowed is None else allowed[..., :keys], sinks=sinks)

    def select_heads(self, heads: list[int]) -> SoftmaxView:
        """The view of some query heads, with the key heads that their groups read."""
        bias, groups = bias_of_heads(self.score_bias, heads), self.groups(heads)
        sinks = None if self.sinks is None else self.sinks[heads]
        q, k, v = self.q[:, heads], self.k[:, groups], self.v[:, groups]
        return replace(self, q=q, k=k, v=v, score_bias=bias, sinks=sinks)


@dataclass(frozen=True)
class MultiQueryView(AttentionView):
    """One softmax over scores of several queries per token, as in dual chunk attention.

    `q` is the first of the queries and `others` the rest, each with its mask. `mask` is the union of all masks.
    """

    others: MaskedQueries
    score_bias: ScoreBias | None
    scale: float | None

    def weights(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        """One softmax over the scores of all kinds of queries: each key is scored by the kind whose mask allows it."""
        k = self.k[:, self.groups(list(range(self.q.shape[1]))[heads]), :keys]
        scores = attention_scores(self.q[:, heads, rows], k, None, self.scale)
        for q, mask in self.others:
            allowed = self.context.attention_mask_rows(mask, rows)
            other = attention_scores(q[:, heads, rows], k, None, self.scale)
            scores = other if allowed is None else torch.where(allowed[..., :keys], other, scores)
        bias = bias_of_rows(self.score_bias, self, heads, rows, keys)
        scores = scores if bias is None else scores + bias
        allowed = self.attention_mask(rows)
        return attention_weights(scores, None if allowed is None else allowed[..., :keys])

    def select_heads(self, heads: list[int]) -> MultiQueryView:
        bias, others = bias_of_heads(self.score_bias, heads), [(q[:, heads], mask) for q, mask in self.others]
        return replace(self, q=self.q[:, heads], k=self.k[:, self.groups(heads)], others=others, score_bias=bias)


def attention_view(
    queries: MaskedQueries,
    k: Float[Tensor, "B G S K"],
    v: Float[Tensor, "B G S U"],
    context: Context,
    score_bias: ScoreBias | None,
    scale: float | None,
    softcap: float | None = None,
    sinks: Float[Tensor, "H"] | None = None,
) -> AttentionView:
    """The view that a callback gets of one call of `attend`."""
    (q, mask), *others = queries
    if others:
        return MultiQueryView(q, k, union_of_masks(queries), context, others, score_bias, scale)
    return SoftmaxView(q, k, mask, context, v, score_bias, scale, softcap, sinks)


def union_of_masks(queries: MaskedQueries) -> Mask:
    """The keys that any of a token's queries may read."""
    return reduce(or_, (mask for _, mask in queries))


def bias_of_rows(
    score_bias: ScoreBias | None, view: AttentionView, heads: slice, rows: Rows, keys: int | None
) -> Float[Tensor, "#B Heads Rows Keys"] | None:
    """The score bias of some queries, computed for these positions only."""
    if score_bias is None:
        return None
    whole = view.context
    return score_bias(Context(whole.positions[:, rows], whole.key_positions[:, :keys]), view.q.dtype)[:, heads]


def bias_of_heads(score_bias: ScoreBias | None, heads: list[int]) -> ScoreBias | None:
    """The same bias for some heads."""
    return None if score_bias is None else lambda context, dtype: score_bias(context, dtype)[:, heads]
