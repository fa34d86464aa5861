"""Gemma (arXiv 2403.08295) and the text model of Gemma 3 (arXiv 2503.19786): gains of 1 + γ, embeddings times √D."""

from collections.abc import Sequence
from dataclasses import replace

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    GatedFeedForwardConfig,
    LMHeadConfig,
    OffsetRMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
    Window,
)
from clearhead.configs.ffn import Activation


def gemma(
    *,
    dim: int,
    layers: int,
    mixer: AttentionConfig,
    hidden: int,
    vocabulary: int = 256000,
    activation: Activation = "gelu_tanh",
    eps: float = 1e-6,
) -> SequenceModelConfig:
    """LLaMA's blocks with GEGLU; one table for tokens and output."""
    norm = OffsetRMSNormConfig(eps=eps)
    block = BlockConfig(mixer=mixer, ffn=GatedFeedForwardConfig(hidden=hidden, activation=activation), norm=norm)
    return model((block,), layers, dim, vocabulary, norm)


def gemma3(
    *,
    dim: int,
    mixers: Sequence[AttentionConfig],
    hidden: int,
    vocabulary: int = 262144,
    activation: Activation = "gelu_tanh",
    eps: float = 1e-6,
    normed: bool = True,
) -> SequenceModelConfig:
    """A norm before and after each branch; `mixers` from the bottom up, some with a window.

    normed  also norm the queries and keys of each head (Gemma 3, not Gemma 2)
    """
    norm = OffsetRMSNormConfig(eps=eps)
    ffn = GatedFeedForwardConfig(hidden=hidden, activation=activation)
    pattern = tuple(
        BlockConfig(mixer=replace(mixer, qk_norm=norm if normed else None), ffn=ffn, norm=norm, placement="sandwich")
        for mixer in mixers
    )
    return model(pattern, 1, dim, vocabulary, norm)


def model(
    pattern: tuple[BlockConfig, ...], repeats: int, dim: int, vocabulary: int, norm: OffsetRMSNormConfig
) -> SequenceModelConfig:
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=vocabulary, scaled=True),
        stack=StackConfig(dim=dim, pattern=pattern, repeats=repeats, final_norm=norm),
        head=LMHeadConfig(vocabulary=vocabulary, tied=True),
    )


def gemma_2b() -> SequenceModelConfig:
    mixer = AttentionConfig(heads=8, kv_heads=1, head_dim=256, mask=Causal(), rotary=RotaryConfig())
    return gemma(dim=2048, layers=18, mixer=mixer, hidden=16384)


def gemma3_1b() -> SequenceModelConfig:
    """Five layers that read the last 512 tokens, then one that reads all, over and over."""
    far = AttentionConfig(heads=4, kv_heads=1, head_dim=256, mask=Causal(), rotary=RotaryConfig(theta=1e6))
    near = AttentionConfig(heads=4, kv_heads=1, head_dim=256, mask=Causal() & Window(512), rotary=RotaryConfig())
    return gemma3(dim=1152, mixers=[far if i % 6 == 5 else near for i in range(26)], hidden=6912)
