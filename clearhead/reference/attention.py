"""Scaled dot-product attention, and the multi-head layer made of it.

    scores  = q kᵀ/√K             how well each key answers each query                T S
    weights = softmax(scores)     as shares that sum to 1; −∞ where a key is masked   T S
    out     = weights v           the mean of the values, weighted by the shares      T U

Each query (row of q) asks a question, each key (row of k) says what its position has to offer, and the answer is a
weighted mean of the values. It is a dictionary whose lookup is soft. Every position is compared with every other, so
the cost grows with T·S; nothing has to pass through a bottleneck, so distance does not matter.

Why it works. Suppose a key k_j equals the query and all other keys are orthogonal to it. Then score j is |q|²/√K and
all others are 0; for a long q the weight of j is near 1, and the output is v_j: an exact lookup. If several keys fit,
the output is a mean of their values. Everything in between is differentiable, so the model can learn what to look up.

Shapes, with the letters of `clearhead.shapes`:

    q  … T K      T queries                       scores, weights  … T S
    k  … S K      S keys, as wide as queries      out              … T U
    v  … S U      S values, of any width

In self-attention q, k and v are projections of the same x and S = T. In cross-attention k and v come from another text,
such as the sentence to translate. In decoding T = 1 and S grows by one with each token, since old keys and values are
kept: the KV cache.

Cost of one head: 2·T·S·K FLOPs for the scores and 2·T·S·U for the mixture, so 4·T·S·K in all if U = K. At K = 64 and
T = S = 1,024 that is 268 million. The scores also take T·S numbers of memory, unless they are computed tile by tile
(see `flash.py`).

Masks decide who may read whom. They are boolean, True = may read:

    causal         the past and itself          language models: token t may not see token t + 1, which it predicts
    padding        real tokens only             rows of a batch have different lengths
    window         the last w positions         Mistral; the cost falls from T² to T·w
    document       the same document only       several short texts packed into one row

A masked score becomes −∞ before the softmax, so its weight is exactly 0 and the others still sum to 1. Setting weights
to 0 after the softmax instead would leave rows that sum to less than 1, and would let masked keys change the sum.

By hand, two tokens with K = U = 1, so that the scale is 1. Let q = (2, 0), k = (1, 0) and v = (10, 20):

    scores    token 0: (2·1, 2·0) = (2, 0)          token 1: (0, 0)
    weights   token 0: (0.88, 0.12)                 token 1: (0.5, 0.5)
    out       token 0: 0.88·10 + 0.12·20 = 11.2     token 1: 15

Token 0 asks for what key 0 offers and gets mostly value 0. Token 1 asks for nothing in particular, its scores are
equal, and its output is the plain mean. Under a causal mask token 0 may read itself only, and gets exactly 10.

What attention cannot do. Its output is a mean of values that are there: with weights that sum to 1 it stays inside
their convex hull. It cannot count (the mean of five equal values is the same as of one), it has no idea of order unless
positions are put in, and it cannot compute a function of one token; the feed-forward layer does that.

Why a softmax and not the scores themselves. Positive weights that sum to 1 keep the size of the output that of a value,
however many keys there are. The exponential lets one key win clearly: a lead of 5 in score is a factor of 148 in
weight. `linear_attention.py` shows what is gained and lost without it.

Self-attention in a language model, during training: all T predictions are computed in one pass, because the causal mask
hides from each query what it must predict. That is the difference to a recurrent network, which needs T steps. In
generation the same weights give the same numbers one token at a time, since no key of the past changes when a new token
arrives. This is why the KV cache is exact, and why a layer that reads the future cannot have one.

What trained heads do. Attention weights can be read, and some kinds of heads are found in almost every language model:

    previous token     weight on position t − 1          joins the parts of words and names
    induction          after "… A B … A", reads B        continues a pattern that occurred before (Olsson et al. 2022)
    first token        nearly all weight on position 0   the head has nothing to say; a sink (Xiao et al. 2023)
    syntax             verb to its object, and the like  Clark et al. (2019), in BERT

The third kind is a consequence of the softmax: weights must sum to 1, so a head that wants to read nothing needs a
place to put them. Sinks (below) give it one.

Mistakes that run without an error, and how they show:

    no 1/√K                            trains, but slowly; the weights are almost one-hot from the start
    softmax over the wrong axis        columns sum to 1 instead of rows; the output is no mean
    heads by reshape alone             positions and heads are mixed; a causal model sees the future
    mask inverted                      only the future is read; the first row is empty
    mask of 0 and 1 added to scores    a masked key only loses a factor e, and still leaks
    key and query swapped in a mask    harmless for symmetric masks, wrong for causal ones
"""

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Real

