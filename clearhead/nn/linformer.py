"""Linformer: attention over W learned mixtures of all positions, O(n·W) (Wang et al. 2020).

    E, F   W × length, learned            keys = (E x) W_K     values = (F x) W_V        W rows instead of T

The mixtures contain all positions, so the layer cannot be causal and has no state: `init_state` raises. Padding is
multiplied by 0 before mixing.

A mixture has no position, so no mask over keys can hide part of it. Documents that share a row are therefore computed
in rows of their own, as if the rest were padding.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.configs import LinformerConfig
from clearhead.configs.masks import check_causal

from .attention import attend, merge_heads, split_heads
from .build import builds
from .cache import StateAllocator
from .context import Context
from .packing import document_rows


@builds(LinformerConfig)
class Linformer(nn.Module):
    """keys = (E·X)·W_K, values = (F·X)·W_V: W rows each, and every query reads all of them.

    (E·X)·W_K equals E·(X·W_K), but multiplies the matrices with W rows instead of T.
    """

    def __init__(self, config: LinformerConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        self.widths = key, value = config.widths(dim)
        self.parts = (config.heads * key, config.heads * key, config.heads * value)  # of queries, keys and values
        self.fused = {"qkv": self.parts}
        self.key_rows = nn.Linear(config.length, config.rows, bias=False)
        self.value_rows = None if config.shared else nn.Linear(config.length, config.rows, bias=False)
        self.qkv = nn.Linear(dim, sum(self.parts), bias=False)
        self.out = nn.Linear(config.heads * value, dim, bias=config.out_bias)

    def forward(self, x: Float[Tensor, "B T D"], context: Context, state: None = None) -> Float[Tensor, "B T D"]:
        """Project, mix T positions to W rows, and let every query read all rows.

        Taps: key_rows and value_rows B W D, query B H T K, key B H W K, value B H W U, mixed, concat, out.
        """
        if context.documents is not None:
            return self.by_document(x, context)
        self.check_positions(context)
        (key, value), (w_query, w_key, w_value) = self.widths, self.qkv.weight.split(self.parts)
        real = x if context.readable is None else x * context.readable.unsqueeze(-1)
        rows = context.tap("key_rows", self.mixtures(self.key_rows, real, context))
        q = context.tap("query", split_heads(F.linear(x, w_query), key))
        k = context.tap("key", split_heads(F.linear(rows, w_key), key))
        if self.value_rows is not None:
            rows = context.tap("value_rows", self.mixtures(self.value_rows, real, context))
        v = context.tap("value", split_heads(F.linear(rows, w_value), value))
        places = torch.arange(self.config.rows, device=x.device)[None]
        reader = replace(context.with_keys(places, None), aligned=False)
        dropout = self.config.dropout if self.training else 0.0
        mixed = context.tap("mixed", attend([(q, self.config.mask)], k, v, reader, dropout=dropout))
        return context.tap("out", self.out(context.tap("concat", merge_heads(mixed))))

    @staticmethod
    def mixtures(mix: nn.Linear, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B W D"]:
        """W mixtures of the tokens: each token is weighted by the column of its position.

        If tokens stand at positions 0 … T − 1 (`aligned`), one slice of E serves all rows. Otherwise each row gathers
        its own columns.
        """
        if context.aligned:
            return mix.weight[:, : x.shape[1]] @ x
        return mix.weight.T[context.positions].mT @ x

    def check_positions(self, context: Context) -> None:
        """Raise if a token stands past the last column of E and F."""
        last = context.positions.shape[1] - 1
        if not context.aligned and context.positions.numel():
            last = int(context.positions.max())
        if last >= self.config.length:
            raise ValueError(f"position {last} is past the {self.config.length} positions of this Linformer")

    def by_document(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        """Run each document in a row of its own, so that mixtures do not cross documents."""
        rows = document_rows(context, len(x))
        assert rows.tokens is not None
        positions = context.positions.expand(x.shape[:2]).flatten()[rows.tokens]
        alone = Context(positions, positions, rows.real, taps=context.taps, path=context.path, fused=context.fused)
        return rows.scatter(self(rows.gather(x), alone))

    def init_state(self, allocator: StateAllocator) -> NoReturn:
        """Raises: every mixture contains later positions."""
        check_causal(self.config.mask)
        raise AssertionError("a Linformer's mask is Full")
