"""From token ids or pixels to vectors of width D.

    TokenEmbedding      B T ids      ->  B T D        a row of a table, plus position and segment
    FactoredEmbedding   B T ids      ->  B T D        a narrow row, then a matrix (ALBERT)
    WidenedEmbedding    B T ids      ->  B T D        a narrow row, then a matrix, plus position (OPT-350m)
    BorrowedEmbedding   B T ids      ->  B T D        a row of the source's table, plus a position of its own (BART)
    PatchEmbedding      B Ch Y X     ->  B P+1 D      a class token, then one vector for each patch (ViT)
    AudioEmbedding      B Mels 2·P   ->  B P D        two convolutions over a spectrogram (Whisper)

Position may also enter later: by rotation in attention (rotary), or in the scores (ALiBi). Then `position` is None.

Every embedding offers `table`, the matrix that a tied head multiplies by; None if it has none to offer. The model
passes it on, so a head never reaches into the embedding.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import (
    AudioEmbeddingConfig,
    BorrowedEmbeddingConfig,
    FactoredEmbeddingConfig,
    PatchEmbeddingConfig,
    TokenEmbeddingConfig,
    WidenedEmbeddingConfig,
)
from clearhead.functional.derivatives import plain_needed
from clearhead.precision.matrix import Embedding, Linear, Packed

from .build import build_part, builds
from .context import Context
from .dropout import Dropout


@builds(TokenEmbeddingConfig)
class TokenEmbedding(nn.Module):
    """table[token] (·√D) + position + segment, then a norm (BERT) and dropout.

    The factor √D (2017, Gemma) is for tables that are also the output matrix.
    """

    def __init__(self, config: TokenEmbeddingConfig, dim: int) -> None:
        super().__init__()
        self.scale = config.scale(dim)
        self.vocabulary = config.vocabulary
        self.tokens: Any = Embedding(config.vocabulary, dim)
        self.position = None if config.position is None else build_part(config.position, dim)
        self.segments = None if config.segments is None else nn.Embedding(config.segments, dim)
        self.norm = build_part(config.norm, dim)
        self.dropout = Dropout(config.dropout)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        context: Context,
        segments: Int[Tensor, "B T"] | None = None,
        lender: TokenEmbedding | None = None,
    ) -> Float[Tensor, "B T D"]:
        """The input of the first block, B T D.

        Ids are checked first: an id outside the table would read foreign memory on some devices. Segments default to
        0. The lender's table is used if this embedding has none.
        """
        check_range(tokens, self.vocabulary, "token", "the vocabulary")
        if segments is not None and self.segments is None:
            raise ValueError("segments were given, but this model has no segment table; leave them out")
        table = self.tokens if lender is None or self.tokens is not None else lender.tokens
        x = self.widen(context.tap("tokens", table(tokens) * self.scale), context)
        if self.position is not None:
            x = x + context.tap("position", self.position(context.positions, x.dtype))
        if self.segments is not None:
            segments = torch.zeros_like(tokens) if segments is None else segments
            check_range(segments, self.segments.num_embeddings, "segment", "the segment table")
            x = x + context.tap("segments", self.segments(segments))
        return self.dropout(context.tap("norm", self.norm(x)))

    def widen(self, x: Float[Tensor, "B T Y"], context: Context) -> Float[Tensor, "B T D"]:
        """Rows of the table at the model's width, which they have already."""
        return x

    @property
    def table(self) -> Float[Tensor, "V D"] | Packed | None:
        """The table, which a tied head uses as its output matrix; None if it is another embedding's."""
        return None if self.tokens is None else self.tokens.weight


@builds(FactoredEmbeddingConfig)
class FactoredEmbedding(TokenEmbedding):
    """A narrow table, then a matrix to the model's width: fewer weights for a large vocabulary (ALBERT).

    V·Y + Y·D weights instead of V·D. Position, segment and norm have the table's width Y and are projected too.
    """

    def __init__(self, config: FactoredEmbeddingConfig, dim: int) -> None:
        super().__init__(config, config.width)
        self.projection = Linear(config.width, dim)

    def forward(
        self,
        tokens: Int[Tensor, "B T"],
        context: Context,
        segments: Int[Tensor, "B T"] | None = None,
        lender: TokenEmbedding | None = None,
    ) -> Float[Tensor, "B T D"]:
        return context.tap("projection", self.projection(super().forward(tokens, context, segments, lender)))


