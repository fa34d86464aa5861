"""The two kinds of model: a sequence model, and an encoder–decoder."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .base import Config, ConfigError, Part, Scope, Shape, Step, under
from .embedding import (
    AudioEmbeddingConfig,
    BorrowedEmbeddingConfig,
    EmbeddingConfig,
    FactoredEmbeddingConfig,
    TokenEmbeddingConfig,
    WidenedEmbeddingConfig,
)
from .heads import HeadConfig, LMHeadConfig, MaskedLMHeadConfig
from .stack import BlockConfig, StackConfig


@dataclass(frozen=True, kw_only=True)
class SequenceModelConfig(Part):
    """embedding -> stack -> head: GPT, LLaMA, BERT, ViT. Without a head the hidden states come out.

    >>> config = clearhead.preset("tiny-gpt")
    >>> config.kind(), config.stack.dim, config.count_parameters()
    ('SequenceModel', 32, 30752)
    """

    __repr__ = Config.__str__

    embedding: EmbeddingConfig
    stack: StackConfig
    head: HeadConfig | None = None

    def check(self) -> None:
        if isinstance(self.embedding, BorrowedEmbeddingConfig):
            raise ConfigError("the embedding borrows the source's table, but a SequenceModel has no source")
        check_tied(self.head, self.embedding)
        for i, block in enumerate(self.stack.distinct):
            if isinstance(block, BlockConfig) and block.cross is not None:
                raise ConfigError(f"block {i} has cross-attention, but a SequenceModel has no encoder to read")

    def steps(self, scope: Scope) -> Iterator[Step]:
        length = self.embedding.positions(scope["T"])
        s = scope.with_sizes(D=self.stack.dim, T=length, S=max(length, scope["S"]), source=0, source_new=0)
        yield from under("embedding", self.embedding.steps(s))
        yield from under("stack", self.stack.steps(s))
        if self.head is not None:
            yield from under("head", self.head.steps(s))

    def state(self, scope: Scope) -> dict[str, Shape]:
        return {f"stack.{name}": shape for name, shape in self.stack.state(scope.with_sizes(source=0)).items()}


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig(Part):
    """source -> encoder; target -> decoder, whose cross-attention reads the encoder's output -> head.

    >>> config = clearhead.preset("tiny-transformer")
    >>> config.kind(), config.encoder.repeats, config.decoder.repeats
    ('EncoderDecoder', 2, 2)
    """

    __repr__ = Config.__str__

    source: TokenEmbeddingConfig | AudioEmbeddingConfig
    encoder: StackConfig
    target: TokenEmbeddingConfig | None = None  # None: the source's embedding, as the 2017 paper ties them
    decoder: StackConfig
    head: LMHeadConfig

    def check(self) -> None:
        borrows = self.target is None or isinstance(self.target, BorrowedEmbeddingConfig)
        if borrows and isinstance(self.source, AudioEmbeddingConfig):
            raise ConfigError("the target uses the source's table, but a source of sound has none")
        check_tied(self.head, self.target or self.source)
        if isinstance(self.source, BorrowedEmbeddingConfig):
            raise ConfigError("the source's embedding borrows a table, but only a target's embedding can")
        lent = getattr(self.source, "vocabulary", None)
        if isinstance(self.target, BorrowedEmbeddingConfig) and self.target.vocabulary != lent:
            sizes = f"{self.target.vocabulary} is not {lent}"
            raise ConfigError(f"the target borrows the source's table, but its vocabulary {sizes}")
        for i, block in enumerate(self.decoder.distinct):
            if not isinstance(block, BlockConfig) or block.cross is None:
                raise ConfigError(f"decoder block {i} has no cross-attention, so it cannot read the encoder")
        for i, block in enumerate(self.encoder.distinct):
            if isinstance(block, BlockConfig) and block.cross is not None:
                raise ConfigError(f"encoder block {i} has cross-attention, but an encoder has nothing to read")
        if self.encoder.dim != self.decoder.dim:
            raise ConfigError(f"the encoder's width {self.encoder.dim} is not the decoder's, {self.decoder.dim}")

    def steps(self, scope: Scope) -> Iterator[Step]:
        source = self.source.positions(scope.sizes.get("source", scope["T"]))
        new = source if scope.sizes.get("source_new", source) else 0
        s = scope.with_sizes(D=self.encoder.dim, source=source, source_new=new)
        if s["source_new"]:  # decoding one more token does not run the encoder again
            reading = s.with_sizes(T=source, S=source)
            yield from under("source", self.source.steps(reading))
            yield from under("encoder", self.encoder.steps(reading))
        if self.target is not None:
            yield from under("target", self.target.steps(s))
        else:
            shared = (replace(step, weights={}) for step in self.source.steps(s))
            yield from under("target", shared)
        yield from under("decoder", self.decoder.steps(s))
        yield from under("head", self.head.steps(s))

    def state(self, scope: Scope) -> dict[str, Shape]:
        s = scope.with_sizes(source=self.source.positions(scope.sizes.get("source", scope["S"])))
        return {f"decoder.{name}": shape for name, shape in self.decoder.state(s).items()}


ModelConfig = SequenceModelConfig | EncoderDecoderConfig


def check_tied(head: HeadConfig | None, embedding: EmbeddingConfig) -> None:
    if not isinstance(head, LMHeadConfig | MaskedLMHeadConfig) or not head.tied:
        return
    if not isinstance(embedding, TokenEmbeddingConfig):
        raise ConfigError("the head is tied, but this embedding has no table to tie it to")
    width = embedding.width if isinstance(embedding, FactoredEmbeddingConfig | WidenedEmbeddingConfig) else None
    if width != head.width:
        raise ConfigError(
            f"the head is tied to a table of width {width or 'D'}, but reads vectors of width {head.width or 'D'}"
        )
    if head.vocabulary != embedding.vocabulary:
        raise ConfigError(f"the head is tied, but its vocabulary {head.vocabulary} is not {embedding.vocabulary}")
