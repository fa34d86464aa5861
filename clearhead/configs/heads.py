"""From the last hidden states to what is asked: next tokens, masked tokens, one vector, classes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from .base import Part, Scope, Shape, Step, under
from .ffn import Activation
from .norm import LayerNormConfig, NormConfig


@dataclass(frozen=True, kw_only=True)
class LMHeadConfig(Part):
    """logits = x·Wᵀ (+ b) over the vocabulary; tied: W is the embedding's own table.

    >>> LMHeadConfig(vocabulary=100).weights(8)
    {'weight': (100, 8)}
    >>> LMHeadConfig(vocabulary=100, tied=True).weights(8)
    {}
    """

    vocabulary: int  # V
    tied: bool = False
    bias: bool = False
    scale: float = 1.0  # the logits are multiplied by this (Cohere)
    softcap: float | None = None  # and then become softcap·tanh(logits/softcap) (Gemma 2)
    width: int | None = None  # of W; x is projected to it first; None: D (OPT-350m's is narrower)

    def check(self) -> None:
        self.require_positive("vocabulary", "scale", "softcap", "width")

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("head", V=self.vocabulary, Y=self.width or scope["D"])
        if self.width is not None:
            flops = 2 * s["B"] * s["T"] * s["Y"] * s["D"]
            narrow = {"narrow.weight": s.shape("Y D")}
            yield s.step("narrow", "X·W_narrow", "B T Y", weights=narrow, flops=flops, order="n·d²")
            s = s.with_sizes(D=s["Y"])
        formula = "X·Wᵀ" if self.scale == 1 else f"{self.scale:g}·X·Wᵀ"
        if self.softcap is not None:
            formula = f"{self.softcap:g}·tanh({formula}/{self.softcap:g})"
        yield vocabulary_step(s, formula, self.tied, self.bias)


@dataclass(frozen=True, kw_only=True)
class MaskedLMHeadConfig(Part):
    """logits = norm(activation(x·W_dense + b))·tableᵀ + b  (BERT).

    >>> MaskedLMHeadConfig(vocabulary=100).weights(8)
    {'dense.weight': (8, 8), 'dense.bias': (8,), 'norm.weight': (8,), 'norm.bias': (8,), 'bias': (100,)}
    """

    vocabulary: int  # V
    activation: Activation = "gelu"
    norm: NormConfig = LayerNormConfig(eps=1e-12)
    tied: bool = True
    width: int | None = None  # of the table; None: D (ALBERT's is narrower)
    dense_bias: bool = True

    def check(self) -> None:
        self.require_positive("vocabulary", "width")

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("head", V=self.vocabulary, Y=self.width or scope["D"])
        letters = "B T D" if self.width is None else "B T Y"
        yield dense_step(s, f"{self.activation}(X·W)", letters, self.dense_bias)
        yield from under("norm", self.norm.steps(s, letters))
        yield vocabulary_step(s.with_sizes(D=s["Y"]), "X·Wᵀ + b", self.tied, True)


@dataclass(frozen=True, kw_only=True)
class FirstTokenConfig(Part):
    """The first position's vector: a class token's.

    >>> ClassHeadConfig(classes=3, pool=FirstTokenConfig()).weights(8)
    {'classes.weight': (3, 8), 'classes.bias': (3,)}
    """

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.with_sizes("head").step("pooled", "first position", "B D", kept=0)


@dataclass(frozen=True, kw_only=True)
class LastTokenConfig(Part):
    """The vector of the last position that is not padding: the one that has read the whole text, in a causal model.

    >>> ClassHeadConfig(classes=3, pool=LastTokenConfig()).pool
    LastTokenConfig()
    """

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.with_sizes("head").step("pooled", "last real position", "B D", kept=0)


@dataclass(frozen=True, kw_only=True)
class MeanPoolConfig(Part):
    """The mean over the positions that are not padding.

    >>> ClassHeadConfig(classes=3, pool=MeanPoolConfig()).pool
    MeanPoolConfig()
    """

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.with_sizes("head").step("pooled", "mean over real positions", "B D", kept=0)


@dataclass(frozen=True, kw_only=True)
class PoolerConfig(Part):
    """activation(x_first·W + b); tanh in BERT, relu in DistilBERT.

    >>> ClassHeadConfig(classes=3, pool=PoolerConfig()).weights(8)
    {'pool.dense.weight': (8, 8), 'pool.dense.bias': (8,), 'classes.weight': (3, 8), 'classes.bias': (3,)}
    """

    activation: Activation | Literal["tanh"] = "tanh"

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield dense_step(scope.with_sizes("head", T=1), f"{self.activation}(first·W)", "B D")


PoolConfig = FirstTokenConfig | LastTokenConfig | MeanPoolConfig | PoolerConfig


@dataclass(frozen=True, kw_only=True)
class ClassHeadConfig(Part):
    """logits over `classes` from one pooled vector.

    >>> ClassHeadConfig(classes=3).weights(8)
    {'classes.weight': (3, 8), 'classes.bias': (3,)}
    """

    classes: int  # C
    pool: PoolConfig = FirstTokenConfig()
    bias: bool = True

    def check(self) -> None:
        self.require_positive("classes")

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("head", C=self.classes)
        yield from under("pool", self.pool.steps(s))
        yield s.step(
            "classes",
            "pooled·W + b" if self.bias else "pooled·W",
            "B C",
            weights={"classes.weight": s.shape("C D")} | ({"classes.bias": s.shape("C")} if self.bias else {}),
            flops=2 * s["B"] * s["C"] * s["D"],
            order="d",
        )


@dataclass(frozen=True, kw_only=True)
class TokenClassHeadConfig(Part):
    """logits over `classes` for every token, such as the kinds of names in a text.

    >>> TokenClassHeadConfig(classes=3).weights(8)
    {'classes.weight': (3, 8), 'classes.bias': (3,)}
    """

    classes: int  # C

    def check(self) -> None:
        self.require_positive("classes")

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("head", C=self.classes)
        weights = {"classes.weight": s.shape("C D"), "classes.bias": s.shape("C")}
        flops = 2 * s["B"] * s["T"] * s["C"] * s["D"]
        yield s.step("classes", "X·W + b", "B T C", weights=weights, flops=flops, order="n·d")


@dataclass(frozen=True, kw_only=True)
class SpanHeadConfig(Part):
    """Two scores for every token: that an answer starts there, and that it ends there  (BERT, SQuAD).

    >>> SpanHeadConfig().weights(8)
    {'span.weight': (2, 8), 'span.bias': (2,)}
    """

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("head")
        weights = {"span.weight": (2, s["D"]), "span.bias": (2,)}
        yield s.step("span", "X·W + b", "B T 2", weights=weights, flops=4 * s["B"] * s["T"] * s["D"], order="n·d")


HeadConfig = LMHeadConfig | MaskedLMHeadConfig | PoolConfig | ClassHeadConfig | TokenClassHeadConfig | SpanHeadConfig


def dense_step(s: Scope, formula: str, letters: str, bias: bool = True) -> Step:
    width = s.shape(letters)[-1]
    weights: dict[str, Shape] = {"dense.weight": (width, s["D"])} | ({"dense.bias": (width,)} if bias else {})
    return s.step("dense", formula, letters, weights=weights, flops=2 * s["B"] * s["T"] * width * s["D"], order="n·d²")


def vocabulary_step(s: Scope, formula: str, tied: bool, bias: bool) -> Step:
    weights = ({} if tied else {"weight": s.shape("V D")}) | ({"bias": s.shape("V")} if bias else {})
    flops = 2 * s["B"] * s["T"] * s["V"] * s["D"]
    return s.step("logits", formula, "B T V", weights=weights, flops=flops, order="n·d·V")
