"""ViT, the Vision Transformer: an image as a sequence of patches (Dosovitskiy et al. 2021)."""

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    ClassHeadConfig,
    FeedForwardConfig,
    HeadConfig,
    LayerNormConfig,
    PatchEmbeddingConfig,
    SequenceModelConfig,
    StackConfig,
)


def vit(
    *,
    dim: int,
    layers: int,
    heads: int,
    hidden: int | None = None,
    image: int = 224,
    patch: int = 16,
    channels: int = 3,
    head: HeadConfig | None = ClassHeadConfig(classes=1000),
    dropout: float = 0.0,
) -> SequenceModelConfig:
    """A ViT: pre-norm blocks over a class token and patches. The head classifies the class token."""
    norm = LayerNormConfig(eps=1e-12)
    block = BlockConfig(
        mixer=AttentionConfig(heads=heads, qkv_bias=True, out_bias=True, dropout=dropout),
        ffn=FeedForwardConfig(hidden=hidden, activation="gelu"),
        norm=norm,
        dropout=dropout,
    )
    return SequenceModelConfig(
        embedding=PatchEmbeddingConfig(image=image, patch=patch, channels=channels, dropout=dropout),
        stack=StackConfig(dim=dim, pattern=(block,), repeats=layers, final_norm=norm),
        head=head,
    )
