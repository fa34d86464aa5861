"""Longformer: most tokens attend within a window; a few global tokens read everything and are read by everyone.

    local    q, k, v under the mask Window | Global       O(n·w) scores
    global   the first tokens read all positions, by a second set of projections q′, k′, v′

Information crosses the window through the global tokens in two steps. Beltagy et al. (2020), "Longformer".

    window of 5, one global token:        ■ reads      □ reads by the second set of projections

        □ □ □ □ □ □ □ □          token 0 is global: its row reads all positions
        ■ ■ ■ ■ · · · ·          and its column is read by all
        ■ ■ ■ ■ ■ · · ·
        ■ ■ ■ ■ ■ ■ · ·
        ■ · ■ ■ ■ ■ ■ ·
        ■ · · ■ ■ ■ ■ ■

Why a window is not enough. With a window of w on either side, information travels at most w positions per layer: L
layers reach L·w positions. 12 layers of 256 reach 3,072. A global token is two steps from everything, in any layer.

    cost of one layer, n = 4,096      scores per head
    full attention                    16.8 million
    window of 512, 1 global token     2.1 million + 8,192

The second set exists because a global token asks another kind of question: "what is this text about?", not "what stands
next to me?". For classification the class token is global; for question answering all tokens of the question are.

A Longformer starts from a trained model with full attention: its q, k and v are copied into both sets, and its learned
positions are repeated until they cover the longer text. A short further training is enough (Beltagy et al., section 5).

    weights     qkv 3·D²     global_qkv 3·D²     out D²       7·D² instead of 4·D²
    shapes      q, k, v B H T K     local, mixed B H T K     q′ B H N K for the N global tokens of a row
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from clearhead.configs import Full, LongformerConfig

from .attention import attend, merge_heads, split_heads
from .linear import linear
from .run import Context, runs


@runs(LongformerConfig)
def longformer(config: LongformerConfig, x: Float[np.ndarray, "B T D"], context: Context) -> Float[np.ndarray, "B T D"]:
    """Attention of all tokens by q, k, v; then the rows of the global tokens are replaced.

    Global tokens appear in both steps: in the first their keys are read by all tokens under the mask, and in the second
    their own rows are replaced. Their rows of the first step are computed and thrown away, a share of g/T.

    Cost: T·(2w + g) scores instead of T², with a window of w on either side and g global tokens.
    """
    width = config.width(x.shape[-1])
    parts = np.split(context.tap("qkv", linear(x, context["qkv.weight"], context.get("qkv.bias"))), 3, axis=-1)
    names = ("query", "key", "value")
    q, k, v = (context.tap(name, split_heads(part, width)) for name, part in zip(names, parts, strict=True))
    local = context.tap("local", attend([(q, config.mask)], k, v, context))
    mixed = replace_global_rows(config, local, x, context) if config.tokens and x.size else local
    concat = merge_heads(context.tap("mixed", mixed), context)
    return context.tap("out", linear(concat, context["out.weight"], context.get("out.bias")))


def replace_global_rows(
    config: LongformerConfig, local: Float[np.ndarray, "B H T K"], x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B H T K"]:
    """The rows of the global tokens, which read every position with their own projections; `local` in all others.

    Steps: find the global tokens of each row (their number may differ), project them to q′ and all positions to k′ and
    v′, attend without a window, and put the results into the rows of the global tokens.
    """
    dim, width = x.shape[-1], local.shape[-1]
    is_global = (context.positions < config.tokens) & context.readable  # B T
    # The places of the global tokens of each row: sorting ~is_global puts them first, in order.
    at = np.argsort(~is_global, axis=1, kind="stable")[:, : is_global.sum(1).max(initial=0)]  # B N
    if not at.shape[1]:
        return local
    weight, bias = context["global_qkv.weight"], context.get("global_qkv.bias")
    keys = context.tap("global_qkv", linear(x, weight[dim:], None if bias is None else bias[dim:]))
    k, v = (split_heads(part, width) for part in np.split(keys, 2, axis=-1))
    chosen = np.take_along_axis(x, at[..., None], axis=1)
    q = split_heads(linear(chosen, weight[:dim], None if bias is None else bias[:dim]), width)
    reader = replace(context.at("global"), positions=np.take_along_axis(context.positions, at, axis=1))
    if context.documents is not None:
        own = np.take_along_axis(context.documents, at, axis=1)
        reader = replace(reader, documents=own, key_documents=context.documents)
    mixed = attend([(q, Full())], k, v, reader)
    row = np.maximum(is_global.cumsum(1) - 1, 0)[:, None, :, None]  # which row of `mixed` belongs to each position
    return np.where(is_global[:, None, :, None], np.take_along_axis(mixed, row, axis=2), local)
