"""Encoder-only models: BERT (Devlin et al. 2019)."""

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    FeedForwardConfig,
    HeadConfig,
    LayerNormConfig,
    LearnedConfig,
    PoolerConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
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
    norm = LayerNormConfig(eps=1e-12)
    block = BlockConfig(
        mixer=AttentionConfig(heads=heads, qkv_bias=True, out_bias=True, dropout=dropout),
        ffn=FeedForwardConfig(hidden=hidden, activation="gelu"),
        norm=norm,
        placement="post",
        dropout=dropout,
    )
    embedding = TokenEmbeddingConfig(
        vocabulary=vocabulary, position=LearnedConfig(length=length), segments=segments, norm=norm, dropout=dropout
    )
    return SequenceModelConfig(
        embedding=embedding, stack=StackConfig(dim=dim, pattern=(block,), repeats=layers), head=head
    )
