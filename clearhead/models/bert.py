"""Encoder-only models: BERT (Devlin et al. 2019), and ALBERT (Lan et al. 2020)."""

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    FactoredEmbeddingConfig,
    FeedForwardConfig,
    HeadConfig,
    LayerNormConfig,
    LearnedConfig,
    PoolerConfig,
    SequenceModelConfig,
    SharedStackConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.configs.ffn import Activation

NORM = LayerNormConfig(eps=1e-12)


def post_norm_block(heads: int, hidden: int | None, activation: Activation, dropout: float) -> BlockConfig:
    """Attention and feed-forward with biases, a norm after each residual sum."""
    return BlockConfig(
        mixer=AttentionConfig(heads=heads, qkv_bias=True, out_bias=True, dropout=dropout),
        ffn=FeedForwardConfig(hidden=hidden, activation=activation),
        norm=NORM,
        placement="post",
        dropout=dropout,
    )


def bert(
    *,
    dim: int,
    layers: int,
    heads: int,
    hidden: int | None = None,
    vocabulary: int = 30522,
    length: int = 512,
    segments: int = 2,
    head: HeadConfig | None = PoolerConfig(),
    dropout: float = 0.0,
) -> SequenceModelConfig:
    """Token, position and segment embeddings, post-norm blocks; encoder and pooler unless another head is given."""
    block = post_norm_block(heads, hidden, "gelu", dropout)
    embedding = TokenEmbeddingConfig(
        vocabulary=vocabulary, position=LearnedConfig(length=length), segments=segments, norm=NORM, dropout=dropout
    )
    return SequenceModelConfig(
        embedding=embedding, stack=StackConfig(dim=dim, pattern=(block,), repeats=layers), head=head
    )


def albert(
    *,
    dim: int,
    width: int = 128,
    layers: int,
    heads: int,
    hidden: int | None = None,
    vocabulary: int = 30000,
    length: int = 512,
    segments: int = 2,
    head: HeadConfig | None = PoolerConfig(),
    dropout: float = 0.0,
) -> SequenceModelConfig:
    """BERT whose one block runs `layers` times, over a table of tokens that is `width` wide."""
    block = post_norm_block(heads, hidden, "gelu_tanh", dropout)
    embedding = FactoredEmbeddingConfig(
        vocabulary=vocabulary,
        width=width,
        position=LearnedConfig(length=length),
        segments=segments,
        norm=NORM,
        dropout=dropout,
    )
    return SequenceModelConfig(
        embedding=embedding, stack=SharedStackConfig(dim=dim, pattern=(block,), repeats=layers), head=head
    )
