"""Linformer: attention over W fixed mixtures of all positions instead of over all S positions.

    keys = (E X) W_K        values = (F X) W_V        E, F: W × S, learned

Attention weights are often close to low rank, so a few mixtures of the keys say almost as much as all of them. The
scores are T × W, so the cost is linear in the length. E and F have a column for each position, which fixes the longest
text, and mix past and future, so the layer cannot be causal. Wang et al. (2020), "Linformer".

    shapes     E, F   W × S        keys, values   W rows instead of S        scores   T × W

Why low rank is enough. The T × S matrix of weights is often well approximated by one of rank W ≪ S (Wang et al.,
theorem 1, by the Johnson–Lindenstrauss lemma). Linformer does not approximate a trained model's weights; it is trained
with the W rows from the start, and learns mixtures that lose little.

    by hand     S = 4 positions, W = 2, E = (½ ½ 0 0), (0 0 ½ ½)
                key 0 is the mean of positions 0 and 1, key 1 that of positions 2 and 3: attention over two halves

At n = 4,096 and W = 256 the scores are 16 times smaller. What is lost: a mixture has no position of its own, so no mask
over keys can be applied to it, and a text longer than E has columns for cannot be read at all.

    FLOPs of one layer, D = 768, n = 4,096, W = 256          attention         Linformer
    mixtures E·X and F·X             2 · 2·W·n·D             none              3.2 billion
    scores and weighted mean         4·n²·D or 4·n·W·D       51.5 billion      3.2 billion

E and F together have 2·W·length weights in each layer, 2.1 million here; with F = E half of that. They are learned for
each position, so position 4,095 is trained only by texts that are that long.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from clearhead.configs import LinformerConfig

from .attention import attend, merge_heads, split_heads
from .linear import linear
from .run import Context, runs


@runs(LinformerConfig)
def linformer(config: LinformerConfig, x: Float[np.ndarray, "B T D"], context: Context) -> Float[np.ndarray, "B T D"]:
    """keys = (E·X)·W_K and values = (F·X)·W_V have W rows each, and every query reads all of them.

    Padding is left out of the mixtures, and each document has mixtures of its own. If `shared`, F = E.

    Shapes: E, F W × length; mixtures B W D; q B H T K; k B H W K; v B H W U; scores B H T W; out B T D.

    A text shorter than `length` uses the first columns of E and F, so column j always belongs to position j.

    Why it is cheaper: E·X costs W·S·D once, then scores cost T·W·K per head. Nothing has both T and S as factors.
    """
    if context.documents is not None:
        return by_document(config, x, context)
    last = context.positions.max(initial=0)
    if last >= config.length:
        raise ValueError(f"position {last} is past the {config.length} positions of this Linformer")
    # A mask would come too late: padding cannot be taken out of a mixture. So its vectors are set to 0 first.
    real = x * context.readable[..., None]
    # Column j of E belongs to position j. Taking columns by position keeps that right for rows padded on the left.
    mixtures = [
        context.tap(name, context[f"{name}.weight"].T[context.positions].swapaxes(1, 2) @ real)  # B W D
        for name in ("key_rows", "value_rows")[: 1 if config.shared else 2]
    ]
    K, U = config.widths(x.shape[-1])
    query, key, value = np.split(context["qkv.weight"], [config.heads * K, 2 * config.heads * K])
    q = context.tap("query", split_heads(linear(x, query), K))
    k = context.tap("key", split_heads(linear(mixtures[0], key), K))
    v = context.tap("value", split_heads(linear(mixtures[-1], value), U))
    # To `attend`, the W mixtures are keys at positions 0 … W − 1 that everybody may read.
    rows = np.broadcast_to(np.arange(config.rows), (len(x), config.rows))
    reader = replace(context, key_positions=rows, readable=np.ones_like(rows, dtype=bool))
    mixed = attend([(q, config.mask)], k, v, reader)
    return context.tap("out", linear(merge_heads(mixed, context), context["out.weight"], context.get("out.bias")))


def by_document(config: LinformerConfig, x: Float[np.ndarray, "B T D"], context: Context) -> Float[np.ndarray, "B T D"]:
    """Run each document as if the rest of its row were padding.

    A mixture over a whole row would let documents read each other, since no mask applies after mixing.

    The cost is that of one pass for each document. Models that pack many short texts into a row should not be
    Linformers.
    """
    assert context.documents is not None
    out = np.zeros_like(x)
    for document in np.unique(context.documents):
        inside = context.documents == document
        alone = replace(context, documents=None, readable=context.readable & inside, record=None)
        out[inside] = linformer(config, x, alone)[inside]
    return out
