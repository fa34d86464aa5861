"""Multi-head latent attention (MLA): all heads' keys and values are computed from one small vector per position.

    c = norm(W_down x)                                            the latent of a position: L numbers
    r = rotary key of the position                                N numbers, shared by all heads
    k_h = [W_key,h c ; r]      v_h = W_value,h c                  per head, from the latent
    q_h = [plain ; rotated]                                       matches the two parts of k_h

The KV cache holds c and r only: 576 numbers per position in DeepSeek-V2 instead of 32,768. The rotary part must be
separate, because a rotation between W_key and c would depend on the position and could not be absorbed into the query
(see `docs/learn/latent.md`). DeepSeek-V2, arXiv 2405.04434, section 2.1. This file has the plain form; the PyTorch
engine also has the absorbed one.

Why a latent. In decoding, the KV cache is read in full for every token, so its size decides the speed. Grouped-query
attention makes it smaller by giving several query heads the same keys. MLA keeps different keys and values for every
head, and stores what they have in common: their projection from L numbers. For H = 128 heads of 128 + 64 and 128:

    cache per position and layer       numbers
    multi-head attention               128 · (192 + 128) = 40,960      (32,768 without the rotary part)
    MLA                                512 + 64 = 576

Two equal ways to compute it. Plain: k_h = W_key,h c for every cached position, then ordinary attention. Absorbed:
q_h·(W_key,h c) = (W_key,hᵀ q_h)·c, so the small matrix is applied to the one query instead of to all keys, and the
cache is read as it is. The first is cheaper for a prompt, the second for decoding.
"""

import numpy as np
from jaxtyping import Float

from clearhead.configs import LatentAttentionConfig

from .attention import attend, merge_heads, split_heads
from .linear import linear
from .rotary import apply_rotary
from .run import Context, runs


@runs(LatentAttentionConfig)
def latent_attention(
    config: LatentAttentionConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """Queries; then latents, which the cache keeps; then keys and values of every head from the latents.

    Shapes, with N = rope_dim and L = latent_dim: q B H T plain+N; latent B T L and rope_key B 1 T N in the cache; k B H
    S plain+N; v B H S U. The rotary key is one for all heads, and is broadcast to them.
    """
    # Queries, through a latent of their own in the large models (fewer weights; nothing is cached).
    down = x
    if config.query_latent_dim is not None:
        down = context.tap("query_down", linear(x, context["query_down.weight"], context.get("query_down.bias")))
        down = context.tap("query_norm", context.run("query_norm", config.norm, down))
    q = split_heads(context.tap("query", linear(down, context["query.weight"])), config.plain_dim + config.rope_dim)
    plain, rope = q[..., : config.plain_dim], q[..., config.plain_dim :]
    q = np.concatenate((plain, apply_rotary(config.rotary, rope, context.positions)), -1)
    q = context.tap("query_rotated", q)  # B H T K

    # What is kept of each position: the latent, and one rotary key for all heads.
    joint = context.tap("down", linear(x, context["down.weight"], context.get("down.bias")))
    latent, rope = joint[..., : config.latent_dim], joint[:, None, :, config.latent_dim :]
    latent = context.tap("latent_norm", context.run("latent_norm", config.norm, latent))
    rope = context.tap("rope_key", apply_rotary(config.rotary, rope, context.positions))  # B 1 T N
    latent, rope = context.append("latent", latent, 1), context.append("rope_key", rope, 2)

    # Keys and values of every head, computed again from the latents.
    up = split_heads(context.tap("up", linear(latent, context["up.weight"])), config.plain_dim + config.value_dim)
    k, v = up[..., : config.plain_dim], up[..., config.plain_dim :]
    k = np.concatenate((k, np.broadcast_to(rope, (*k.shape[:-1], config.rope_dim))), -1)
    mixed = attend([(q, config.mask)], k, v, context, scale=config.scale)
    return context.tap("out", linear(merge_heads(mixed, context), context["out.weight"], context.get("out.bias")))
