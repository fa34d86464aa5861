"""Decoder-only models with learned positions: GPT-1 (post-norm), GPT-2 and GPT-3 (pre-norm)."""

from typing import Literal

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    FeedForwardConfig,
    LayerNormConfig,
    LearnedConfig,
    LMHeadConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)


def gpt(
    *,
    dim: int,
    layers: int,
    heads: int,
    vocabulary: int = 50257,
    length: int = 1024,
    hidden: int | None = None,
    placement: Literal["pre", "post"] = "pre",
    dropout: float = 0.0,
) -> SequenceModelConfig:
    """Radford et al. 2018 (placement="post", no final norm) and 2019 (placement="pre")."""
    norm = LayerNormConfig(eps=1e-5)
    block = BlockConfig(
        mixer=AttentionConfig(heads=heads, mask=Causal(), qkv_bias=True, out_bias=True, dropout=dropout),
        ffn=FeedForwardConfig(hidden=hidden, activation="gelu_tanh"),
        norm=norm,
        placement=placement,
        dropout=dropout,
    )
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=vocabulary, position=LearnedConfig(length=length), dropout=dropout),
        stack=StackConfig(dim=dim, pattern=(block,), repeats=layers, final_norm=norm if placement == "pre" else None),
        head=LMHeadConfig(vocabulary=vocabulary, tied=True),
    )