@builds(WidenedEmbeddingConfig)
class WidenedEmbedding(TokenEmbedding):
    """A narrow table, a matrix to the model's width, and then the positions (OPT-350m).

    Unlike in `FactoredEmbedding`, positions are added after the matrix, so they keep the full width D.
    """

    def __init__(self, config: WidenedEmbeddingConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.tokens = Embedding(config.vocabulary, config.width)
        self.projection = Linear(config.width, dim, bias=False)

    def widen(self, x: Float[Tensor, "B T Y"], context: Context) -> Float[Tensor, "B T D"]:
        return context.tap("projection", self.projection(x))


@builds(BorrowedEmbeddingConfig)
class BorrowedEmbedding(TokenEmbedding):
    """A target's embedding over the source's table, with positions and a norm of its own (BART)."""

    def __init__(self, config: BorrowedEmbeddingConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.tokens = None


@builds(PatchEmbeddingConfig)
class PatchEmbedding(nn.Module):
    """Project each square patch of an image to width D, after a class token; learned positions are added (ViT)."""

    def __init__(self, config: PatchEmbeddingConfig, dim: int) -> None:
        super().__init__()
        self.image, self.patch, self.channels = config.image, config.patch, config.channels
        self.patches = Linear(config.pixels, dim)
        self.class_token = nn.Parameter(torch.zeros(dim))
        self.position = build_part(config.position, dim)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, images: Float[Tensor, "B Ch Y X"], context: Context, segments: None = None
    ) -> Float[Tensor, "B T D"]:
        """A class token and one vector per patch, B P+1 D, with the learned positions added."""
        if images.shape[1:] != (self.channels, self.image, self.image):
            wanted = f"{self.channels}×{self.image}×{self.image}"
            raise ValueError(f"images are {'×'.join(map(str, images.shape[1:]))}, but this model reads {wanted}")
        # B Ch (y p) (x q) -> B (y x) (Ch p q)
        patches = images.unfold(2, self.patch, self.patch).unfold(3, self.patch, self.patch)
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
        x = context.tap("patches", self.patches(patches))
        x = context.tap("class_token", torch.cat((self.class_token.expand(x.shape[0], 1, -1), x), dim=1))
        return self.dropout(x + context.tap("position", self.position(context.positions, x.dtype)))

    @property
    def table(self) -> None:
        """Patches have no table that a head could be tied to."""
        return None


@builds(AudioEmbeddingConfig)
class AudioEmbedding(nn.Module):
    """Two convolutions over the frames of a spectrogram, each with gelu; learned positions are added (Whisper).

    A convolution of width 3 is a matrix over three frames side by side. The second one takes every other window.
    """

    def __init__(self, config: AudioEmbeddingConfig, dim: int) -> None:
        super().__init__()
        self.shape = config.input_shape(0)
        self.first = Linear(3 * config.mels, dim)
        self.second = Linear(3 * dim, dim)
        self.position = build_part(config.position, dim)
        self.dropout = Dropout(config.dropout)

    def forward(
        self, sound: Float[Tensor, "B Mels Frames"], context: Context, segments: None = None
    ) -> Float[Tensor, "B P D"]:
        """One vector for every second frame, with the learned positions added."""
        if sound.shape[1:] != self.shape:
            wanted = " mel bands × ".join(map(str, self.shape))
            raise ValueError(f"sound is {'×'.join(map(str, sound.shape[1:]))}, but this model reads {wanted} frames")
        x = context.tap("first", F.gelu(self.first(three_frames(sound, 1))))
        x = context.tap("second", F.gelu(self.second(three_frames(x.mT, 2))))
        return self.dropout(x + context.tap("position", self.position(context.positions, x.dtype)))

    @property
    def table(self) -> None:
        """Sound has no table that a head could be tied to."""
        return None


def three_frames(x: Float[Tensor, "B N Frames"], stride: int) -> Float[Tensor, "B Windows N3"]:
    """The numbers of every window of three frames, padded by one frame of zeros on each side.

    The order is channel, then frame: that of a convolution's weight [out, channels, 3] as one matrix.
    """
    return F.pad(x, (1, 1)).unfold(2, 3, stride).transpose(1, 2).flatten(2)


def check_range(ids: Int[Tensor, "B T"], size: int, what: str, where: str) -> None:
    """Raise one clear sentence for an id outside 0 … size − 1; torch's own message names no value."""
    if torch.compiler.is_compiling() or plain_needed():
        return  # a graph, or torch.func.vmap, cannot look at values
    if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
        bad = int(ids.max()) if int(ids.max()) >= size else int(ids.min())
        raise ValueError(f"{what} {bad} is outside {where}, which has ids 0 to {size - 1}")
