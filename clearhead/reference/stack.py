"""Residual branches, blocks and the stack of blocks.

The residual stream x runs through the whole model. Each sublayer reads it, computes something and adds it:

    pre       x + f(norm(x))          x ──┬── before ── f ── inside ──(+)── after ──
    post      norm(x + f(x))              └────────────────────────────┘
    sandwich  x + norm(f(norm(x)))        places without a norm are the identity

With "pre" the stream itself is never normalised, so gradients reach the first block unchanged and deep models train
without warm-up; the stack then needs a final norm. "post" is the original Transformer of 2017.
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
    """
    if config.score_bias is not None:
        table = context.tap("score_bias", context["score_bias.weight"])
        context = replace(context, score_bias=(config.score_bias, table))
    for i, config_of_block in enumerate(config.blocks):
        own, stored = (context.path_of(f"blocks.{number}") for number in (i, config.place(i)))
        weights = context.weights if own == stored else rename_weights(context.weights, stored, own)
        x = replace(context, weights=weights).run(f"blocks.{i}", config_of_block, x)
    return context.tap("final_norm", context.run("final_norm", config.final_norm, x))
