"""From token ids or pixels to vectors of width D: a row of a matrix, or a matrix."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from clearhead.configs import (
    FactoredEmbeddingConfig,
    LearnedConfig,
    PatchEmbeddingConfig,
    SinusoidalConfig,
    TokenEmbeddingConfig,
)

from .linear import linear
from .positions import sinusoidal_positions
from .run import Here, runs


def embedding(tokens: Int[np.ndarray, "..."], weight: Float[np.ndarray, "V D"]) -> Float[np.ndarray, "... D"]:
    """weight[token]: `linear` applied to one-hot vectors, without the multiplications by zero."""
    outside = tokens[(tokens < 0) | (tokens >= len(weight))]
    if outside.size:
        raise IndexError(f"token {outside.flat[0]} is outside a vocabulary of {len(weight)}")
    return weight[tokens]  # … D


def embedding_backward(
    d_out: Float[np.ndarray, "... D"], tokens: Int[np.ndarray, "..."], weight: Float[np.ndarray, "V D"]
) -> Float[np.ndarray, "V D"]:
    """d_weight: each row gathers the gradients of all the places its token stood at."""
    d_weight = np.zeros_like(weight)
    np.add.at(d_weight, tokens, d_out)  # unlike d_weight[tokens] += d_out, it counts a repeated token each time
    return d_weight


@runs(TokenEmbeddingConfig)
def token_embedding(
    config: TokenEmbeddingConfig,
    tokens: Int[np.ndarray, "B T"],
    here: Here,
    segments: Int[np.ndarray, "B T"] | None = None,
) -> Float[np.ndarray, "B T D"]:
    """table[token] (·√D) + position + segment, normed."""
    x = embedding(tokens, here["tokens.weight"])
    x = here.note("tokens", x * x.shape[-1] ** 0.5 if config.scaled else x)
    if config.position is not None:
        x = x + here.note("position", added_position(config.position, x, here))
    if config.segments is not None:
        segments = np.zeros_like(tokens) if segments is None else segments
        x = x + here.note("segments", embedding(segments, here["segments.weight"]))
    return here.note("norm", here.run("norm", config.norm, x))


@runs(FactoredEmbeddingConfig)
def factored_embedding(
    config: FactoredEmbeddingConfig,
    tokens: Int[np.ndarray, "B T"],
    here: Here,
    segments: Int[np.ndarray, "B T"] | None = None,
) -> Float[np.ndarray, "B T D"]:
    """A token embedding of another width, projected to the model's."""
    x = token_embedding(config, tokens, here, segments)
    return here.note("projection", linear(x, here["projection.weight"], here["projection.bias"]))


def added_position(
    config: SinusoidalConfig | LearnedConfig, x: Float[np.ndarray, "B T D"], here: Here
) -> Float[np.ndarray, "B T D"]:
    """The vector of each token's position, computed or learned."""
    if isinstance(config, LearnedConfig):
        last = here.positions.max(initial=0)
        if last >= config.length:
            raise ValueError(f"position {last} is past the {config.length} learned positions of this model")
        return here["position.weight"][here.positions]
    table = sinusoidal_positions(int(here.positions.max(initial=0)) + 1, x.shape[-1], config.base, config.layout)
    return table[here.positions].astype(x.dtype)


@runs(PatchEmbeddingConfig)
def patch_embedding(
    config: PatchEmbeddingConfig, images: Float[np.ndarray, "B Ch Y X"], here: Here, segments: None = None
) -> Float[np.ndarray, "B T D"]:
    """Square patches, each projected by one matrix, after a class token; plus learned positions."""
    batch, side, size = len(images), config.image // config.patch, config.patch
    if images.shape[1:] != (config.channels, config.image, config.image):
        wanted = (config.channels, config.image, config.image)
        raise ValueError(f"images are {images.shape[1:]}, but this model reads {wanted}")
    pixels = images.reshape(batch, config.channels, side, size, side, size)  # B Ch y p x q
    pixels = pixels.transpose(0, 2, 4, 1, 3, 5).reshape(batch, config.patches, config.pixels)  # B P Ch·p·q
    x = here.note("patches", linear(pixels, here["patches.weight"], here["patches.bias"]))
    first = np.broadcast_to(here["class_token"], (batch, 1, x.shape[-1]))
    x = here.note("class_token", np.concatenate((first, x), axis=1))
    return x + here.note("position", added_position(config.position, x, here))
