"""Heads: from hidden states to logits, or to one vector per text.

A tied head has no matrix of its own and uses `table`, the embedding's.

    x  B T D  ──  LMHead, MaskedLMHead  ──  logits  B T V
              ──  FirstToken, LastToken, MeanPool, Pooler  ──  B D  ──  ClassHead  ──  B C

`forward(x, context, table)` is the same for all of them, so that a model needs no branch for its head.

A pooler has no weights, or few; the class that needs classes names one as its part (`ClassHeadConfig.pool`). Embeddings
of sentences use a pooler alone as the head. A head without weights still has a module, so that taps and configs have
the same names for all. Padding may stand on either side, so "first" and "last" mean real tokens.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import (
    ClassHeadConfig,
    FirstTokenConfig,
    LastTokenConfig,
    LMHeadConfig,
    MaskedLMHeadConfig,
    MeanPoolConfig,
    PoolerConfig,
    SpanHeadConfig,
    TokenClassHeadConfig,
)
from clearhead.functional import ACTIVATIONS
from clearhead.precision.matrix import Linear, Packed, linear

from .build import build_part, builds
from .context import Context

Table = Float[Tensor, "V Y"] | Packed | None  # Y = D, except in ALBERT


@builds(LMHeadConfig)
class LMHead(nn.Module):
    """x Wᵀ + b: logits over the vocabulary. Those at position t score token t + 1.

    `scale` and `softcap` change logits after the product: logits·scale (Cohere), softcap·tanh(logits/softcap) (Gemma
    2).
    """

    def __init__(self, config: LMHeadConfig, dim: int) -> None:
        super().__init__()
        self.narrow = None if config.width is None else Linear(dim, config.width, bias=False)
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.vocabulary, config.width or dim))
        self.bias = nn.Parameter(torch.zeros(config.vocabulary)) if config.bias else None
        self.scale, self.softcap = config.scale, config.softcap

    def forward(self, x: Float[Tensor, "B T D"], context: Context, table: Table) -> Float[Tensor, "B T V"]:
        """B T V. In decoding the model passes only the last position here."""
        if self.narrow is not None:
            x = context.tap("narrow", self.narrow(x))
        logits = linear(x, own_or_tied(self.weight, table), self.bias)
        logits = logits if self.scale == 1 else logits * self.scale
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        return context.tap("logits", logits)


@builds(MaskedLMHeadConfig)
class MaskedLMHead(nn.Module):
    """A dense layer, an activation and a norm, then logits: those at position t score token t itself (BERT).

    The dense layer turns a vector that summarises the context into one that is close to the missing token's row.
    """

    def __init__(self, config: MaskedLMHeadConfig, dim: int) -> None:
        super().__init__()
        self.activation = config.activation
        width = config.width or dim
        self.dense = Linear(dim, width, bias=config.dense_bias)
        self.norm = build_part(config.norm, width)
        self.weight = None if config.tied else nn.Parameter(torch.empty(config.vocabulary, width))
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))

    def forward(self, x: Float[Tensor, "B T D"], context: Context, table: Table) -> Float[Tensor, "B T V"]:
        """B T V. Taps: dense and norm B T Y, logits B T V."""
        x = context.tap("dense", ACTIVATIONS[self.activation](self.dense(x)))
        x = context.tap("norm", self.norm(x))
        return context.tap("logits", linear(x, own_or_tied(self.weight, table), self.bias))


@builds(FirstTokenConfig)
class FirstToken(nn.Module):
    """The first real position's vector: the class token of BERT and ViT."""

    def __init__(self, config: FirstTokenConfig, dim: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B T D"], context: Context, table: Table) -> Float[Tensor, "B D"]:
        return context.tap("pooled", first_real(x, context))


@builds(LastTokenConfig)
class LastToken(nn.Module):
    """The last real position's vector: in a causal model the only one that has read the whole text."""

    def __init__(self, config: LastTokenConfig, dim: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B T D"], context: Context, table: Table) -> Float[Tensor, "B D"]:
        """B D. The reversed argmax finds the last True of each row, so padding at the end is skipped."""
        if context.readable is None:
            return context.tap("pooled", x[:, -1])
        last = x.shape[1] - 1 - context.readable.int().flip(1).argmax(dim=1)
        return context.tap("pooled", pick_rows(x, last))


@builds(MeanPoolConfig)
class MeanPool(nn.Module):
    """The mean over real positions; padding does not count, or short texts would drift towards 0."""

    def __init__(self, config: MeanPoolConfig, dim: int) -> None:
        super().__init__()

    def forward(self, x: Float[Tensor, "B T D"], context: Context, table: Table) -> Float[Tensor, "B D"]:
        """B D. A row of nothing but padding gives zeros."""
        if context.readable is None:
            return context.tap("pooled", x.mean(dim=1))
        real = context.readable[:, :, None].to(x.dtype)
        return context.tap("pooled", (x * real).sum(dim=1) / real.sum(dim=1).clamp(min=1))


@builds(PoolerConfig)
class Pooler(nn.Module):
    """An activation of a dense layer over the first position.

    BERT's checkpoints have one, with tanh; ELECTRA and RoBERTa classify with other activations.
    """

    def __init__(self, config: PoolerConfig, dim: int) -> None:
        super().__init__()
        self.activation = torch.tanh if config.activation == "tanh" else ACTIVATIONS[config.activation]
        self.dense = Linear(dim, dim)

    def forward(self, x: Float[Tensor, "B T D"], context: Context, table: Table) -> Float[Tensor, "B D"]:
        return context.tap("dense", self.activation(self.dense(first_real(x, context))))


@builds(ClassHeadConfig)
class ClassHead(nn.Module):
    """Pool the positions to one vector, then score the classes."""

    def __init__(self, config: ClassHeadConfig, dim: int) -> None:
        super().__init__()
        self.pool = build_part(config.pool, dim)
        self.classes = Linear(dim, config.classes, bias=config.bias)

    def forward(self, x: Float[Tensor, "B T D"], context: Context, table: Table) -> Float[Tensor, "B C"]:
        """B C: one score for each class; softmax of them are probabilities."""
        return context.tap("classes", self.classes(self.pool(x, context.at("pool"), table)))


@builds(TokenClassHeadConfig)
class TokenClassHead(nn.Module):
    """The classes of every token."""

    def __init__(self, config: TokenClassHeadConfig, dim: int) -> None:
        super().__init__()
        self.classes = Linear(dim, config.classes)

    def forward(self, x: Float[Tensor, "B T D"], context: Context, table: Table) -> Float[Tensor, "B T C"]:
        return context.tap("classes", self.classes(x))


@builds(SpanHeadConfig)
class SpanHead(nn.Module):
    """Scores of every token as the start and as the end of an answer, B T 2.

    The answer is the pair start ≤ end with the largest sum. That search belongs to the task, not to the model.
    """

    def __init__(self, config: SpanHeadConfig, dim: int) -> None:
        super().__init__()
        self.span = Linear(dim, 2)

    def forward(self, x: Float[Tensor, "B T D"], context: Context, table: Table) -> Float[Tensor, "B T 2"]:
        return context.tap("span", self.span(x))


def first_real(x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B D"]:
    """The vector of the first position that is not padding."""
    if context.readable is None:
        return x[:, 0]
    return pick_rows(x, context.readable.int().argmax(dim=1))


def pick_rows(x: Float[Tensor, "B T D"], places: Int[Tensor, "B"]) -> Float[Tensor, "B D"]:
    """The vector at one place of each row. An exported graph keeps its batch free, as indexing by a range would not."""
    return x.gather(1, places[:, None, None].expand(-1, 1, x.shape[2]))[:, 0]


def own_or_tied(weight: Table, table: Table) -> Float[Tensor, "V Y"] | Packed:
    """The head's own matrix, or the embedding's table if it is tied."""
    chosen = table if weight is None else weight
    assert chosen is not None, "the config has checked that a tied head has a table"
    return chosen
