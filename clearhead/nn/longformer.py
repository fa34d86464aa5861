"""Longformer: attention within a window, and a few global tokens that read everything (Beltagy et al. 2020).

    local     all tokens,    q k v of `qkv`            under Window | Global
    global    few tokens,    q′ k′ v′ of `global_qkv`  over everything, written over the local result of those rows

With few global tokens the second set of keys need not be computed: q′·(W x) = (q′ W)·x moves the matrix to the few
queries (`attend_absorbed`). Both forms give the same result, and the cheaper one is taken.
"""

from __future__ import annotations

from dataclasses import replace

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import Full, LongformerConfig
from clearhead.configs.masks import check_causal

from .attention import attend, merge_heads, split_heads
from .build import builds
from .cache import StateAllocator
from .context import Context


@builds(LongformerConfig)
class Longformer(nn.Module):
    """Attention under `Window | Global`; then the rows of the global tokens are replaced by attention over all tokens.

    Global tokens read with a second set of projections, `global_qkv`, because they ask another kind of question: what
    the text is about, and not what stands next to a token.
    """

    def __init__(self, config: LongformerConfig, dim: int) -> None:
        super().__init__()
        self.config, self.width = config, config.width(dim)
        self.fused = dict.fromkeys(("qkv", "global_qkv"), (dim, dim, dim))
        self.qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias)
        self.global_qkv = nn.Linear(dim, 3 * dim, bias=config.qkv_bias)
        self.out = nn.Linear(dim, dim, bias=config.out_bias)

    def forward(self, x: Float[Tensor, "B T D"], context: Context, state: None = None) -> Float[Tensor, "B T D"]:
        """Local attention of all tokens, then the rows of the global tokens replaced.

        Taps: qkv B T 3·D; query, key, value, local and mixed B H T K; concat and out B T D.
        """
        dropout = self.config.dropout if self.training else 0.0
        projected = context.tap("qkv", self.qkv(x)).chunk(3, dim=-1)
        q, k, v = (
            context.tap(name, split_heads(part, self.width))
            for name, part in zip(("query", "key", "value"), projected, strict=True)
        )
        local = context.tap("local", attend([(q, self.config.mask)], k, v, context, dropout=dropout))
        mixed = context.tap("mixed", self.replace_global_rows(local, x, context, dropout))
        return context.tap("out", self.out(context.tap("concat", merge_heads(mixed))))

    def replace_global_rows(
        self, local: Float[Tensor, "B H T K"], x: Float[Tensor, "B T D"], context: Context, dropout: float
    ) -> Float[Tensor, "B H T K"]:
        """The rows of the global tokens, which read every token; `local` in all other rows."""
        early = context.positions < self.config.tokens
        is_global = (early if context.readable is None else early & context.readable).expand(x.shape[:2])
        count = int(is_global.sum(dim=1).max()) if x.shape[1] else 0
        if not count:
            return local
        # The places of the global tokens in each row: sorting puts them first, in order.
        at = is_global.int().argsort(dim=1, descending=True, stable=True)[:, :count]
        weight, bias = self.global_qkv.weight.chunk(3)[0], self.bias(0)
        q = split_heads(F.linear(x.gather(1, at[..., None].expand(-1, -1, x.shape[2])), weight, bias), self.width)
        reader = select_queries(context, at)
        absorbs = context.fused and not dropout and self.config.absorbs(count, x.shape[2])
        if absorbs and not context.replaces(
            "global_qkv", *(f"global.{name}" for name in ("scores", "weights", "mixed"))
        ):
            mixed = self.attend_absorbed(q, x, replace(reader, taps=None))
            if context.taps is not None:
                self.attend_projected(q, x, reader, dropout)  # for the taps alone
        else:
            mixed = self.attend_projected(q, x, reader, dropout)
        rows, places = is_global.nonzero(as_tuple=True)
        which = is_global.cumsum(dim=1)[rows, places] - 1
        chosen = mixed[rows, :, which].to(local.dtype)  # under autocast, adding a bias has widened it
        return local.transpose(1, 2).index_put((rows, places), chosen).transpose(1, 2)

    def attend_projected(
        self, q: Float[Tensor, "B H N K"], x: Float[Tensor, "B T D"], context: Context, dropout: float
    ) -> Float[Tensor, "B H N K"]:
        """Project every token to a key and a value by the second matrix."""
        weight, bias = self.global_qkv.weight[x.shape[2] :], self.global_qkv.bias
        keys = context.tap("global_qkv", F.linear(x, weight, None if bias is None else bias[x.shape[2] :]))
        k, v = (split_heads(part, self.width) for part in keys.chunk(2, dim=-1))
        reader = context.at("global")
        return reader.tap("mixed", attend([(q, Full())], k, v, reader, dropout=dropout))

    def attend_absorbed(
        self, q: Float[Tensor, "B H N K"], x: Float[Tensor, "B T D"], context: Context
    ) -> Float[Tensor, "B H N K"]:
        """The same, but x itself is read: q·(W x) = (q W)·x, and Σ p·W x = W Σ p·x. Cheaper for few queries.

        The bias of the keys adds the same to all scores of a query, so the softmax cancels it.
        """
        _, to_key, to_value = (part.unflatten(0, (-1, self.width)) for part in self.global_qkv.weight.chunk(3))  # H K D
        bias = self.bias(2)
        mixed = attend([(q @ to_key, Full())], x[:, None], x[:, None], context, scale=self.width**-0.5) @ to_value.mT
        return mixed if bias is None else mixed + bias.unflatten(0, (-1, 1, self.width))

    def bias(self, part: int) -> Float[Tensor, "D"] | None:
        """The bias of the second matrix's queries (0), keys (1) or values (2)."""
        return None if self.global_qkv.bias is None else self.global_qkv.bias.chunk(3)[part]

    def init_state(self, allocator: StateAllocator) -> None:
        """Raises: tokens that read both ways cannot be decoded one by one."""
        check_causal(self.config.mask)


def select_queries(context: Context, at: Int[Tensor, "#B N"]) -> Context:
    """The context of the queries at these places only."""

    def take_global(x: Int[Tensor, "#B T"]) -> Int[Tensor, "#B N"]:
        return x.expand(max(len(x), len(at)), -1).gather(1, at.expand(max(len(x), len(at)), -1))

    documents = context.documents
    own = None if documents is None else take_global(documents)
    positions = take_global(context.positions)
    return replace(context, positions=positions, documents=own, key_documents=documents, aligned=False, memo={})
