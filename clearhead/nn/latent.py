"""Multi-head latent attention (MLA): keys and values of all heads from one small latent per position.

DeepSeek-V2, arXiv 2405.04434, section 2.1. The KV cache holds the latent and one rotary key.

Per position the cache keeps [latent ; rotary key]: L + R numbers for all heads together, instead of H·(K + U).

Two ways to the same numbers, chosen by `prefers_absorbed`:

    plain       k_h = W_key,h c for every cached position, then attention            many queries: a prompt
    absorbed    (W_key,hᵀ q_h)·c: the matrix moves from the keys to the query        few queries: decoding

The rotary part cannot be absorbed, because the rotation between W_key and c differs by position. So it is a second,
small key that all heads share.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from clearhead.configs import LatentAttentionConfig
from clearhead.configs.masks import check_causal
from clearhead.precision.matrix import Linear, dense

from .attention import attend, merge_heads, split_heads
from .build import build_part, builds
from .cache import LatentCache, StateAllocator
from .context import Context


@builds(LatentAttentionConfig)
class LatentAttention(nn.Module):
    """Two forms with the same result. c is the latent of a position, r its rotary key, shared by all heads.

    plain     k_h = [W_key,h·c ; r]   v_h = W_value,h·c        make keys and values of every head: training, prefill
    absorbed  q_h·W_key,h reads c     W_value,h·(weights·c)    multiply the matrices into the query instead: decoding

    The absorbed form reads the cached latents directly, because q·(W c) = (q W)·c and Σ p·(W c) = W·(Σ p·c).
    """

    def __init__(self, config: LatentAttentionConfig, dim: int) -> None:
        super().__init__()
        self.config = config
        width = config.plain_dim + config.rope_dim
        query_in = config.query_latent_dim or dim
        if config.query_latent_dim is not None:
            self.query_down = Linear(dim, query_in, bias=config.bias)
            self.query_norm = build_part(config.norm, query_in)
        self.query = Linear(query_in, config.heads * width, bias=False)
        self.down = Linear(dim, config.latent_dim + config.rope_dim, bias=config.bias)
        self.latent_norm = build_part(config.norm, config.latent_dim)
        self.up = Linear(config.latent_dim, config.heads * (config.plain_dim + config.value_dim), bias=False)
        self.rotary = build_part(config.rotary, config.rope_dim)
        self.out = Linear(config.heads * config.value_dim, dim, bias=config.bias)

    def forward(
        self, x: Float[Tensor, "B T D"], context: Context, state: LatentCache | None = None
    ) -> Float[Tensor, "B T D"]:
        """Project the new tokens, append their latents to the cache if there is one, and attend in the cheaper form."""
        q, joint = self.queries(x, context), self.latents(x, context)
        if state is not None:
            joint, context = state.append(joint, context)
        form = self.attend_absorbed if self.prefers_absorbed(q.shape[2], joint.shape[2]) else self.attend_plain
        mixed = context.tap("mixed", form(q, joint, context))
        return context.tap("out", self.out(context.tap("concat", merge_heads(mixed))))

    def queries(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B H T K"]:
        """The queries of every head: a part without position, then a rotated part."""
        config = self.config
        if config.query_latent_dim is not None:
            x = context.tap("query_norm", self.query_norm(context.tap("query_down", self.query_down(x))))
        q = split_heads(context.tap("query", self.query(x)), config.plain_dim + config.rope_dim)
        plain, rope = q.split((config.plain_dim, config.rope_dim), dim=-1)
        q = torch.cat((plain, self.rotary(rope, context.positions, context)), dim=-1)
        return context.tap("query_rotated", q)

    def latents(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B 1 T LR"]:
        """[latent ; rotary key]: what the cache keeps of each position."""
        down = context.tap("down", self.down(x)).unsqueeze(1)
        latent, rope = down.split((self.config.latent_dim, self.config.rope_dim), dim=-1)
        latent = context.tap("latent_norm", self.latent_norm(latent.squeeze(1))).unsqueeze(1)
        rope = context.tap("rope_key", self.rotary(rope, context.positions, context))
        return torch.cat((latent, rope), dim=-1)

    def prefers_absorbed(self, queries: int, keys: int) -> bool:
        """Whether the absorbed form needs fewer multiplications, as for few queries over many cached latents."""
        c = self.config
        made = c.latent_dim * (c.plain_dim + c.value_dim)  # per key, in the plain form
        wider = 2 * (c.latent_dim + c.rope_dim) - (c.plain_dim + c.rope_dim + c.value_dim)  # per query and key
        return queries < keys and queries * (wider + made / keys) < made

    def attend_plain(
        self, q: Float[Tensor, "B H T K"], joint: Float[Tensor, "B 1 S LR"], context: Context
    ) -> Float[Tensor, "B H T U"]:
        """Make keys and values of every head from the latents, then attend."""
        c = self.config
        latent, rope = joint.split((c.latent_dim, c.rope_dim), dim=-1)
        up = split_heads(context.tap("up", self.up(latent.squeeze(1))), c.plain_dim + c.value_dim)
        k, v = up.split((c.plain_dim, c.value_dim), dim=-1)
        k = torch.cat((k, rope.expand(-1, c.heads, -1, -1)), dim=-1)
        return attend([(q, c.mask)], k, v, context, scale=c.scale, dropout=c.dropout if self.training else 0.0)

    def attend_absorbed(
        self, q: Float[Tensor, "B H T K"], joint: Float[Tensor, "B 1 S LR"], context: Context
    ) -> Float[Tensor, "B H T U"]:
        """Attend over the latents themselves, with W_key multiplied into the queries and W_value into the result."""
        c = self.config
        up = dense(self.up.weight).unflatten(0, (c.heads, -1))  # H K+U L
        to_key, to_value = up.split((c.plain_dim, c.value_dim), dim=1)
        plain, rope = q.split((c.plain_dim, c.rope_dim), dim=-1)
        q = torch.cat((plain @ to_key, rope), dim=-1)  # B H T L+R
        # the values are the first L columns of the keys: pass the keys twice instead of copying, and cut off the rest
        dropout = c.dropout if self.training else 0.0
        mixed = attend([(q, c.mask)], joint, joint, context, scale=c.scale, dropout=dropout)
        return mixed[..., : c.latent_dim] @ to_value.mT

    def init_state(self, allocator: StateAllocator) -> LatentCache:
        """A cache with one "head" of L + R numbers per position, which all heads read."""
        check_causal(self.config.mask)
        slots = allocator.slots_for(self.config.ring)
        joint = allocator.buffer(1, slots.positions.shape[1], self.config.latent_dim + self.config.rope_dim)
        return LatentCache(slots, joint)
