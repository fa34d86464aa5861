"""Longformer's attention: a window, and global tokens that read and are read with projections of their own."""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from clearhead.configs import Full, LongformerConfig

from .attention import attend, merge_heads, split_heads
from .linear import linear
from .run import Here, runs


@runs(LongformerConfig)
def longformer(config: LongformerConfig, x: Float[np.ndarray, "B T D"], here: Here) -> Float[np.ndarray, "B T D"]:
    """Everyone reads by q, k and v; the first tokens read all by a second set, and their rows are taken from there."""
    width = config.width(x.shape[-1])
    parts = np.split(here.note("qkv", linear(x, here["qkv.weight"], here.get("qkv.bias"))), 3, axis=-1)
    q, k, v = (
        here.note(name, split_heads(part, width)) for name, part in zip(("query", "key", "value"), parts, strict=True)
    )
    local = here.note("local", attend([(q, config.mask)], k, v, here))
    mixed = with_global(config, local, x, here) if config.tokens and x.shape[1] else local
    concat = merge_heads(here.note("mixed", mixed), here)
    return here.note("out", linear(concat, here["out.weight"], here.get("out.bias")))


def with_global(
    config: LongformerConfig, local: Float[np.ndarray, "B H T K"], x: Float[np.ndarray, "B T D"], here: Here
) -> Float[np.ndarray, "B H T K"]:
    """The mixture of the global tokens, which read everyone, in their rows; `local` in all others."""
    dim, width = x.shape[-1], local.shape[-1]
    is_global = (here.positions < config.tokens) & here.readable  # B T
    at = np.argsort(~is_global, axis=1, kind="stable")[:, : is_global.sum(1).max(initial=0)]  # B N
    if not at.shape[1]:
        return local
    weight, bias = here["global_qkv.weight"], here.get("global_qkv.bias")
    keys = here.note("global_qkv", linear(x, weight[dim:], None if bias is None else bias[dim:]))
    k, v = (split_heads(part, width) for part in np.split(keys, 2, axis=-1))
    chosen = np.take_along_axis(x, at[..., None], axis=1)
    q = split_heads(linear(chosen, weight[:dim], None if bias is None else bias[:dim]), width)
    reader = replace(here.at("global"), positions=np.take_along_axis(here.positions, at, axis=1))
    if here.documents is not None:
        own = np.take_along_axis(here.documents, at, axis=1)
        reader = replace(reader, documents=own, key_documents=here.documents)
    mixed = attend([(q, Full())], k, v, reader)
    row = np.maximum(is_global.cumsum(1) - 1, 0)[:, None, :, None]
    return np.where(is_global[:, None, :, None], np.take_along_axis(mixed, row, axis=2), local)
