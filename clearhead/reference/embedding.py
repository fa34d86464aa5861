"""From token ids or pixels to vectors of width D: the input of every Transformer.

tokens   x = table[token] (·√D) + position + segment            table: V D, one row for each token
images   x = W · patch + b + position                           a patch is p × p pixels × channels
"""

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

from .checks import check_gradient, check_ids, check_range
from .linear import linear
from .positions import sinusoidal_positions
from .run import Context, runs


def embedding(tokens: Int[np.ndarray, "..."], weight: Float[np.ndarray, "V D"]) -> Float[np.ndarray, "... D"]:
    """weight[token]: the row of each token.

    It is `linear` applied to one-hot vectors, without the multiplications by zero. Ids must be integers from 0 to
    V − 1.
    """
    check_ids(tokens)
    check_range(tokens, len(weight), "token", "a vocabulary")
    return weight[tokens]  # … D


def embedding_backward(
    d_out: Float[np.ndarray, "... D"], tokens: Int[np.ndarray, "..."], weight: Float[np.ndarray, "V D"]
) -> Float[np.ndarray, "V D"]:
    """d_weight: each row is the sum of the gradients at all places where its token stands.

    Rows of tokens that do not occur get zero: rare tokens learn rarely.
    """
    check_ids(tokens)
    check_range(tokens, len(weight), "token", "a vocabulary")
    check_gradient(d_out, *tokens.shape, weight.shape[1])
    d_weight = np.zeros_like(weight)
    np.add.at(d_weight, tokens, d_out)  # unlike d_weight[tokens] += d_out, it counts a repeated token each time
    return d_weight


@runs(TokenEmbeddingConfig)
def token_embedding(
    config: TokenEmbeddingConfig,
    tokens: Int[np.ndarray, "B T"],
    context: Context,
    segments: Int[np.ndarray, "B T"] | None = None,
) -> Float[np.ndarray, "B T D"]:
    """table[token] (·√D) + position + segment, normalised if the config says so.

    The factor √D (2017, Gemma) brings a table that is also the output matrix, and so has small numbers, to the size of
    the positions. Segments tell BERT's first sentence (0) from its second (1).
    """
    x = embedding(tokens, context["tokens.weight"])
    x = context.tap("tokens", x * x.dtype.type(config.scale(x.shape[-1])))
    if config.position is not None:
        x = x + context.tap("position", position_vectors(config.position, x, context))
    if config.segments is not None:
        segments = np.zeros_like(tokens) if segments is None else segments
        x = x + context.tap("segments", embedding(segments, context["segments.weight"]))
    return context.tap("norm", context.run("norm", config.norm, x))


@runs(FactoredEmbeddingConfig)
def factored_embedding(
    config: FactoredEmbeddingConfig,
    tokens: Int[np.ndarray, "B T"],
    context: Context,
    segments: Int[np.ndarray, "B T"] | None = None,
) -> Float[np.ndarray, "B T D"]:
    """A narrow table (V Y), then a matrix from Y to D: V·Y + Y·D weights instead of V·D (ALBERT)."""
    x = token_embedding(config, tokens, context, segments)
    return context.tap("projection", linear(x, context["projection.weight"], context["projection.bias"]))


def position_vectors(
    config: SinusoidalConfig | LearnedConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """The vector of each token's position: a row of a learned table, or sinusoids of any position."""
    last = int(context.positions.max(initial=0))
    if isinstance(config, LearnedConfig):
        if last >= config.length:
            raise ValueError(f"position {last} is past the {config.length} learned positions of this model")
        return context["position.weight"][context.positions]
    table = sinusoidal_positions(last + 1 + config.start, x.shape[-1], config.base, config.layout)
    return table[context.positions + config.start].astype(x.dtype)


@runs(PatchEmbeddingConfig)
def patch_embedding(
    config: PatchEmbeddingConfig, images: Float[np.ndarray, "B Ch Y X"], context: Context, segments: None = None
) -> Float[np.ndarray, "B T D"]:
    """Cut an image into square patches and project each to width D; a class token comes first (ViT).

    A 224 × 224 image in patches of 16 × 16 becomes a sequence of 196 "words" and the class token, whose final vector
    is classified. One matrix for all patches is the same as a convolution with stride = patch.
    """
    batch, side, size = len(images), config.image // config.patch, config.patch
    if images.shape[1:] != (config.channels, config.image, config.image):
        wanted = (config.channels, config.image, config.image)
        raise ValueError(f"images are {images.shape[1:]}, but this model reads {wanted}")
    pixels = images.reshape(batch, config.channels, side, size, side, size)  # B Ch y p x q
    pixels = pixels.transpose(0, 2, 4, 1, 3, 5).reshape(batch, config.patches, config.pixels)  # B P Ch·p·q
    x = context.tap("patches", linear(pixels, context["patches.weight"], context["patches.bias"]))
    first = np.broadcast_to(context["class_token"], (batch, 1, x.shape[-1]))
    x = context.tap("class_token", np.concatenate((first, x), axis=1))
    return x + context.tap("position", position_vectors(config.position, x, context))
