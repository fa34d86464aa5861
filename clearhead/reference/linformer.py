"""Attention over a few mixtures of all positions (Wang et al. 2020, Linformer)."""

from dataclasses import replace

import numpy as np
from jaxtyping import Float

from clearhead.configs import LinformerConfig

from .attention import attend, merge_heads, split_heads
from .linear import linear
from .run import Here, runs


@runs(LinformerConfig)
def linformer(config: LinformerConfig, x: Float[np.ndarray, "B T D"], here: Here) -> Float[np.ndarray, "B T D"]:
    """keys = (E·X)·W_K and values = (F·X)·W_V have W rows each, of which every query reads all.

    E and F have a column for each position; a padding's column is left out, and each document has rows of its own.
    """
    if here.documents is not None:
        return by_document(config, x, here)
    if here.positions.size and here.positions.max() >= config.length:
        raise ValueError(f"position {here.positions.max()} is past the {config.length} positions of this Linformer")
    real = x * here.readable[..., None]
    mixtures = [
        here.note(name, here[f"{name}.weight"].T[here.positions].swapaxes(1, 2) @ real)  # B W D
        for name in ("key_rows", "value_rows")[: 1 if config.shared else 2]
    ]
    K, U = config.widths(x.shape[-1])
    query, key, value = np.split(here["qkv.weight"], [config.heads * K, 2 * config.heads * K])
    q = here.note("query", split_heads(linear(x, query), K))
    k = here.note("key", split_heads(linear(mixtures[0], key), K))
    v = here.note("value", split_heads(linear(mixtures[-1], value), U))
    rows = np.broadcast_to(np.arange(config.rows), (len(x), config.rows))
    reader = replace(here, key_positions=rows, readable=np.ones_like(rows, dtype=bool))
    mixed = attend([(q, config.mask)], k, v, reader)
    return here.note("out", linear(merge_heads(mixed, here), here["out.weight"], here.get("out.bias")))


def by_document(config: LinformerConfig, x: Float[np.ndarray, "B T D"], here: Here) -> Float[np.ndarray, "B T D"]:
    """Each document as if the rest were padding."""
    assert here.documents is not None
    out = np.zeros_like(x)
    for document in np.unique(here.documents):
        inside = here.documents == document
        alone = replace(here, documents=None, readable=here.readable & inside, record=None)
        out[inside] = linformer(config, x, alone)[inside]
    return out
