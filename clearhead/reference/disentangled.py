"""Disentangled attention: a score is the sum of what contents and distances say of each other (DeBERTa).

    score_ij = (q_i·k_j + q_i·K_{i−j} + Q_{i−j}·k_j) / √(3K)

q_i·k_j        content to content: "bank" looks for "river"
q_i·K_{i−j}    content to position: an article looks one token ahead
Q_{i−j}·k_j    position to content: what this token offers to the token two places behind

Q and K with a distance as index are projections of a table with one vector for each bucket of distances, shared by all
layers. Position is nowhere else, so a token's vector says what it is and not where it stands. A fourth term, distance
to distance, would say nothing about the text. He et al. (2021), "DeBERTa"; the buckets are those of version 2.

    shapes     q, k, v   B H T K    from x         Q, K of distances   H N K    from the table of N vectors
               q_i·K     B H T N    then gathered to B H T S by the distance of each pair
               Q·k_j     B H N S    then gathered likewise, along the other axis

Why multiply first and gather second. A vector for every pair would be T·S·K numbers: 16.8 million for each head of
DeBERTa-v3 at 512 tokens. There are only N = 512 distances, so every query is multiplied by all N vectors, and each pair
picks the product of its distance. The largest array is then T·N, as large as the scores themselves.

Why √(3K). Each of the three terms sums K products of variance 1, so the sum has the variance 3K. With only one of the
two position terms it is √(2K).

By hand, K = 1, two tokens with q = (1, 2) and k = (3, 1). Let K_{−1}, K_0, K_1 = ½, 0, −½ and all Q be 0:

    contents       token 0: (3, 1)            token 1: (6, 2)
    positions      token 0: (0, 1·½)          token 1: (2·(−½), 0)
    sum            token 0: (3, 1.5)          token 1: (5, 2)             then /√3 and the softmax

The head prefers what comes next (i − j = −1) to what came before. How much depends on the query: token 1 asks twice as
strongly. T5's bias cannot do that. It is one number for each head and distance, the same for every token.

Mistakes that run without an error: j − i in place of i − j (the model reads a mirror image of its positions), and √K in
place of √(3K) (all weights are too sharp). Both load a checkpoint, and only its accuracy tells.
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
    """x -> q, k, v; the distance vectors -> Q, K; one softmax over the sum of their products.

    Shapes: x B T D; q, k, v B H T K; position_scores and scores B H T S; out B T D. The position terms enter `attend`
    as a bias, so the softmax and the masks are those of plain attention.
    """
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
    # Row `span` is distance 0; rows after it are keys before the query, rows before it are keys after the query.
    places = vectors.places(distance, vectors.lookup)[:, None]  # B 1 T S
    total = np.zeros((*q.shape[:3], k.shape[2]), q.dtype)
    if "content to position" in config.terms:
        found = q @ turned["content to position"].swapaxes(-1, -2)  # B H T N
        total += np.take_along_axis(found, np.broadcast_to(places, total.shape), -1)
    if "position to content" in config.terms:
        found = turned["position to content"] @ k.swapaxes(-1, -2)  # B H N S
        total += np.take_along_axis(found, np.broadcast_to(places, total.shape), -2)
    return total
