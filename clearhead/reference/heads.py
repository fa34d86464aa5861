"""From hidden states to logits or one vector. `table` is the embedding's, for heads that are tied to it."""

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
)

from .ffn import ACTIVATIONS
from .linear import linear
from .run import Here, runs

Table = Float[np.ndarray, "V Y"] | None  # Y is D, but for ALBERT
Hidden = Float[np.ndarray, "B T D"]


@runs(LMHeadConfig)
def lm_head(config: LMHeadConfig, x: Hidden, here: Here, table: Table = None) -> Float[np.ndarray, "B T V"]:
    """logits = x·Wᵀ + b; tied: W is the embedding's table."""
    weight = table if config.tied and table is not None else here["weight"]
    return here.note("logits", linear(x, weight, here.get("bias")))


@runs(MaskedLMHeadConfig)
def masked_lm_head(
    config: MaskedLMHeadConfig, x: Hidden, here: Here, table: Table = None
) -> Float[np.ndarray, "B T V"]:
    """A dense layer and a norm, then logits over the vocabulary."""
    x = here.note("dense", ACTIVATIONS[config.activation](linear(x, here["dense.weight"], here["dense.bias"])))
    x = here.note("norm", here.run("norm", config.norm, x))
    weight = table if config.tied and table is not None else here["weight"]
    return here.note("logits", linear(x, weight, here["bias"]))


@runs(FirstTokenConfig)
def first_token(config: FirstTokenConfig, x: Hidden, here: Here, table: Table = None) -> Float[np.ndarray, "B D"]:
    """The first position's vector."""
    return here.note("pooled", first_real(x, here))


@runs(LastTokenConfig)
def last_token(config: LastTokenConfig, x: Hidden, here: Here, table: Table = None) -> Float[np.ndarray, "B D"]:
    """The last real position's vector."""
    last = x.shape[1] - 1 - here.readable[:, ::-1].argmax(1)
    return here.note("pooled", x[np.arange(len(x)), last])


@runs(MeanPoolConfig)
def mean_pool(config: MeanPoolConfig, x: Hidden, here: Here, table: Table = None) -> Float[np.ndarray, "B D"]:
    """The mean over real positions."""
    real = here.readable[:, :, None].astype(x.dtype)
    return here.note("pooled", (x * real).sum(1) / np.maximum(real.sum(1), 1))


@runs(PoolerConfig)
def pooler(config: PoolerConfig, x: Hidden, here: Here, table: Table = None) -> Float[np.ndarray, "B D"]:
    """An activation of a dense layer over the first position."""
    activation = np.tanh if config.activation == "tanh" else ACTIVATIONS[config.activation]
    return here.note("dense", activation(linear(first_real(x, here), here["dense.weight"], here["dense.bias"])))


@runs(ClassHeadConfig)
def class_head(config: ClassHeadConfig, x: Hidden, here: Here, table: Table = None) -> Float[np.ndarray, "B C"]:
    """Logits over classes from one pooled vector."""
    pooled = here.run("pool", config.pool, x)
    return here.note("classes", linear(pooled, here["classes.weight"], here.get("classes.bias")))


def first_real(x: Hidden, here: Here) -> Float[np.ndarray, "B D"]:
    """The first position that is not padding."""
    return x[np.arange(len(x)), here.readable.argmax(1)]
