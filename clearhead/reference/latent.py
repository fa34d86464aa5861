"""Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, 2.1), in its plain form."""

import numpy as np
from jaxtyping import Float

from clearhead.configs import LatentAttentionConfig

from .attention import attend, merge_heads, split_heads
from .linear import linear
from .rotary import turn_by
from .run import Here, runs


@runs(LatentAttentionConfig)
def latent_attention(
    config: LatentAttentionConfig, x: Float[np.ndarray, "B T D"], here: Here
) -> Float[np.ndarray, "B T D"]:
    """c = norm(W_down·x) is all that is kept of a position, with one rotary key r for all heads.

    k_h = [W_key,h·c ; r]      v_h = W_value,h·c      q_h = [plain ; turned]
    """
    down = x
    if config.query_latent_dim is not None:
        down = here.note("query_down", linear(x, here["query_down.weight"], here.get("query_down.bias")))
        down = here.note("query_norm", here.run("query_norm", config.norm, down))
    q = split_heads(here.note("query", linear(down, here["query.weight"])), config.plain_dim + config.rope_dim)
    plain, rope = q[..., : config.plain_dim], q[..., config.plain_dim :]
    q = np.concatenate((plain, turn_by(config.rotary, rope, here.positions)), -1)
    q = here.note("query_turned", q)  # B H T K

    joint = here.note("down", linear(x, here["down.weight"], here.get("down.bias")))
    latent, rope = joint[..., : config.latent_dim], joint[:, None, :, config.latent_dim :]
    latent = here.note("latent_norm", here.run("latent_norm", config.norm, latent))
    rope = here.note("rope_key", turn_by(config.rotary, rope, here.positions))  # B 1 T N
    latent, rope = here.remember("latent", latent, 1), here.remember("rope_key", rope, 2)

    up = split_heads(here.note("up", linear(latent, here["up.weight"])), config.plain_dim + config.value_dim)
    k, v = up[..., : config.plain_dim], up[..., config.plain_dim :]
    k = np.concatenate((k, np.broadcast_to(rope, (*k.shape[:-1], config.rope_dim))), -1)
    mixed = attend([(q, config.mask)], k, v, here, scale=config.scale)
    return here.note("out", linear(merge_heads(mixed, here), here["out.weight"], here.get("out.bias")))
