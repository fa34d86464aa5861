"""Residual branches, blocks and the stack of blocks."""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from clearhead.configs import BlockConfig, ParallelBlockConfig, SharedStackConfig, StackConfig
from clearhead.configs.stack import PLACES

from .run import Here, renamed, runs


@runs(BlockConfig)
def block(config: BlockConfig, x: Float[np.ndarray, "B T D"], here: Here) -> Float[np.ndarray, "B T D"]:
    """x <- after(x + inside(f(before(x)))) for f = mixer, cross-attention, feed-forward.

    pre: `before` is the norm (GPT-2, LLaMA); post: `after` is (2017, BERT); sandwich: `before` and `inside` (Gemma 2).
    """
    places = dict.fromkeys(PLACES[config.placement], config.norm)
    for name, branch in config.branches().items():
        residual = here.at(f"{name}_residual")
        h = residual.note("before", residual.run("before", places.get("before"), x))
        reader = here.cross if name == "cross" and here.cross is not None else here
        h = reader.run(name, branch, h)
        h = residual.note("inside", residual.run("inside", places.get("inside"), h))
        x = residual.note("", x + h)
        x = residual.note("after", residual.run("after", places.get("after"), x))
    return x


@runs(ParallelBlockConfig)
def parallel_block(
    config: ParallelBlockConfig, x: Float[np.ndarray, "B T D"], here: Here
) -> Float[np.ndarray, "B T D"]:
    """x + mixer(norm(x)) + ffn(norm(x))."""
    h = here.note("norm", here.run("norm", config.norm, x))
    mixed = here.note("mixer_residual.inside", here.run("mixer", config.mixer, h))
    fed = here.note("ffn_residual.inside", here.run("ffn", config.ffn, h))
    return here.note("residual", x + mixed + fed)


@runs(StackConfig)
@runs(SharedStackConfig)
def stack(config: StackConfig, x: Float[np.ndarray, "B T D"], here: Here) -> Float[np.ndarray, "B T D"]:
    """The blocks from the bottom up, and the final norm."""
    for i, config_of_block in enumerate(config.blocks):
        own, place = (here.named(f"blocks.{number}") for number in (i, config.place(i)))
        weights = here.weights if own == place else renamed(here.weights, place, own)
        x = replace(here, weights=weights).run(f"blocks.{i}", config_of_block, x)
    return here.note("final_norm", here.run("final_norm", config.final_norm, x))
