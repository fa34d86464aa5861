"""Attention through a feature map: sums over keys in the place of a comparison with each of them."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.configs import Config, DotConfig, EluConfig, FavorConfig, LinearAttentionConfig
from clearhead.configs.masks import check_causal
from clearhead.functional.linear_attention import (
    NOTHING,
    Sums,
    elu_features,
    over_all_keys,
    over_keys_so_far,
    stable_features,
)
from clearhead.functional.softmax import widen
from clearhead.precision.matrix import Linear
from clearhead.reference.linear_attention import random_directions

from .attention import merge_heads, split_heads
from .attention_view import AttentionView, Rows
from .build import build_part, builds
from .cache import LinearAttentionState, StateAllocator
from .context import Context
from .packing import dense_rows, document_rows

C = TypeVar("C", bound=Config)


@builds(EluConfig)
class Elu(nn.Module):
    """elu(x) + 1, divided by nothing."""

    def __init__(self, config: EluConfig, width: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B H T K"]) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H T"]]:
        return elu_features(x.contiguous()), x.new_zeros(x.shape[:-1])


@builds(DotConfig)
class Dot(nn.Module):
    """x itself, divided by nothing."""

    def __init__(self, config: DotConfig, width: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B H T K"]) -> tuple[Float[Tensor, "B H T K"], Float[Tensor, "B H T"]]:
        return x, x.new_zeros(x.shape[:-1])


@builds(FavorConfig)
class Favor(nn.Module):
    """Positive random features. The directions follow from the config's seed, so they are no weights."""

    def __init__(self, config: FavorConfig, width: int) -> None:
        super().__init__()
        self.directions = torch.from_numpy(random_directions(config.features, width, config.seed))

    def draw(self, seed: int) -> None:
        features, width = self.directions.shape
        self.directions = torch.from_numpy(random_directions(features, width, seed))

    def forward(self, x: Float[Tensor, "B H T K"]) -> tuple[Float[Tensor, "B H T W"], Float[Tensor, "B H T"]]:
        return stable_features(x, self.directions.to(x))


@builds(LinearAttentionConfig)
class LinearAttention(nn.Module):
    """x -> q, k, v by one matrix -> heads -> features -> Σ_j φ(q)·φ(k_j)·v_j / Σ_j φ(q)·φ(k_j) -> out.

    all keys      φ(q)·(Σφ(k)[v 1]): two products, in any order of keys
    keys so far   chunks: each compared with itself, and with what is before it through its sums; decoding goes on
                  from the sums of all tokens before
    """

    def __init__(self, config: LinearAttentionConfig, dim: int) -> None:
        super().__init__()
        key, value = config.widths(dim)
        self.widths, self.mask = (key, value), config.mask
        self.heads, self.features = config.heads, config.kernel.count(key)
        self.rows = (config.heads * key, config.heads * key, config.heads * value)  # of queries, keys and values
        self.fused = {"qkv": self.rows}
        self.qkv = Linear(dim, sum(self.rows), bias=config.qkv_bias)
        self.kernel, self.shares = build_part(config.kernel, key), config.kernel.shares
        self.out = Linear(config.heads * value, dim, bias=config.out_bias)

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: LinearAttentionState | None = None
    ) -> Float[Tensor, "B T D"]:
        key, value = self.widths
        qkv = context.tap("qkv", self.qkv(x)).split(self.rows, dim=-1)
        q = context.tap("query", split_heads(qkv[0], key))
        k = context.tap("key", split_heads(qkv[1], key))
        v = context.tap("value", split_heads(qkv[2], value))
        (q, _), (k, top) = self.kernel(widen(q)), self.kernel(widen(k))
        q, k = context.tap("query_features", q), context.tap("key_features", k)
        mixed = context.tap("mixed", self.mix(q, k, widen(v), top, context, state).to(x.dtype))
        return context.tap("out", self.out(context.tap("concat", merge_heads(mixed))))

    def mix(
        self,
        q: Float[Tensor, "B H T W"],
        k: Float[Tensor, "B H T W"],
        v: Float[Tensor, "B H T U"],
        top: Float[Tensor, "B H T"],
        context: Context,
        state: LinearAttentionState | None,
    ) -> Float[Tensor, "B H T U"]:
        if state is None:  # all keys are here, and so all weights can be written out
            pairs = LinearAttentionView(q, k, self.mask, context, top, self.shares)
            for view in context.viewers():
                view(pairs)
            if not context.fused or context.replaces("weights"):
                return context.tap("weights", pairs.weights()) @ v
            if context.reads("weights"):
                context.tap("weights", pairs.weights())
        if not self.mask.causal:
            return self.both_ways(q, k, v, top, context)
        row = dense_rows(context, len(q))
        q, k, v, top = row.gather(q, 2), row.gather(k, 2), row.gather(v, 2), row.gather(top, 2)
        if row.real is not None:
            k, top = k * row.real[:, None, :, None], torch.where(row.real[:, None], top, NOTHING)
        start = None if state is None else Sums(state.sums.to(q), state.top.to(q))
        mixed, sums = over_keys_so_far(q, k, v, top, row.document, start, self.shares)
        if state is not None:
            state.sums, state.top = sums.sums.detach(), sums.top.detach()
        return row.scatter(mixed, 2)

    def both_ways(
        self,
        q: Float[Tensor, "B H T W"],
        k: Float[Tensor, "B H T W"],
        v: Float[Tensor, "B H T U"],
        top: Float[Tensor, "B H T"],
        context: Context,
    ) -> Float[Tensor, "B H T U"]:
        row = dense_rows(context, len(q)) if context.documents is None else document_rows(context, len(q))
        q, k, v, top = row.gather(q, 2), row.gather(k, 2), row.gather(v, 2), row.gather(top, 2)
        if row.real is not None:
            top = torch.where(row.real[:, None], top, -torch.inf)
        largest = top.amax(-1, keepdim=True).clamp_min(NOTHING) if top.shape[-1] else 0
        return row.scatter(over_all_keys(q, k, v, (top - largest).exp(), self.shares), 2)

    def init_state(self, allocator: StateAllocator) -> LinearAttentionState:
        check_causal(self.mask)
        sums, top = allocator.zeros(self.heads, self.features, self.widths[1] + 1), allocator.zeros(self.heads)
        return LinearAttentionState(widen(sums), widen(top).fill_(NOTHING))


