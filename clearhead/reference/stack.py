"""Residual branches, blocks and the stack of blocks.

The residual stream x runs through the whole model. Each sublayer reads it, computes something and adds it:

    pre       x + f(norm(x))          x ──┬── before ── f ── inside ──(+)── after ──
    post      norm(x + f(x))              └────────────────────────────┘
    sandwich  x + norm(f(norm(x)))        places without a norm are the identity

With "pre" the stream itself is never normalised, so gradients reach the first block unchanged and deep models train
without warm-up; the stack then needs a final norm. "post" is the original Transformer of 2017.

The residual stream. x runs through the whole model and every branch adds to it. Three consequences:

    gradients     ∂(x + f(x))/∂x = 1 + f′(x): the 1 carries the gradient to the first layer, however deep the model is
    iteration     each block refines what is there, so the output of a middle block can already be decoded (logit lens)
    size          variances of the branches add up, so the stream grows with depth, and norms keep the branches' inputs
                  at unit size

How a change travels. In a pre-norm model with L blocks, x_L = x_0 + Σ f_i(norm(x_i)). Every branch writes directly into
the final sum, so the contribution of each head and layer to a logit can be read off (direct logit attribution). And a
block can be removed: the model loses what it added, and usually still writes text.

Numbers for a feeling. If each of 2·L branches adds a vector of unit variance, the stream's standard deviation at the
top is √(1 + 2·L): 5 for L = 12, 14 for L = 96. Initialisations divide the branches' last matrices by √(2·L) to keep it
at 1 (GPT-2), or multiply each branch by a constant (`branch_scale`).

Pre or post. With the norm after the sum (post, 2017) the stream itself is rescaled at every layer, which shrinks the
path of the gradient; such models need a learning-rate warm-up. With the norm inside the branch (pre) the path stays
clean, and a final norm is needed before the head. Sandwich and inside norms also bound what a branch may add.
"""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from clearhead.configs import BlockConfig, ParallelBlockConfig, SharedStackConfig, StackConfig

from .run import Context, rename_weights, runs


@runs(BlockConfig)
def block(config: BlockConfig, x: Float[np.ndarray, "B T D"], context: Context) -> Float[np.ndarray, "B T D"]:
    """x <- after(x + inside(f(before(x)))) for f = mixer, then cross-attention, then feed-forward.

    The mixer moves information between positions, the feed-forward layer works on each position alone. pre: `before`
    is the norm (GPT-2, LLaMA); post: `after` is (2017, BERT); sandwich: `before` and `inside` (Gemma 2);
    inside: `inside` alone (OLMo 2).

    A pre-norm block of two branches, line by line:

        h = mixer(norm₁(x))       B T D     each position collects what it needs from others
        x = x + h
        h = ffn(norm₂(x))         B T D     each position computes on what it has collected
        x = x + h

    In a decoder with cross-attention there is a third branch between them, whose keys and values come from the encoder.
    """
    for name, branch in config.branches().items():
        places = dict.fromkeys(config.places(name), config.norm)
        residual = context.at(f"{name}_residual")
        h = residual.tap("before", residual.run("before", places.get("before"), x))
        reader = context.cross if name == "cross" and context.cross is not None else context
        h = reader.run(name, branch, h)
        h = residual.tap("inside", residual.run("inside", places.get("inside"), h))
        x = residual.tap("", x + h * x.dtype.type(config.branch_scale))
        x = residual.tap("after", residual.run("after", places.get("after"), x))
    return x


@runs(ParallelBlockConfig)
def parallel_block(
    config: ParallelBlockConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """x + mixer(norm(x)) + ffn(norm(x)): both branches read the same input.

    GPT-J and PaLM have one norm for both; GPT-NeoX has a second one, `ffn_norm`, for the feed-forward layer.

    The two matrix products can then run side by side.
    """
    h = context.tap("norm", context.run("norm", config.norm, x))
    mixed = context.tap("mixer_residual.inside", context.run("mixer", config.mixer, h))
    if config.ffn_norm is not None:
        h = context.tap("ffn_norm", context.run("ffn_norm", config.ffn_norm, x))
    fed = context.tap("ffn_residual.inside", context.run("ffn", config.ffn, h))
    return context.tap("residual", x + mixed + fed)


@runs(StackConfig)
@runs(SharedStackConfig)
def stack(config: StackConfig, x: Float[np.ndarray, "B T D"], context: Context) -> Float[np.ndarray, "B T D"]:
    """The blocks from the bottom up, and the final norm.

    In a shared stack (ALBERT) several layers use the weights of one block: layer i then finds them under that block's
    name.

    Depth and width: the weights of one block are about 12·D², so L blocks have 12·L·D². GPT-3 with L = 96 and D =
    12,288 has 174 billion of its 175 billion weights here.
    """
    if config.distances is not None:
        at = context.at("distances")
        table = at.tap("", at["weight"])
        if config.distances.norm is not None:
            table = at.tap("norm", at.run("norm", config.distances.norm, table))
        context = replace(context, distances=(config.distances, table))
    if config.score_bias is not None:
        table = context.tap("score_bias", context["score_bias.weight"])
        context = replace(context, score_bias=(config.score_bias, table))
    for i, config_of_block in enumerate(config.blocks):
        own, stored = (context.path_of(f"blocks.{number}") for number in (i, config.place(i)))
        weights = context.weights if own == stored else rename_weights(context.weights, stored, own)
        x = replace(context, weights=weights).run(f"blocks.{i}", config_of_block, x)
    return context.tap("final_norm", context.run("final_norm", config.final_norm, x))
