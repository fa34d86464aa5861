"""Latent attention and fine-grained experts: DeepSeek-V2 (arXiv 2405.04434) and V3 (arXiv 2412.19437)."""

from clearhead.configs import (
    BlockConfig,
    GatedFeedForwardConfig,
    GroupedChoiceConfig,
    LatentAttentionConfig,
    LMHeadConfig,
    MoEConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
    YarnScaling,
)
from clearhead.configs.rotary import yarn_magnitude


def deepseek(
    *,
    dim: int,
    layers: int,
    mixer: LatentAttentionConfig,
    hidden: int,
    moe: MoEConfig,
    vocabulary: int,
    dense_layers: int = 1,
    eps: float = 1e-6,
    tied: bool = False,
) -> SequenceModelConfig:
    """`dense_layers` blocks with a plain gated layer of width `hidden`, then blocks with experts."""
    norm = RMSNormConfig(eps=eps)
    dense = BlockConfig(mixer=mixer, ffn=GatedFeedForwardConfig(hidden=hidden), norm=norm)
    sparse = BlockConfig(mixer=mixer, ffn=moe, norm=norm)
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=vocabulary),
        stack=StackConfig(
            dim=dim,
            first=(dense,) * dense_layers,
            pattern=(sparse,),
            repeats=layers - dense_layers,
            final_norm=norm,
        ),
        head=LMHeadConfig(vocabulary=vocabulary, tied=tied),
    )


def deepseek_v2_lite() -> SequenceModelConfig:
    """16B parameters, 2.4B active; context extended from 4,096 to 163,840 by YaRN."""
    rotary = RotaryConfig(layout="interleaved", scaling=YarnScaling(factor=40, length=4096, rotation=1.0))
    mixer = LatentAttentionConfig(
        heads=16,
        latent_dim=512,
        plain_dim=128,
        rope_dim=64,
        value_dim=128,
        rotary=rotary,
        magnitude=yarn_magnitude(40, 0.707),
    )
    moe = MoEConfig(
        expert=GatedFeedForwardConfig(hidden=1408),
        experts=64,
        active=6,
        shared=GatedFeedForwardConfig(hidden=2 * 1408),
        normalised=False,
    )
    return deepseek(dim=2048, layers=27, mixer=mixer, hidden=10944, moe=moe, vocabulary=102400)


def deepseek_v3() -> SequenceModelConfig:
    """671B parameters, 37B active, without the module that predicts two tokens ahead."""
    rotary = RotaryConfig(layout="interleaved", scaling=YarnScaling(factor=40, length=4096, rotation=1.0))
    mixer = LatentAttentionConfig(
        heads=128,
        latent_dim=512,
        plain_dim=128,
        rope_dim=64,
        value_dim=128,
        query_latent_dim=1536,
        rotary=rotary,
        magnitude=yarn_magnitude(40, 1.0),
    )
    moe = MoEConfig(
        expert=GatedFeedForwardConfig(hidden=2048),
        experts=256,
        active=8,
        shared=GatedFeedForwardConfig(hidden=2048),
        scale=2.5,
        choice=GroupedChoiceConfig(groups=8, kept=4),
    )
    return deepseek(dim=7168, layers=61, mixer=mixer, hidden=18432, moe=moe, vocabulary=129280, dense_layers=3)