@dataclass(frozen=True)
class LinearAttentionView(AttentionView):
    """The features of one layer, whose weights nobody computes unless he asks."""

    top: Float[Tensor, "B H T"]
    shares: bool

    def weights(
        self, heads: slice = slice(None), rows: Rows = slice(None), keys: int | None = None
    ) -> Float[Tensor, "B Heads Rows Keys"]:
        """φ(q)·φ(k) of the keys that may be read, as shares of their sum or as it is; padding reads nothing."""
        top = self.top[:, heads, None, :keys]
        allowed = self.allowed(rows)
        if self.context.readable is not None:
            allowed = self.context.readable[:, None, rows, None] & (True if allowed is None else allowed)
        tops = top if allowed is None else torch.where(allowed[..., :keys], top, -torch.inf)
        largest = tops.amax(-1, keepdim=True).clamp_min(NOTHING) if tops.shape[-1] else 0
        pairs = self.q[:, heads, rows] @ self.k[:, heads, :keys].mT * (tops - largest).exp()
        if not self.shares:
            return pairs
        total = pairs.sum(-1, keepdim=True)
        return pairs / torch.where(total == 0, 1, total)

    def select_heads(self, heads: list[int]) -> LinearAttentionView:
        return replace(self, q=self.q[:, heads], k=self.k[:, heads], top=self.top[:, heads])


def redraw(model: nn.Module, seed: int) -> None:
    """Draw the directions of every `Favor` anew. The model's config says so too, and a saved model loads with them."""
    for module in model.modules():
        if isinstance(module, Favor):
            module.draw(seed)
        config = getattr(module, "config", None)
        if isinstance(config, Config):
            module.config = reseeded(config, seed)  # type: ignore[assignment]


def reseeded(config: C, seed: int) -> C:
    """The same tree with another seed in every `Favor`."""

    def anew(value: object) -> object:
        if isinstance(value, tuple):
            return tuple(map(anew, value))
        return reseeded(value, seed) if isinstance(value, Config) else value

    if isinstance(config, FavorConfig):
        return replace(config, seed=seed)
    return replace(config, **{f.name: anew(getattr(config, f.name)) for f in fields(config)})
