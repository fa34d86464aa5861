"""Disentangled attention: contents and distances have vectors of their own, and meet in the scores (DeBERTa).

    content to content      q_i·k_j          B H T S, as in plain attention
    content to position     q_i·K_{i−j}      B H T N, one product for each of N distances, then gathered to B H T S
    position to content     Q_{i−j}·k_j      B H N S, then gathered along the queries

Products with all N vectors come first and the gather second: T·N products for each head instead of T·S, because many
pairs share a distance. The sum of the last two is a bias, so torch's fused kernel can compute the rest. Distances are
of positions and not of indices, and the table is shared by all layers of a stack (`DistanceVectors`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.configs import DisentangledAttentionConfig, DistanceVectorsConfig
from clearhead.configs.masks import check_causal
from clearhead.functional.attention import attention_scores, attention_weights
from clearhead.precision.matrix import Linear, linear

from .attention import fused_attention, merge_heads, split_heads, written_out_attention
from .attention_view import AttentionView, Rows
from .build import build_part, builds
from .cache import StateAllocator
from .context import Context, Distances


@builds(DistanceVectorsConfig)
class DistanceVectors(nn.Module):
    """A learned vector for every bucket of distances, which all layers of a stack read: 2·span rows of width D.

    Row `span` is distance 0; rows after it are keys before the query, rows before it are keys after it.
    """

    def __init__(self, config: DistanceVectorsConfig, dim: int) -> None:
        super().__init__()
        self.config, self.lookup = config, tuple(config.lookup.tolist())
        self.weight = nn.Parameter(torch.empty(2 * config.span, dim))
        self.norm = build_part(config.norm, dim)

    def init_weights(self) -> None:
        """Start small, so that a fresh model reads by content first.

        Large vectors would put the same pattern of positions on every text before the model has learned any words.
        """
        with torch.no_grad():
            nn.init.normal_(self.weight, std=0.02)

    def forward(self, context: Context) -> Float[Tensor, "N D"]:
        """The table, normed. Taps: distances N D, and distances.norm N D."""
        table = context.tap("distances", self.weight.clone())
        return table if self.config.norm is None else context.tap("distances.norm", self.norm(table))

    def over(self, table: Float[Tensor, "N D"]) -> Distances:
        """The table and the row of every pair of a pass; the rows are computed once for all layers.

        The rows depend on positions alone. They are B T S integers, as many as the scores of one head.
        """

        def places(context: Context) -> Tensor:
            lookup = torch.tensor(self.lookup, device=context.positions.device)
            distance = context.positions[:, :, None] - context.key_positions[:, None, :]
            return self.config.places(distance, lookup)

        def once(context: Context) -> Tensor:
            return context.once(("places of distances", id(context.key_positions)), lambda: places(context))

        return Distances(table, once)


@builds(DisentangledAttentionConfig)
class DisentangledAttention(nn.Module):
    """softmax((q_i·k_j + q_i·K_{i−j} + Q_{i−j}·k_j)/√(3K))·v -> heads side by side -> out.

    q, k, v  B H T K, from x by one matrix      Q, K  H N K, from the stack's N distance vectors, by rows of the same
    matrix or by one of their own
    """

    def __init__(self, config: DisentangledAttentionConfig, dim: int) -> None:
        super().__init__()
        self.config, self.width, self.scale = config, config.width(dim), config.scale(dim)
        self.rows = config.heads * self.width
        self.fused = {"qkv": (self.rows,) * 3}
        self.qkv = Linear(dim, 3 * self.rows)
        self.positions = Linear(dim, len(config.terms) * self.rows) if config.own_positions else None
        self.out = Linear(self.rows, dim)

    def forward(self, x: Float[Tensor, "B T D"], context: Context, state: None = None) -> Float[Tensor, "B T D"]:
        """Taps: qkv B T 3·H·K; query, key, value and mixed B H T K; position_scores, scores and weights B H T S."""
        projected = context.tap("qkv", self.qkv(x)).chunk(3, dim=-1)
        q, k, v = (
            context.tap(name, split_heads(part, self.width))
            for name, part in zip(("query", "key", "value"), projected, strict=True)
        )
        found = context.tap("position_scores", self.position_scores(q, k, context)) * self.scale
        mixed = context.tap("mixed", self.attend(q, k, v, found, context))
        return context.tap("out", self.out(context.tap("concat", merge_heads(mixed))))

    def attend(
        self,
        q: Float[Tensor, "B H T K"],
        k: Float[Tensor, "B H S K"],
        v: Float[Tensor, "B H S K"],
        bias: Float[Tensor, "B H T S"],
        context: Context,
    ) -> Float[Tensor, "B H T K"]:
        """By torch's kernel, or written out if a tap replaces scores or weights.

        A tap that only reads them computes them beside the kernel, so reading changes no result.
        """
        mask, dropout = self.config.mask, self.config.dropout if self.training else 0.0

        def written_out(dropout: float) -> Float[Tensor, "B H T K"]:
            return written_out_attention(
                [(q, mask)],
                k,
                v,
                context,
                score_bias=lambda context, dtype: bias,
                scale=self.scale,
                softcap=None,
                sinks=None,
                dropout=dropout,
            )

        for view in context.viewers():
            view(DisentangledView(q, k, mask, context, bias, self.scale))
        if not context.fused or context.replaces("scores", "weights"):
            return written_out(dropout)
        if context.reads("scores", "weights"):
            written_out(0.0)  # only for the taps
        return fused_attention(q, k, v, context.attention_mask(mask), False, bias, self.scale, dropout)

    def position_scores(
        self, q: Float[Tensor, "B H T K"], k: Float[Tensor, "B H S K"], context: Context
    ) -> Float[Tensor, "B H T S"]:
        """q_i·K_{i−j} + Q_{i−j}·k_j: multiply by the vectors of all distances, then gather the one of each pair.

        Q and K are projections of the stack's table, by the rows of `qkv` or by a matrix of the layer's own.
        """
        assert context.distances is not None, "the stack has distance vectors"
        matrix = self.qkv if self.positions is None else self.positions
        projected = self.config.projected
        rows = len(projected) * self.rows
        found = linear(context.distances.table, matrix.weight[:rows], matrix.bias[:rows])
        parts = zip(projected, found.split(self.rows, dim=-1), strict=True)
        vectors = {term: split_heads(part[None], self.width)[0] for term, part in parts}  # H N K each
        shape = (*q.shape[:3], k.shape[2])
        places = context.distances.places(context)[:, None].expand(shape)
        total = q.new_zeros(shape)
        if "content to position" in self.config.terms:
            total = total + (q @ vectors["content to position"].mT).gather(-1, places)
        if "position to content" in self.config.terms:
            total = total + (vectors["position to content"] @ k.mT).gather(-2, places)
        return total

    def init_state(self, allocator: StateAllocator) -> None:
        """Raises: tokens that read both ways cannot be decoded one by one."""
        check_causal(self.config.mask)


@dataclass(frozen=True)
class DisentangledView(AttentionView):
    """The scores of contents, and what distances add to them.

    The bias is kept whole, B H T S: it depends on the queries and keys, unlike ALiBi's.
    """

    bias: Float[Tensor, "B H T S"]
    scale: float

    def scores(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        """scale·qkᵀ + bias before the mask is applied."""
        added = self.bias[:, heads][:, :, rows, :keys]
        return attention_scores(self.q[:, heads, rows], self.k[:, heads, :keys], added, self.scale)

    def weights(self, heads: slice, rows: Rows, keys: int | None = None) -> Float[Tensor, "B Heads Rows Keys"]:
        allowed = self.attention_mask(rows)
        return attention_weights(self.scores(heads, rows, keys), None if allowed is None else allowed[..., :keys])

    def select_heads(self, heads: list[int]) -> DisentangledView:
        return replace(self, q=self.q[:, heads], k=self.k[:, heads], bias=self.bias[:, heads])