from clearhead import configs
from clearhead.reference.checks import check_gradient
from clearhead.reference.linear import linear
from clearhead.reference.positions import alibi_slopes, causal_mask, relative_bias
from clearhead.reference.rotary import rotary_keys, rotary_queries
from clearhead.reference.run import Context, runs
from clearhead.reference.softmax import narrow, softmax, widen

Shape = tuple[int, ...]
Mask = Bool[np.ndarray, "... #T #S"] | Bool[np.ndarray, "#S"]
Bias = Real[np.ndarray, "... #T #S"] | Real[np.ndarray, "#S"]
Sinks = Float[np.ndarray, "... #T 1"]
Gradients = tuple[Float[np.ndarray, "..."] | None, ...]
Mixed = Float[np.ndarray, "... T U"]
if TYPE_CHECKING:
    MixedMaybeWeights = Any  # one array or two, by `return_weights`
else:
    MixedMaybeWeights = Mixed | tuple[Mixed, Float[np.ndarray, "... T S"]]


def attention(
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    v: Real[np.ndarray, "... S U"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    dropout: float = 0.0,
    rng: np.random.Generator | None = None,
    return_weights: bool = False,
) -> MixedMaybeWeights:
    """softmax(scale · q kᵀ + bias) v, with scale = 1/√K by default.

    Vaswani et al. (2017), "Attention Is All You Need", equation 1.

    mask            True where a query may read a key. A query that may read nothing gets zeros.
    causal          hide the future; the last query reads the last key
    bias            added to the scores, such as ALiBi
    softcap         scores become softcap · tanh(scores/softcap), so none exceeds it (Gemma 2); before the bias
    sinks           one more score in each row, of a key without a value: reading nothing (gpt-oss)
    dropout         share of weights set to 0 while training, drawn from `rng`
    return_weights  also return the weights, before dropout

    Leading dimensions broadcast: for grouped-query attention pass q [B,G,R,T,K] and k [B,G,1,S,K].

    Everything between q and the output happens in float32 or wider (`widen`), and the result is narrowed to the type of
    the inputs. In float16 a score of 70,000 would be infinite, and a sum of 10,000 equal weights would stop growing at
    0.25.

    Two keys, and a query that points along the first:

    >>> q, k, v = np.array([[4.0, 0.0]]), np.eye(2), np.array([[10.0], [20.0]])
    >>> out, weights = attention(q, k, v, return_weights=True)
    >>> weights.round(3), out.round(2)
    (array([[0.944, 0.056]]), array([[10.56]]))
    """
    check_attention(q, k, v, mask=mask, bias=bias, softcap=softcap)
    scores = attention_scores(q, k, bias, scale, softcap)
    weights = attention_weights(scores, mask, causal, sinks)
    kept = weights * dropout_multipliers(weights.shape, dropout, rng)
    mixed = narrow(kept @ widen(v), q, k, v)
    return (mixed, narrow(weights, q, k, v)) if return_weights else mixed


def attention_backward(
    d_out: Float[np.ndarray, "... T U"],
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    v: Real[np.ndarray, "... S U"],
    *,
    mask: Mask | None = None,
    bias: Bias | None = None,
    causal: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Sinks | None = None,
    dropout: float = 0.0,
    rng: np.random.Generator | None = None,
) -> Gradients:
    """d_q, d_k, d_v, d_bias (None without a bias), each in the shape of its input; with sinks d_sinks is the fifth.

    With P the weights and M the dropout multipliers, going backward through out = (M∘P) v and P = softmax(scores):

        d_v = (M∘P)ᵀ d_out                            each value is read by the queries that weigh it
        d_P = M ∘ (d_out vᵀ)                          how much better the output were with more of each value
        d_scores = P ∘ (d_P − Σ_S d_P∘P)              the softmax: more than the mean is raised, less is lowered
        d_q = scale · d_scores k,   d_k = scale · d_scoresᵀ q,   d_bias = d_scores

    With a softcap, d_scores is multiplied by 1 − tanh² on its way to q and k. A sink's weight 1 − Σ_S P multiplies no
    value, so its d_P is 0 and d_sinks = −(1 − Σ_S P) · Σ_S d_P∘P. Under dropout, `rng` must be in the
    state that the forward's was in, so that the same weights are dropped.

    Cost: four products of the size T·S·K, twice those of the forward pass. The weights are computed again here instead
    of being kept, which trades a little time for T·S numbers of memory.

    Why the softmax's backward subtracts a mean. Weights of a row sum to 1, so raising one lowers the others. If all d_P
    of a row are equal, nothing can be gained by moving weight, and d_scores is 0. A key whose d_P is above the weighted
    mean gets a larger score, one below it a smaller score, each in proportion to its present weight: a key with weight
    0 cannot be found again by this gradient.

    >>> q, k, v = np.zeros((1, 2)), np.eye(2), np.array([[1.0], [3.0]])
    >>> d_q, *_ = attention_backward(np.ones((1, 1)), q, k, v, scale=1.0)
    >>> d_q                                             # towards key 1, whose value raises the output
    array([[-0.5,  0.5]])
    """
    check_attention(q, k, v, mask=mask, bias=bias, softcap=softcap)
    check_gradient(d_out, *lead_shape(q, k, v, mask, bias), q.shape[-2], v.shape[-1])
    weights = attention_weights(attention_scores(q, k, bias, scale, softcap), mask, causal, sinks)
    kept = dropout_multipliers(weights.shape, dropout, rng)
    wide_q, wide_k, wide_v, d_mixed = widen(q), widen(k), widen(v), widen(d_out)
    d_weights = d_mixed @ wide_v.swapaxes(-1, -2) * kept  # … T S
    mean = (d_weights * weights).sum(-1, keepdims=True)
    d_scores = weights * (d_weights - mean)
    # From here to q and k the gradient passes the cap and the scale; the bias is added after both and sees neither.
    d_bias = None if bias is None else sum_to(d_scores, bias)
    d_scores = d_scores * softcap_slope(attention_scores(q, k, None, scale), softcap)
    scale = default_scale(q, scale)
    d_q = scale * d_scores @ wide_k
    d_k = scale * d_scores.swapaxes(-1, -2) @ wide_q
    d_v = (weights * kept).swapaxes(-1, -2) @ d_mixed
    found = sum_to(d_q, q), sum_to(d_k, k), sum_to(d_v, v), d_bias
    return found if sinks is None else (*found, sum_to(-(1 - weights.sum(-1, keepdims=True)) * mean, sinks))


def attention_scores(
    q: Real[np.ndarray, "... T K"],
    k: Real[np.ndarray, "... S K"],
    bias: Bias | None = None,
    scale: float | None = None,
    softcap: float | None = None,
) -> Float[np.ndarray, "... T S"]:
    """scale · q kᵀ, capped, + bias: how well each key answers each query.

    The scores of one query are a linear function of it, so scaling q by 2 sharpens its softmax. A bias of −∞ hides a
    key.

    >>> attention_scores(np.array([[3.0, 4.0]]), np.array([[3.0, 4.0], [0.0, 1.0]])).round(2)      # 25/√2 and 4/√2
    array([[17.68,  2.83]])
    """
    scores = widen(q) @ widen(k).swapaxes(-1, -2) * default_scale(q, scale)
    if softcap is not None:
        scores = softcap * np.tanh(scores / softcap)
    return scores if bias is None else scores + widen(bias)


def softcap_slope(scores: Float[np.ndarray, "..."], softcap: float | None) -> Float[np.ndarray, "..."] | float:
    """The derivative of softcap · tanh(scores/softcap): 1 near 0, falling to 0 where the cap is reached.

    A score far above the cap gets no gradient: it cannot grow further, and learns to come down only slowly.
    With a cap of 50, a score of 10 becomes 9.87 with slope 0.96, and a score of 100 becomes 48.2 with slope 0.07.

    >>> softcap_slope(np.array([0.0, 10.0, 100.0]), 50.0).round(2)
    array([1.  , 0.96, 0.07])
    """
    return 1.0 if softcap is None else 1 - np.tanh(scores / softcap) ** 2


def attention_weights(
    scores: Float[np.ndarray, "... T S"],
    mask: Mask | None = None,
    causal: bool = False,
    sinks: Sinks | None = None,
) -> Float[np.ndarray, "... T S"]:
    """softmax over the keys that may be read: each row sums to 1, or to 0 if it may read none.

    `sinks` is one more score in each row, of a key that is always there and has no value: rows then sum to less than 1.

    Masked scores become −∞, not −10⁹: exp(−∞) is exactly 0, in every precision.

    A sink by hand: two scores of 0 and a sink of 0 are three equal terms. Each key gets 1/3, and 1/3 reads nothing.

    >>> attention_weights(np.zeros((1, 2)), sinks=np.zeros((1, 1))).round(2)
    array([[0.33, 0.33]])

    >>> attention_weights(np.zeros((3, 3)), causal=True).round(2)
    array([[1.  , 0.  , 0.  ],
           [0.5 , 0.5 , 0.  ],
           [0.33, 0.33, 0.33]])
    """
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    if causal:
        scores = np.where(causal_mask(*scores.shape[-2:]), scores, -np.inf)
    if sinks is None:
        return softmax(scores)
    column = np.broadcast_to(sinks, (*scores.shape[:-1], 1))
    return softmax(np.concatenate((scores, column), -1))[..., :-1]


def dropout_multipliers(
    shape: Shape, dropout: float, rng: np.random.Generator | None
) -> Float[np.ndarray, "..."] | float:
    """Inverted dropout: 0 with probability `dropout`, otherwise 1/(1 − dropout), so that the mean stays 1.

    Dropping weights makes the model robust to losing a single key. At test time nothing is dropped and nothing has to
    be rescaled, because the mean was kept while training (Srivastava et al. 2014).
    """
    if not 0 <= dropout < 1:
        raise ValueError(f"dropout is {dropout}, but must be a probability in [0, 1)")
    if dropout == 0:
        return 1.0
    if rng is None:
        raise ValueError(f"dropout={dropout} needs rng=, such as rng=np.random.default_rng(0)")
    return (rng.random(shape) >= dropout) / (1 - dropout)


def default_scale(q: Any, scale: float | None) -> float:
    """1/√K: a dot product of K terms of variance 1 has variance K, and dividing by √K makes that 1 again.

    Without it the scores of wide heads are large, the softmax is all but one-hot, and its gradient vanishes
    (Vaswani et al., footnote 4).

    With K = 64: a score of independent unit vectors is about ±8 without the scale, and e⁸ is 2,981 times e⁰.

    >>> default_scale(np.zeros((2, 64)), None)
    0.125
    """
    return q.shape[-1] ** -0.5 if scale is None else scale


# --- The layer of a model --------------------------------------------------------------------------------------------


@runs(configs.AttentionConfig)
def multi_head_attention(
    config: configs.AttentionConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """x -> q, k, v by one matrix -> heads -> softmax(qkᵀ/√K)·v -> heads side by side -> out.

    H heads attend independently, each with its own K-wide queries and keys: one may follow syntax while another copies
    names. The rows of the matrix are H·K for the queries, G·K for the keys, G·U for the values. With G < H
    (grouped-query attention), H/G query heads share one key head, and the KV cache shrinks by that factor.
    In cross-attention the key and value rows read the source.

    Why several heads: one softmax row is one distribution, so one head can look at one kind of place at a time. H heads
    of width D/H cost the same as one head of width D. The weights are 4·D² for G = H:

        W_qkv   (H·K + G·K + G·U) × D        queries, keys and values, in one matrix so that one product computes them
        W_out   D × H·U                      mixes the heads back into the residual stream

    Kinds of sharing, from the largest cache to the smallest:

        MHA     G = H        every query head has its own keys         GPT-2
        GQA     1 < G < H    H/G query heads share keys                LLaMA-2 70B, Mistral; Ainslie et al. (2023)
        MQA     G = 1        all query heads share one key head        Falcon-7B; Shazeer (2019)
        MLA     latent       keys are computed from a short vector     DeepSeek-V2; see `latent.py`
    In numbers, for GPT-2 (D = 768, H = G = 12, K = U = 64) and a text of 1,024 tokens:

        qkv       1,024 × 2,304         3.6 GFLOP       1.8 million weights
        scores    12 × 1,024 × 1,024    1.6 GFLOP       none; half of them masked
        mixed     12 × 1,024 × 64       1.6 GFLOP       none
        out       1,024 × 768           1.2 GFLOP       0.6 million weights

    The cache that generation keeps is G·(K + U) numbers for each token and layer. LLaMA-2 with 70B parameters has 64
    query heads but G = 8: 2,048 numbers instead of 16,384, so 4,096 tokens in 80 layers take 1.3 GB in float16, not
    10.7 GB.

    What the options are for. All of them keep scores from growing until the softmax is one-hot and learns no more:

        qk_norm     queries and keys have a fixed length, so |score| ≤ the product of their gains (Qwen 3, OLMo 2)
        softcap     scores saturate at ±softcap (Gemma 2); the slope never becomes exactly 0
        qkv_clip    each coordinate is cut (OLMo, DBRX)
        sinks       an extra key without a value takes the weight of a head that has nothing to read (gpt-oss)

    Order matters in three places. The norm of q and k (`qk_norm`) comes before the rotation, because a norm with a gain
    would not commute with it. The rotation comes before the cache, so cached keys need no work at later steps. The bias
    of ALiBi is added to the scores, so it needs positions of the keys and not the keys themselves.
    """
    K, U = config.widths(x.shape[-1])
    weight, bias = context["qkv.weight"], context.get("qkv.bias")
    rows = slice(0, config.heads * K), slice(config.heads * K, None)  # of the queries, and of keys and values
    if context.source is None:
        qkv = context.tap("qkv", clip(linear(x, weight, bias), config.qkv_clip))
        q, kv = qkv[..., rows[0]], qkv[..., rows[1]]
    else:
        q, kv = (
            clip(linear(read, weight[part], None if bias is None else bias[part]), config.qkv_clip)
            for read, part in zip((x, context.source), rows, strict=True)
        )
    # One matrix for three projections: its rows are those of all query heads, then all key heads, then all value heads.
    q = context.tap("query", split_heads(q, K))  # B H T K
    k = context.tap("key", split_heads(kv[..., : config.groups * K], K))  # B G S K
    v = context.tap("value", split_heads(kv[..., config.groups * K :], U))  # B G S U
    q = context.tap("query_norm", context.run("query_norm", config.qk_norm, q))
    k = context.tap("key_norm", context.run("key_norm", config.qk_norm, k))
    queries = [(q, config.mask)]
    if config.rotary is not None:  # positions enter q and k here; the cache below holds rotated keys
        rotated = rotary_queries(config.rotary, q, context.positions)
        masks = config.rotary.queries(config.mask)
        queries = [(context.tap(name, rotated[name]), mask) for name, mask in masks.items()]
        k = context.tap("key_rotated", rotary_keys(config.rotary, k, context.positions))
    k, v = context.append("key", k, 2), context.append("value", v, 2)  # the KV cache, if there is a state
    bias_of_distance = distance_bias(config, context)
    sinks = None if config.sinks is None else context.tap("sinks", context["sinks.weight"])
    mixed = attend(
        queries, k, v, context, bias=bias_of_distance, scale=config.scale, softcap=config.softcap, sinks=sinks
    )
    return context.tap("out", linear(merge_heads(mixed, context), context["out.weight"], context.get("out.bias")))


def attend(
    queries: Sequence[tuple[Float[np.ndarray, "B H T K"], configs.Mask]],
    k: Float[np.ndarray, "B G S K"],
    v: Float[np.ndarray, "B G S U"],
    context: Context,
    *,
    bias: Float[np.ndarray, "B H T S"] | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: Float[np.ndarray, "H"] | None = None,
) -> Float[np.ndarray, "B H T U"]:
    """`attention` of a layer, step by step; the R = H/G query heads of a group share its key and value head.

    Usually there is one kind of query with one mask. Dual chunk attention has three: each reads other keys, all in one
    softmax.

    Grouped queries in shapes: q is B H T K with H = G·R. Seen as B G R T K, it meets keys B G 1 S K: NumPy repeats each
    key head for the R query heads of its group without copying it. MHA has R = 1, multi-query attention has G = 1.
    Head h belongs to group h // R. Mixing the two up (h % G) gives a model that runs and reads the wrong keys.
    """
    B, H, T, _ = queries[0][0].shape
    G, S = k.shape[1:3]

    def group_heads(x: np.ndarray) -> np.ndarray:
        return x.reshape(B, G, H // G, T, x.shape[-1])  # B G R T …: broadcasts against keys B G 1 S …

    kinds = [
        attention_scores(group_heads(q), k[:, :, None], None, scale, softcap).reshape(B, H, T, S) for q, _ in queries
    ]
    allowed = [context.attention_mask(mask) for _, mask in queries]
    # Each pair takes the score of the kind of query whose mask allows it. The masks do not overlap.
    scores = kinds[0]
    for may, kind in zip(allowed[1:], kinds[1:], strict=True):
        scores = np.where(may, kind, scores)
    scores = context.tap("scores", scores if bias is None else scores + widen(bias))
    column = None if sinks is None else sinks[:, None, None]
    weights = context.tap("weights", attention_weights(scores, np.logical_or.reduce(allowed), sinks=column))
    mixed = (group_heads(weights) @ v[:, :, None]).reshape(B, H, T, v.shape[-1])
    return context.tap("mixed", mixed.astype(v.dtype))


def distance_bias(config: configs.AttentionConfig, context: Context) -> Float[np.ndarray, "B H T S"] | None:
    """What the distances of this pass add to the scores: ALiBi's −slope_h·|i − j|, or a row of T5's table.

    Positions are used, not indices, so it is right in decoding too, where one query stands at the end of many keys.

    ALiBi belongs to a layer's config; T5's table is learned once and used by all layers of a stack, so it comes in the
    context. Cross-attention has neither: the distance between a target and a source position means nothing.
    """
    distance = context.key_positions[:, None, None, :] - context.positions[:, None, :, None]  # B 1 T S
    if config.score_bias is not None:
        return -config.score_bias.scale * np.array(alibi_slopes(config.heads))[:, None, None] * abs(distance)
    if context.score_bias is None or context.source is not None:
        return None
    of_buckets, table = context.score_bias
    return relative_bias(distance[:, 0], table, of_buckets.starts, of_buckets.mirrored)


def clip(x: Float[np.ndarray, "..."], limit: float | None) -> Float[np.ndarray, "..."]:
    """x cut to ±limit (OLMo, DBRX): no single coordinate of a query or key can dominate its scores.

    >>> clip(np.array([-9.0, 0.5]), 1.0)
    array([-1. ,  0.5])
    """
    return x if limit is None else np.clip(x, -limit, limit)


def split_heads(x: Float[np.ndarray, "B T HK"], width: int) -> Float[np.ndarray, "B H T K"]:
    """[B, T, H·K] -> [B, H, T, K]: reshape, then transpose. A reshape alone would mix positions and heads.

    >>> split_heads(np.arange(8).reshape(1, 2, 4) * 1.0, 2)[0, 0]         # head 0: the first two columns of every token
    array([[0., 1.],
           [4., 5.]])
    """
    B, T, columns = x.shape
    return x.reshape(B, T, columns // width, width).transpose(0, 2, 1, 3)


def merge_heads(x: Float[np.ndarray, "B H T U"], context: Context) -> Float[np.ndarray, "B T HU"]:
    """[B, H, T, U] -> [B, T, H·U]: undo `split_heads`.

    Head h fills columns h·U to (h + 1)·U. The output matrix then adds the heads' contributions, one block of columns
    each.

    Seen so, W_out is H matrices of U columns, and out = Σ_h W_out,h · mixed_h: heads never interact inside the layer.
    Removing one head is setting its block to 0, which is what ablation does.
    """
    B, H, T, U = x.shape
    return context.tap("concat", x.transpose(0, 2, 1, 3).reshape(B, T, H * U))


# --- Shapes and checks -----------------------------------------------------------------------------------------------


def sum_to(d_x: Float[np.ndarray, "..."], x: Real[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """The backward of broadcasting: x was repeated along some axes, so the gradient is summed over them.

    If y = x + x then ∂y/∂x = 2: a value that is used twice gets the gradients of both uses. Broadcasting is the same
    with many uses. In grouped-query attention it makes the gradient of a key head the sum over the query heads that
    share it.

    >>> sum_to(np.ones((3, 2, 4)), np.zeros((1, 4)))            # used 3 · 2 times
    array([[6., 6., 6., 6.]])
    """
    d_x = d_x.sum(tuple(range(d_x.ndim - x.ndim)))
    repeated = tuple(axis for axis in range(x.ndim) if x.shape[axis] == 1)
    return narrow(np.asarray(d_x.sum(repeated, keepdims=True)), x)


def lead_shape(*arrays: Any) -> Shape:
    """The common leading dimensions, all but the last two, after broadcasting.

    >>> lead_shape(np.zeros((5, 1, 3, 4)), np.zeros((2, 7, 4)), None)
    (5, 2)
    """
    sizes = zip_longest(*(reversed(x.shape[:-2]) for x in arrays if x is not None), fillvalue=1)
    distinct = [set(size) - {1} or {1} for size in sizes]
    if any(len(size) > 1 for size in distinct):
        shapes = ", ".join(str(tuple(x.shape[:-2])) for x in arrays if x is not None)
        raise ValueError(f"leading dimensions do not broadcast: {shapes}")
    return tuple(size.pop() for size in reversed(distinct))


def check_attention(
    q: Any, k: Any, v: Any, *, mask: Any = None, bias: Any = None, softcap: float | None = None, block: int = 1
) -> None:
    """Raise one clear sentence for arguments that do not fit, in either engine, before any arithmetic.

    The mask must be boolean. A mask of 0 and 1 could mean "multiply", "add" or "may read", and each gives another
    result. The message lists all shapes, because the wrong argument is often not the one where the error shows.
    """
    if mask is not None and not str(mask.dtype).endswith("bool"):
        raise TypeError(
            f"mask is {mask.dtype}, but a mask is boolean, True = may attend; to add to the scores use bias="
        )
    if block < 1:
        raise ValueError(f"block is {block}, but must be a number of positions, at least 1")
    if softcap is not None and not softcap > 0:
        raise ValueError(f"softcap is {softcap}, but must be above 0; leave it out for no cap")
    named = {"q": q, "k": k, "v": v, "mask": mask, "bias": bias}
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items() if x is not None)
    fits = (
        min(q.ndim, k.ndim, v.ndim) >= 2
        and 0 < q.shape[-1] == k.shape[-1]
        and k.shape[-2] == v.shape[-2]
        and all(_fits(x, (q.shape[-2], k.shape[-2])) for x in (mask, bias) if x is not None)
    )
    try:
        lead_shape(q, k, v, mask, bias)
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(
            "attention takes q (…, T, K), k (…, S, K), v (…, S, U), and mask and bias that broadcast to (…, T, S), "
            f"not {shapes}"
        )


def _fits(x: Any, pattern: tuple[int, int]) -> bool:
    """Whether the last two dimensions of x broadcast to `pattern`: each is equal or 1, counted from the right.

    >>> _fits(np.zeros((1, 5)), (3, 5)), _fits(np.zeros((3, 1)), (3, 5)), _fits(np.zeros((5, 3)), (3, 5))
    (True, True, False)
    """
    trailing = tuple(x.shape[-2:])
    return all(size in (1, whole) for size, whole in zip(trailing[::-1], pattern[::-1], strict=False))
