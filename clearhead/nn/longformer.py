"""Longformer's attention: a window, and global tokens that read and are read with projections of their own."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import Full, LongformerConfig

from .attention import attend, check_causal, merge_heads, split_heads
from .build import builds
from .context import Context
from .state import Room


@builds(LongformerConfig)
class Longformer(nn.Module):
    """x -> q, k, v -> attention under `Window | Global`; the rows of global tokens are then put in their place."""

    def __init__(self, config: LongformerConfig, dim: int) -> None:
        super().__init__()
        self.width, self.tokens = config.width(dim), config.tokens
        self.mask, self.dropout = config.mask, config.dropout
        self.qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias)
        self.global_qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias)
        self.out = nn.Linear(dim, dim, bias=config.out_bias)

    def forward(self, x: Float[Tensor, "B T D"], context: Context, state: None = None) -> Float[Tensor, "B T D"]:
        dropout = self.dropout if self.training else 0.0
        projected = context.tap("qkv", self.qkv(x)).chunk(3, dim=-1)
        q, k, v = (
            context.tap(name, split_heads(part, self.width))
            for name, part in zip(("query", "key", "value"), projected, strict=True)
        )
        local = context.tap("local", attend([(q, self.mask)], k, v, context, dropout=dropout))
        mixed = context.tap("mixed", self.with_global(local, x, context, dropout))
        return context.tap("out", self.out(context.tap("concat", merge_heads(mixed))))

    def with_global(
        self, local: Float[Tensor, "B H T K"], x: Float[Tensor, "B T D"], context: Context, dropout: float
    ) -> Float[Tensor, "B H T K"]:
        """The mixture of the global tokens, which read everyone, in their rows; `local` in all others."""
        early = context.positions < self.tokens
        is_global = early if context.readable is None else early & context.readable  # #B T
        count, dim = int(is_global.sum(dim=1).max()) if x.shape[1] else 0, x.shape[2]
        if not count:
            return local
        at = is_global.int().argsort(dim=1, descending=True, stable=True)[:, :count]  # where they are in the row
        weight, bias = self.global_qkv.weight, self.global_qkv.bias
        keys = context.tap("global_qkv", F.linear(x, weight[dim:], None if bias is None else bias[dim:]))
        k, v = (split_heads(part, self.width) for part in keys.chunk(2, dim=-1))
        chosen = x.gather(1, at[..., None].expand(len(x), -1, dim))
        q = split_heads(F.linear(chosen, weight[:dim], None if bias is None else bias[:dim]), self.width)
        reader = of_some(context.at("global"), at)
        mixed = reader.tap("mixed", attend([(q, Full())], k, v, reader, dropout=dropout))
        row = (is_global.cumsum(dim=1) - 1).clamp(min=0)[:, None, :, None].expand_as(local)
        return torch.where(is_global[:, None, :, None], mixed.gather(2, row), local)

    def init_state(self, room: Room) -> None:
        check_causal(self.mask)


def of_some(context: Context, at: Int[Tensor, "#B N"]) -> Context:
    """The context of some of the queries."""

    def chosen(x: Int[Tensor, "#B T"]) -> Int[Tensor, "#B N"]:
        return x.expand(max(len(x), len(at)), -1).gather(1, at.expand(max(len(x), len(at)), -1))

    documents = context.documents
    own = None if documents is None else chosen(documents)
    positions = chosen(context.positions)
    return replace(context, positions=positions, documents=own, key_documents=documents, aligned=False, memo={})
