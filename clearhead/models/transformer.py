"""The encoder–decoder of 2017 (Vaswani et al.), which Marian's models still are."""

from typing import Literal

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    EncoderDecoderConfig,
    FeedForwardConfig,
    Full,
    GatedFeedForwardConfig,
    LayerNormConfig,
    LMHeadConfig,
    Mask,
    RMSNormConfig,
    RotaryConfig,
    SinusoidalConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.configs.ffn import Activation


def transformer(
    *,
    dim: int,
    layers: int,
    heads: int,
    hidden: int,
    vocabulary: int = 37000,
    decoder_layers: int | None = None,
    activation: Activation = "relu",
    placement: Literal["pre", "post"] = "post",
    dropout: float = 0.1,
    bias: bool = False,
) -> EncoderDecoderConfig:
    """One table for source, target and output; post-norm without a final norm, as the paper has it.

    The paper does not say whether attention has biases; like tensor2tensor's, these do not, but fairseq's do.
    """
    norm = LayerNormConfig(eps=1e-6)

    def attention(mask: Mask) -> AttentionConfig:
        return AttentionConfig(heads=heads, mask=mask, qkv_bias=bias, out_bias=bias)

    ffn = FeedForwardConfig(hidden=hidden, activation=activation)
    encoder = BlockConfig(mixer=attention(Full()), ffn=ffn, norm=norm, placement=placement, dropout=dropout)
    decoder = BlockConfig(
        mixer=attention(Causal()), cross=attention(Full()), ffn=ffn, norm=norm, placement=placement, dropout=dropout
    )
    final_norm = norm if placement == "pre" else None
    return EncoderDecoderConfig(
        source=TokenEmbeddingConfig(vocabulary=vocabulary, position=SinusoidalConfig(), scaled=True, dropout=dropout),
        encoder=StackConfig(dim=dim, pattern=(encoder,), repeats=layers, final_norm=final_norm),
        decoder=StackConfig(dim=dim, pattern=(decoder,), repeats=decoder_layers or layers, final_norm=final_norm),
        head=LMHeadConfig(vocabulary=vocabulary, tied=True),
    )


def modern_transformer(
    *, dim: int, layers: int, heads: int, hidden: int, vocabulary: int, dropout: float = 0.1
) -> EncoderDecoderConfig:
    """An encoder–decoder of current parts: pre-norm RMSNorm, rotary positions, normed queries and keys, gated FFN.

    It has no biases, and one table for source, target and output.
    """
    norm, rotary = RMSNormConfig(), RotaryConfig()
    ffn = GatedFeedForwardConfig(hidden=hidden)

    def attention(mask: Mask, rotary: RotaryConfig | None) -> AttentionConfig:
        return AttentionConfig(heads=heads, mask=mask, rotary=rotary, qk_norm=norm)

    encoder = BlockConfig(mixer=attention(Full(), rotary), ffn=ffn, norm=norm, dropout=dropout)
    decoder = BlockConfig(
        mixer=attention(Causal(), rotary), cross=attention(Full(), None), ffn=ffn, norm=norm, dropout=dropout
    )
    return EncoderDecoderConfig(
        source=TokenEmbeddingConfig(vocabulary=vocabulary, scaled=True, dropout=dropout),
        encoder=StackConfig(dim=dim, pattern=(encoder,), repeats=layers, final_norm=norm),
        decoder=StackConfig(dim=dim, pattern=(decoder,), repeats=layers, final_norm=norm),
        head=LMHeadConfig(vocabulary=vocabulary, tied=True),
    )
