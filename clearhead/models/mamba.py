"""Selective state spaces in the place of attention and feed-forward layers: Mamba (Gu & Dao 2023, arXiv 2312.00752)."""

from clearhead.configs import (
    BlockConfig,
    LMHeadConfig,
    Mamba2Config,
    MambaConfig,
    RMSNormConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)


def mamba(
    *,
    dim: int,
    layers: int,
    vocabulary: int = 50280,
    mixer: MambaConfig | Mamba2Config = MambaConfig(),
    eps: float = 1e-5,
    tied: bool = True,
) -> SequenceModelConfig:
    """y = x + mamba(norm(x)), `layers` times: one mixer a block and nothing else. No positions: order is time."""
    norm = RMSNormConfig(eps=eps)
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=vocabulary),
        stack=StackConfig(dim=dim, pattern=(BlockConfig(mixer=mixer, norm=norm),), repeats=layers, final_norm=norm),
        head=LMHeadConfig(vocabulary=vocabulary, tied=tied),
    )
