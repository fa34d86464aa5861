"""RMSNorm, rotary positions, gated feed-forward, no biases: LLaMA and its kin, dense and with experts."""

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    GatedFeedForwardConfig,
    LMHeadConfig,
    Mask,
    MoEConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.configs.mixer import MixerConfig
from clearhead.configs.stack import FeedConfig


def decoder(
    *,
    dim: int,
    layers: int,
    mixer: MixerConfig,
    ffn: FeedConfig,
    vocabulary: int,
    eps: float = 1e-5,
    tied: bool = False,
) -> SequenceModelConfig:
    """y = x + mixer(norm(x)), z = y + ffn(norm(y)), `layers` times, a final norm, and a head over the vocabulary."""
    norm = RMSNormConfig(eps=eps)
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=vocabulary),
        stack=StackConfig(
            dim=dim, pattern=(BlockConfig(mixer=mixer, ffn=ffn, norm=norm),), repeats=layers, final_norm=norm
        ),
        head=LMHeadConfig(vocabulary=vocabulary, tied=tied),
    )


def llama(
    *,
    dim: int,
    layers: int,
    heads: int,
    vocabulary: int,
    kv_heads: int | None = None,
    hidden: int | None = None,
    mask: Mask = Causal(),
    theta: float = 10000.0,
    tied: bool = False,
) -> SequenceModelConfig:
    """Touvron et al. 2023. `hidden` is the width of the gated feed-forward layer."""
    mixer = AttentionConfig(heads=heads, kv_heads=kv_heads, mask=mask, rotary=RotaryConfig(theta=theta))
    ffn = GatedFeedForwardConfig(hidden=hidden)
    return decoder(dim=dim, layers=layers, mixer=mixer, ffn=ffn, vocabulary=vocabulary, tied=tied)


def mixtral(
    *,
    dim: int,
    layers: int,
    heads: int,
    kv_heads: int,
    hidden: int,
    vocabulary: int,
    experts: int = 8,
    active: int = 2,
    theta: float = 1e6,
) -> SequenceModelConfig:
    """Jiang et al. 2024: LLaMA whose feed-forward layer is a mixture of experts."""
    mixer = AttentionConfig(heads=heads, kv_heads=kv_heads, mask=Causal(), rotary=RotaryConfig(theta=theta))
    ffn = MoEConfig(expert=GatedFeedForwardConfig(hidden=hidden), experts=experts, active=active)
    return decoder(dim=dim, layers=layers, mixer=mixer, ffn=ffn, vocabulary=vocabulary)
