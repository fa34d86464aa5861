"""From token ids or pixels to vectors of width D: the input of every Transformer.

tokens   x = table[token] (·√D) + position + segment            table: V D, one row for each token
images   x = W · patch + b + position                           a patch is p × p pixels × channels

Why a table. A token id is a name, not a quantity: token 300 is not three times token 100. A one-hot vector treats all
ids alike, and a matrix times a one-hot vector is a column of the matrix; so the embedding is a linear layer that is
computed by looking up a row. Tokens that are used alike get similar rows, because they receive similar gradients.

What the vectors mean. Only relations between rows matter: directions and distances, not single coordinates. The model
reads them with matrices, so any rotation of the whole space could be undone by rotating those. Rows of related tokens
("Monday", "Tuesday") end up close, because the contexts that train them are alike.

Why vectors and positions are added and not set side by side. The sum costs no width. In D = 768 dimensions two random
vectors are almost orthogonal, so a matrix can read the token's part or the position's part of the sum.

    step                      shape        example: GPT-2, "Hello world"
    tokens                    B T          [[15496, 995]]
    table[token]              B T D        two rows of 768 numbers
    + position[0], [1]        B T D        the same two rows, moved by their positions
    → the first block         B T D

Size: V·D weights. In small models that is most of them: GPT-2 with V = 50,257 and D = 768 has 38.6 million of its 124
million here, and uses the same table again as its output matrix (`tied`).

Patches by hand: an image of 4 × 4 pixels, numbered row by row, in patches of 2 × 2:

     0  1 |  2  3            patch 0 = (0, 1, 4, 5)          patch 1 = (2, 3, 6, 7)
     4  5 |  6  7            patch 2 = (8, 9, 12, 13)        patch 3 = (10, 11, 14, 15)
    ------+------
     8  9 | 10 11            A plain reshape to 4 × 4 would give (0, 1, 2, 3) instead: a row of pixels, not a patch.
    12 13 | 14 15

Mistakes that run without an error:

    another tokenizer          every id is valid, and every row means another token
    the factor √D forgotten    positions drown the tokens; the loss is high from the first step
    padding counted            a prompt padded on the left begins at position 3, and its answer changes
    pixels from 0 to 255       the model was trained on normalised pixels; activations are 100 times too large
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int

from clearhead.configs import (
    AudioEmbeddingConfig,
    BorrowedEmbeddingConfig,
    FactoredEmbeddingConfig,
    LearnedConfig,
    PatchEmbeddingConfig,
    SinusoidalConfig,
    TokenEmbeddingConfig,
    WidenedEmbeddingConfig,
)

from .checks import check_gradient, check_ids, check_range
from .ffn import gelu
from .linear import linear
from .positions import sinusoidal_positions
from .run import Context, runs


def embedding(tokens: Int[np.ndarray, "..."], weight: Float[np.ndarray, "V D"]) -> Float[np.ndarray, "... D"]:
    """weight[token]: the row of each token.

    It is `linear` applied to one-hot vectors, without the multiplications by zero. Ids must be integers from 0 to
    V − 1.

    >>> embedding(np.array([2, 0]), np.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0]]))
    array([[3., 3.],
           [1., 1.]])
    """
    check_ids(tokens)
    check_range(tokens, len(weight), "token", "a vocabulary")
    return weight[tokens]  # … D


def embedding_backward(
    d_out: Float[np.ndarray, "... D"], tokens: Int[np.ndarray, "..."], weight: Float[np.ndarray, "V D"]
) -> Float[np.ndarray, "V D"]:
    """d_weight: each row is the sum of the gradients at all places where its token stands.

    Rows of tokens that do not occur get zero: rare tokens learn rarely.
    With Adam that matters: its running means decay at every step, so a token that occurs once in 1,000 steps moves by
    momentum alone for a while and then stands still.

    >>> embedding_backward(np.ones((3, 1)), np.array([1, 1, 0]), np.zeros((3, 1)))[:, 0]      # token 1 stands twice
    array([1., 2., 0.])
    """
    check_ids(tokens)
    check_range(tokens, len(weight), "token", "a vocabulary")
    check_gradient(d_out, *tokens.shape, weight.shape[1])
    d_weight = np.zeros_like(weight)
    np.add.at(d_weight, tokens, d_out)  # unlike d_weight[tokens] += d_out, it counts a repeated token each time
    return d_weight


@runs(TokenEmbeddingConfig)
@runs(BorrowedEmbeddingConfig)
@runs(WidenedEmbeddingConfig)
def token_embedding(
    config: TokenEmbeddingConfig,
    tokens: Int[np.ndarray, "B T"],
    context: Context,
    segments: Int[np.ndarray, "B T"] | None = None,
) -> Float[np.ndarray, "B T D"]:
    """table[token] (·√D) + position + segment, normalised if the config says so.

    The factor √D (2017, Gemma) brings a table that is also the output matrix, and so has small numbers, to the size of
    the positions. Segments tell BERT's first sentence (0) from its second (1).

    Without the factor a tied table is a compromise: as an output matrix its rows should be of length about 1, so that
    the logits of a fresh model are small, while positions have numbers of about 1, that is length √D.

    In numbers, for D = 512: rows of length 1 have numbers of about 1/√512 = 0.044. Sinusoids have a root mean square of
    0.71, 16 times as much. With the factor √512 = 22.6 the two are of the same size.

    Shapes: tokens and segments B T, table V D, position B T D, out B T D.
    """
    x = embedding(tokens, context["tokens.weight"])
    x = context.tap("tokens", x * x.dtype.type(config.scale(x.shape[-1])))
    if isinstance(config, WidenedEmbeddingConfig):  # a narrow table, and positions of the model's width (OPT-350m)
        x = context.tap("projection", linear(x, context["projection.weight"]))
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
    """A narrow table (V Y), then a matrix from Y to D: V·Y + Y·D weights instead of V·D (ALBERT).

    ALBERT-base: V = 30,000, Y = 128, D = 768. The table and matrix have 3.9 million weights instead of 23 million.

    What is lost: all vectors lie in a space of Y dimensions. That is enough for a token without its context; the
    context is added later, in D dimensions.
    """
    x = token_embedding(config, tokens, context, segments)
    return context.tap("projection", linear(x, context["projection.weight"], context["projection.bias"]))


def position_vectors(
    config: SinusoidalConfig | LearnedConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """The vector of each token's position: a row of a learned table, or sinusoids of any position.

    Positions count real tokens only, so padding on the left of a prompt does not shift the text behind it. A learned
    table ends at its last row. Sinusoids are defined everywhere, which does not mean that the model has learned to use
    them there.

    Learned and sinusoidal positions give the same quality within the trained length (Vaswani et al. 2017, table 3, row
    E). The table costs length·D weights, and its last rows are trained only by texts that are that long.
    """
    last = int(context.positions.max(initial=0))
    if isinstance(config, LearnedConfig):
        if last >= config.length:
            raise ValueError(f"position {last} is past the {config.length} learned positions of this model")
        return context["position.weight"][context.positions]
    table = sinusoidal_positions(last + 1 + config.start, x.shape[-1], config.base, config.layout)
    return table[context.positions + config.start].astype(x.dtype)


@runs(AudioEmbeddingConfig)
def audio_embedding(
    config: AudioEmbeddingConfig, sound: Float[np.ndarray, "B Mels Frames"], context: Context, segments: None = None
) -> Float[np.ndarray, "B P D"]:
    """Two convolutions of width 3 over the frames of a spectrogram, each with gelu; positions are added (Whisper).

    30 seconds of sound are 3,000 frames of 10 ms. The second convolution takes every other window, so the encoder sees
    1,500 positions of 20 ms. A convolution is one matrix for all windows: three frames side by side, times W.

    Shapes for Whisper tiny, D = 384: sound 80 × 3,000; windows 3,000 × 240, W₁ 384 × 240, out 3,000 × 384; windows
    1,500 × 1,152, W₂ 384 × 1,152, out 1,500 × 384. One frame of zeros on either side keeps the number of windows.

    Why the stride of 2: attention costs T², so half the positions make it four times cheaper, and 20 ms are still
    shorter than a spoken sound. Radford et al. (2022), "Robust Speech Recognition via Large-Scale Weak Supervision".
    """
    if sound.shape[1:] != config.input_shape(0):
        raise ValueError(f"sound is {sound.shape[1:]}, but this model reads {config.input_shape(0)}")
    x = sound
    for name, stride in (("first", 1), ("second", 2)):
        padded = np.pad(x, ((0, 0), (0, 0), (1, 1)))
        windows = np.lib.stride_tricks.sliding_window_view(padded, 3, axis=2)[:, :, ::stride]  # B N Frames 3
        rows = windows.swapaxes(1, 2).reshape(len(x), windows.shape[2], -1)
        x = context.tap(name, gelu(linear(rows, context[f"{name}.weight"], context[f"{name}.bias"]))).swapaxes(1, 2)
    x = x.swapaxes(1, 2)
    return x + context.tap("position", position_vectors(config.position, x, context))


@runs(PatchEmbeddingConfig)
def patch_embedding(
    config: PatchEmbeddingConfig, images: Float[np.ndarray, "B Ch Y X"], context: Context, segments: None = None
) -> Float[np.ndarray, "B T D"]:
    """Cut an image into square patches and project each to width D; a class token comes first (ViT).

    A 224 × 224 image in patches of 16 × 16 becomes a sequence of 196 "words" and the class token, whose final vector
    is classified. One matrix for all patches is the same as a convolution with stride = patch.

    Shapes: images B Ch Y X → patches B P Ch·p·p → B P D → with the class token B P+1 D. The two transposes bring the
    pixels of one patch together, channel by channel, row by row, in the order in which a convolution's weights are
    stored.

    Patches are tokens from here on: attention compares any two of them, so a ViT sees the whole image in its first
    layer, where a convolution sees neighbours. What it lacks is the knowledge that neighbours belong together; it has
    to learn that from positions, which takes more data (Dosovitskiy et al. 2021, section 4.3).
    """
    # Position and class token are as in BERT: from here on the model does not know that it reads an image.
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
