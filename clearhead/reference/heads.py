"""Heads: from the hidden states of the last block to logits or to one vector.

A language model scores every token of the vocabulary at every position. A classifier pools the positions to one
vector first. If a head is tied, its matrix is the embedding's table: the score of a token is the dot product of the
hidden state with the token's own vector. `table` is passed in for that.

    head              reads                   gives      used by
    LMHead            every position          B T V      GPT, LLaMA: the logits at t are for token t + 1
    MaskedLMHead      every position          B T V      BERT: the logits at t are for token t, which was masked
    FirstToken        the class token         B D        ViT, BERT
    LastToken         the last real token     B D        classifiers made of causal models
    MeanPool          all real tokens         B D        sentence embeddings
    ClassHead         one of the poolers      B C        classifiers

Logits are not probabilities. Softmax of them is, and the loss takes the logits themselves, which is more accurate.

Why tie: a token's input row and output row should mean the same word, and one table of V·D weights is saved. In a tied
model the table gets gradients from both ends.

From logits to a token. With logits z, p_i = exp(z_i/τ)/Σ_j exp(z_j/τ) at temperature τ: τ → 0 picks the largest, τ = 1
is what training saw. Adding a constant to all logits of a position changes nothing, so only differences count. A logit
that is larger by 2.3 means ten times the probability.

Cost: 2·D·V FLOPs per scored position. For a small model with a large vocabulary that is most of the work: with D = 768
and V = 50,257 it is 77 million, as much as 5.5 of GPT-2's 12 blocks. In decoding only the last position is scored.

Padding matters for poolers. The mean must not count it, and "first" and "last" mean the first and last real token,
since padding may stand on either side.

By hand, D = 2 and V = 3, tied: the table's rows are (1, 0), (0, 1) and (1, 1), and the hidden state is (2, 1). The
logits are its dot products with the rows, (2, 1, 3), so p = (0.24, 0.09, 0.67): the third token's vector points most
along the hidden state, and is also the longest. A bias would let a frequent token score high for any hidden state.

Mistakes that run without an error:

    logits of t taken for token t      a causal model's logits are for the next token; the text seems to stutter
    softmax of the logits as input     to the loss, or to sampling: everything is nearly uniform
    last position under padding        every short text of a batch is classified by the same padding vector
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from clearhead.configs import (
    ClassHeadConfig,
    FirstTokenConfig,
    LastTokenConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    MeanPoolConfig,
    PoolerConfig,
    SpanHeadConfig,
    TokenClassHeadConfig,
)

from .ffn import ACTIVATIONS
from .linear import linear
from .run import Context, runs

Table = Float[np.ndarray, "V Y"] | None  # Y = D, except in ALBERT
Hidden = Float[np.ndarray, "B T D"]


@runs(LMHeadConfig)
def lm_head(config: LMHeadConfig, x: Hidden, context: Context, table: Table = None) -> Float[np.ndarray, "B T V"]:
    """logits = x Wᵀ + b: the logits at position t score token t + 1.

    In generation only the last position's logits are needed; in training all T are, one prediction for each token,
    which is why a language model learns from every token of a text in one pass. `softcap` squeezes logits into ±softcap
    (Gemma 2).
    """
    if config.width is not None:  # the table is narrower than the model (OPT-350m)
        x = context.tap("narrow", linear(x, context["narrow.weight"]))
    weight = table if config.tied and table is not None else context["weight"]
    logits = linear(x, weight, context.get("bias")) * config.scale
    if config.softcap is not None:
        logits = config.softcap * np.tanh(logits / config.softcap)
    return context.tap("logits", logits)


@runs(MaskedLMHeadConfig)
def masked_lm_head(
    config: MaskedLMHeadConfig, x: Hidden, context: Context, table: Table = None
) -> Float[np.ndarray, "B T V"]:
    """A dense layer, an activation and a norm, then logits: at position t they score token t itself (BERT).

    The extra dense layer gives the model room to turn a vector that is good for reading into one that is good for
    scoring.
    """
    dense = linear(x, context["dense.weight"], context.get("dense.bias"))
    x = context.tap("dense", ACTIVATIONS[config.activation](dense))
    x = context.tap("norm", context.run("norm", config.norm, x))
    weight = table if config.tied and table is not None else context["weight"]
    return context.tap("logits", linear(x, weight, context["bias"]))


@runs(FirstTokenConfig)
def first_token(config: FirstTokenConfig, x: Hidden, context: Context, table: Table = None) -> Float[np.ndarray, "B D"]:
    """The first real position's vector: the class token of BERT and ViT.

    The class token has no content of its own. It attends to all others, and training makes it a summary.
    """
    return context.tap("pooled", first_real(x, context))


@runs(LastTokenConfig)
def last_token(config: LastTokenConfig, x: Hidden, context: Context, table: Table = None) -> Float[np.ndarray, "B D"]:
    """The last real position's vector: in a causal model the only one that has read the whole text.

    Which token that is differs by row: the argmax runs over the reversed `readable`, so padding at the end is skipped.
    """
    last = x.shape[1] - 1 - context.readable[:, ::-1].argmax(1)  # argmax finds the first True, from the back
    return context.tap("pooled", x[np.arange(len(x)), last])


@runs(MeanPoolConfig)
def mean_pool(config: MeanPoolConfig, x: Hidden, context: Context, table: Table = None) -> Float[np.ndarray, "B D"]:
    """The mean over real positions; padding does not count.

    Two texts of different lengths become comparable vectors. It is a good default if no class token was trained.
    """
    real = context.readable[:, :, None].astype(x.dtype)
    return context.tap("pooled", (x * real).sum(1) / np.maximum(real.sum(1), 1))


@runs(PoolerConfig)
def pooler(config: PoolerConfig, x: Hidden, context: Context, table: Table = None) -> Float[np.ndarray, "B D"]:
    """tanh (BERT) or another activation of a dense layer over the first real position.

    BERT was trained with this layer on the question whether two sentences follow each other, so a checkpoint has
    weights for it.
    """
    activation = np.tanh if config.activation == "tanh" else ACTIVATIONS[config.activation]
    dense = linear(first_real(x, context), context["dense.weight"], context["dense.bias"])
    return context.tap("dense", activation(dense))


@runs(ClassHeadConfig)
def class_head(config: ClassHeadConfig, x: Hidden, context: Context, table: Table = None) -> Float[np.ndarray, "B C"]:
    """Pool the positions to one vector, then score the C classes.

    For fine-tuning a pre-trained model: the pooler and the stack have learned already, and only this matrix of C·D
    weights starts at random. With C = 1 the score is a number to regress.
    """
    pooled = context.run("pool", config.pool, x)
    return context.tap("classes", linear(pooled, context["classes.weight"], context.get("classes.bias")))


@runs(TokenClassHeadConfig)
def token_class_head(
    config: TokenClassHeadConfig, x: Hidden, context: Context, table: Table = None
) -> Float[np.ndarray, "B T C"]:
    """The C classes of every token, as for names of persons and places (NER) or parts of speech.

    A word of several tokens is usually given the class of its first token; that is a convention of the data.
    """
    return context.tap("classes", linear(x, context["classes.weight"], context["classes.bias"]))


@runs(SpanHeadConfig)
def span_head(config: SpanHeadConfig, x: Hidden, context: Context, table: Table = None) -> Float[np.ndarray, "B T 2"]:
    """Scores of every token as the start and as the end of an answer (SQuAD).

    The answer is the pair start ≤ end with the largest sum of scores; softmax over positions gives probabilities.
    """
    return context.tap("span", linear(x, context["span.weight"], context["span.bias"]))


def first_real(x: Hidden, context: Context) -> Float[np.ndarray, "B D"]:
    """The vector of the first position that is not padding."""
    return x[np.arange(len(x)), context.readable.argmax(1)]
