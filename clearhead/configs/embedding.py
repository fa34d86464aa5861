"""From token ids, image patches or sound to vectors of width D."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from .base import ConfigError, Part, Scope, Shape, Step, under
from .norm import NormConfig
from .positions import AddedPositionConfig, LearnedConfig


@dataclass(frozen=True, kw_only=True)
class TokenEmbeddingConfig(Part):
    """table[token] (·√D) + position + segment, then norm and dropout, each where a family wants it.

    >>> TokenEmbeddingConfig(vocabulary=100, position=LearnedConfig(length=64)).weights(8)
    {'tokens.weight': (100, 8), 'position.weight': (64, 8)}
    """

    vocabulary: int  # V
    position: AddedPositionConfig | None = None
    segments: int | None = None  # BERT's sentence A and sentence B
    norm: NormConfig | None = None
    scaled: bool | float = False  # True: multiplied by √D (Vaswani et al. 2017, 3.4); a number: by it (Granite)
    dropout: float = 0.0

    def check(self) -> None:
        self.require_positive("vocabulary", "segments")
        self.require_share("dropout")

    def scale(self, dim: int) -> float:
        """What a row of the table is multiplied by in a model of width `dim`."""
        return dim**0.5 if self.scaled is True else float(self.scaled or 1.0)

    def table(self, s: Scope) -> dict[str, Shape]:
        """The weights of the table of tokens."""
        return {"tokens.weight": s.shape("V D")}

    def row_steps(self, s: Scope) -> Iterator[Step]:
        """The steps from token ids to vectors of width D."""
        factor = "√D·" if self.scaled is True else f"{self.scaled:g}·" if self.scaled else ""
        formula = f"{factor}row of the table"
        yield s.step("tokens", formula, "B T D", weights=self.table(s))

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("embedding", V=self.vocabulary)
        yield from self.row_steps(s)
        if self.position is not None:
            yield from under("position", self.position.steps(s))
        if self.segments is not None:
            yield s.step(
                "segments", "row of the segment table", "B T D", weights={"segments.weight": (self.segments, s["D"])}
            )
        if self.norm is not None:
            yield from under("norm", self.norm.steps(s))

    def positions(self, length: int) -> int:
        """How many positions the stack sees of an input whose second axis is `length` long."""
        return length

    def input_shape(self, length: int) -> tuple[int, ...]:
        """The shape of one input: `length` tokens. Images and spectrograms have one shape."""
        return (length,)


@dataclass(frozen=True, kw_only=True)
class FactoredEmbeddingConfig(TokenEmbeddingConfig):
    """A token embedding of width Y, projected to width D: the table is V·Y + Y·D numbers, not V·D  (ALBERT).

    >>> FactoredEmbeddingConfig(vocabulary=100, width=4).weights(8)
    {'tokens.weight': (100, 4), 'projection.weight': (8, 4), 'projection.bias': (8,)}
    """

    width: int  # Y

    def check(self) -> None:
        super().check()
        self.require_positive("width")

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield from super().steps(scope.with_sizes(D=self.width))
        s = scope.with_sizes("embedding", Y=self.width)
        yield s.step(
            "projection",
            "X·W_projection + b",
            "B T D",
            weights={"projection.weight": s.shape("D Y"), "projection.bias": s.shape("D")},
            flops=2 * s["B"] * s["T"] * s["Y"] * s["D"],
            order="n·d",
        )


@dataclass(frozen=True, kw_only=True)
class WidenedEmbeddingConfig(TokenEmbeddingConfig):
    """A table of width Y, projected to width D before positions are added  (OPT-350m).

    >>> WidenedEmbeddingConfig(vocabulary=10, width=4).weights(8)
    {'tokens.weight': (10, 4), 'projection.weight': (8, 4)}
    """

    width: int  # Y

    def check(self) -> None:
        super().check()
        self.require_positive("width")

    def row_steps(self, s: Scope) -> Iterator[Step]:
        s = s.with_sizes(Y=self.width)
        yield from super().row_steps(s.with_sizes(D=self.width))
        widen = {"projection.weight": s.shape("D Y")}
        flops = 2 * s["B"] * s["T"] * s["Y"] * s["D"]
        yield s.step("projection", "X·W_projection", "B T D", weights=widen, flops=flops, order="n·d")


@dataclass(frozen=True, kw_only=True)
class BorrowedEmbeddingConfig(TokenEmbeddingConfig):
    """A target's embedding that uses the source's table, with positions and a norm of its own  (BART).

    >>> BorrowedEmbeddingConfig(vocabulary=100).vocabulary
    100
    """

    def table(self, s: Scope) -> dict[str, Shape]:
        return {}


@dataclass(frozen=True, kw_only=True)
class PatchEmbeddingConfig(Part):
    """An image cut into P square patches, each projected to width D, after a class token  (Dosovitskiy et al. 2021).

    >>> PatchEmbeddingConfig(image=32, patch=8).weights(8)
    {'patches.weight': (8, 192), 'patches.bias': (8,), 'class_token': (8,), 'position.weight': (17, 8)}
    """

    image: int  # height and width in pixels
    patch: int
    channels: int = 3
    dropout: float = 0.0

    def check(self) -> None:
        self.require_positive("image", "patch", "channels")
        if self.image % self.patch:
            raise ConfigError(f"image={self.image} is not a multiple of patch={self.patch}")
        self.require_share("dropout")

    @property
    def patches(self) -> int:
        return (self.image // self.patch) ** 2

    @property
    def pixels(self) -> int:
        """Numbers in one patch."""
        return self.channels * self.patch**2

    @property
    def position(self) -> LearnedConfig:
        return LearnedConfig(length=self.patches + 1)

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("embedding", P=self.patches, T=self.patches + 1)
        yield s.step(
            "patches",
            "pixels of each patch·W + b",
            "B P D",
            weights={"patches.weight": (s["D"], self.pixels), "patches.bias": (s["D"],)},
            flops=2 * s["B"] * s["P"] * self.pixels * s["D"],
            order="n·d",
        )
        yield s.step("class_token", "before the patches", "B T D", weights={"class_token": (s["D"],)}, kept=0)
        yield from under("position", self.position.steps(s))

    def positions(self, length: int) -> int:
        return self.patches + 1

    def input_shape(self, length: int) -> tuple[int, ...]:
        return (self.channels, self.image, self.image)


@dataclass(frozen=True, kw_only=True)
class AudioEmbeddingConfig(Part):
    """A log-mel spectrogram of 2·P frames, through two convolutions to P vectors of width D  (Radford et al. 2022).

    >>> AudioEmbeddingConfig(mels=4, length=100).weights(8)["position.weight"]
    (100, 8)
    """

    mels: int  # numbers in a frame
    length: int  # P; the second convolution takes every other frame
    dropout: float = 0.0

    def check(self) -> None:
        self.require_positive("mels", "length")
        self.require_share("dropout")

    @property
    def frames(self) -> int:
        return 2 * self.length

    @property
    def position(self) -> LearnedConfig:
        return LearnedConfig(length=self.length)

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("embedding", P=self.length, T=self.length)
        for name, width, letters in (("first", self.mels, "B 2·P D"), ("second", s["D"], "B P D")):
            rows = s.shape(letters)[1]
            yield s.step(
                name,
                "gelu(three frames·W + b)",
                letters,
                weights={f"{name}.weight": (s["D"], 3 * width), f"{name}.bias": (s["D"],)},
                flops=2 * s["B"] * rows * 3 * width * s["D"],
                order="n·d²",
            )
        yield from under("position", self.position.steps(s))

    def positions(self, length: int) -> int:
        return self.length

    def input_shape(self, length: int) -> tuple[int, ...]:
        return (self.mels, self.frames)


EmbeddingConfig = TokenEmbeddingConfig | FactoredEmbeddingConfig | PatchEmbeddingConfig | AudioEmbeddingConfig
