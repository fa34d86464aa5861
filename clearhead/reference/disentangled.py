"""Disentangled attention: a score is the sum of what contents and distances say of each other (DeBERTa).

    score_ij = (q_i·k_j + q_i·K_{i−j} + Q_{i−j}·k_j) / √(3K)

q_i·k_j        content to content: "bank" looks for "river"
q_i·K_{i−j}    content to position: an article looks one token ahead
Q_{i−j}·k_j    position to content: what this token offers to the token two places behind

Q and K with a distance as index are projections of a table with one vector for each bucket of distances, shared by all
layers. Position is nowhere else, so a token's vector says what it is and not where it stands. A fourth term, distance
to distance, would say nothing about the text. He et al. (2021), "DeBERTa"; the buckets are those of version 2.
"""

import numpy as np
from jaxtyping import Float

from clearhead.configs import DisentangledAttentionConfig
from clearhead.reference.attention import attend, merge_heads, split_heads
from clearhead.reference.linear import linear
from clearhead.reference.run import Context, runs


@runs(DisentangledAttentionConfig)
def disentangled_attention(
    config: DisentangledAttentionConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """x -> q, k, v; the distance vectors -> Q, K; one softmax over the sum of their products."""
    width, scale = config.width(x.shape[-1]), x.dtype.type(config.scale(x.shape[-1]))
    projected = context.tap("qkv", linear(x, context["qkv.weight"], context["qkv.bias"]))
    parts = zip(("query", "key", "value"), np.split(projected, 3, -1), strict=True)
    q, k, v = (context.tap(name, split_heads(part, width)) for name, part in parts)  # B H T K each
    bias = context.tap("position_scores", position_scores(config, q, k, context))
    mixed = attend([(q, config.mask)], k, v, context, bias=bias * scale, scale=float(scale))
    return context.tap("out", linear(merge_heads(mixed, context), context["out.weight"], context["out.bias"]))


def position_scores(
    config: DisentangledAttentionConfig,
    q: Float[np.ndarray, "B H T K"],
    k: Float[np.ndarray, "B H S K"],
    context: Context,
) -> Float[np.ndarray, "B H T S"]:
    """q_i·K_{i−j} + Q_{i−j}·k_j: products with all vectors of the table, of which each pair takes that of its distance.

    Without matrices of their own, distances are projected by those of the contents: rows of queries, then of keys.
    """
    assert context.distances is not None, "the stack has distance vectors"
    vectors, table = context.distances
    name = "positions" if config.own_positions else "qkv"
    rows = len(config.projected) * config.heads * q.shape[-1]
    found = linear(table[None], context[f"{name}.weight"][:rows], context[f"{name}.bias"][:rows])
    parts = zip(config.projected, np.split(found, len(config.projected), -1), strict=True)
    turned = {term: split_heads(part, q.shape[-1])[0] for term, part in parts}  # H N K each
    distance = context.positions[:, :, None] - context.key_positions[:, None, :]
    places = vectors.places(distance, vectors.lookup)[:, None]  # B 1 T S
    total = np.zeros((*q.shape[:3], k.shape[2]), q.dtype)
    if "content to position" in config.terms:
        found = q @ turned["content to position"].swapaxes(-1, -2)  # B H T N
        total += np.take_along_axis(found, np.broadcast_to(places, total.shape), -1)
    if "position to content" in config.terms:
        found = turned["position to content"] @ k.swapaxes(-1, -2)  # B H N S
        total += np.take_along_axis(found, np.broadcast_to(places, total.shape), -2)
    return total
