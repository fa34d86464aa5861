"""Marian's translation models as `transformers` stores them: the 2017 encoder–decoder, with biases."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    ConfigError,
    EncoderDecoderConfig,
    FeedForwardConfig,
    Full,
    LayerNormConfig,
    LMHeadConfig,
    Mask,
    ModelConfig,
    SinusoidalConfig,
    StackConfig,
    TokenEmbeddingConfig,
)

from .rules import Reshaped, Rule, activation, both, copies, hf_activation, joined_qkv

PREFIX = "model."
IGNORED = (
    r"lm_head\.weight",
    r"(encoder|decoder)\.embed_positions\.weight",
    r"(encoder|decoder)\.embed_tokens\.weight",
)
ARCHITECTURES = {"marian": ("MarianMTModel",)}


def from_hf(hf: Mapping[str, Any]) -> EncoderDecoderConfig:
    if not hf.get("share_encoder_decoder_embeddings", True):
        raise ConfigError("Marian with separate source and target embeddings is not supported yet")
    act, norm = activation(hf["activation_function"]), LayerNormConfig(eps=1e-5)
    dropout, attention_dropout = hf.get("dropout", 0.1), hf.get("attention_dropout", 0.0)

    def attention(heads: int, mask: Mask) -> AttentionConfig:
        return AttentionConfig(heads=heads, mask=mask, qkv_bias=True, out_bias=True, dropout=attention_dropout)

    def stack(side: str, mask: Mask, cross: bool) -> StackConfig:
        heads = hf[f"{side}_attention_heads"]
        block = BlockConfig(
            mixer=attention(heads, mask),
            cross=attention(heads, Full()) if cross else None,
            ffn=FeedForwardConfig(hidden=hf[f"{side}_ffn_dim"], activation=act),
            norm=norm,
            placement="post",
            dropout=dropout,
        )
        return StackConfig(dim=hf["d_model"], pattern=(block,), repeats=hf[f"{side}_layers"])

    return EncoderDecoderConfig(
        source=TokenEmbeddingConfig(
            vocabulary=hf["vocab_size"],
            position=SinusoidalConfig(layout="halves"),
            scaled=bool(hf.get("scale_embedding", False)),
            dropout=dropout,
        ),
        encoder=stack("encoder", Full(), cross=False),
        decoder=stack("decoder", Causal(), cross=True),
        head=LMHeadConfig(vocabulary=hf["vocab_size"], tied=True, bias=True),
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case EncoderDecoderConfig(
            source=source,
            encoder=StackConfig(pattern=(BlockConfig(mixer=AttentionConfig() as attention) as reader, *_)),
            decoder=StackConfig(pattern=(BlockConfig() as writer, *_)),
        ):
            pad = source.vocabulary - 1  # Marian's vocabularies end with it; decoding starts from it
            hf = {
                "architectures": [*ARCHITECTURES[kind]],
                "model_type": kind,
                "is_encoder_decoder": True,
                "vocab_size": source.vocabulary,
                "decoder_vocab_size": source.vocabulary,
                "d_model": config.encoder.dim,
                "scale_embedding": source.scaled,
                "share_encoder_decoder_embeddings": True,
                "tie_word_embeddings": True,
                "static_position_embeddings": True,
                "max_position_embeddings": 1024,
                "dropout": reader.dropout,
                "attention_dropout": attention.dropout,
                "activation_dropout": 0.0,
                "pad_token_id": pad,
                "decoder_start_token_id": pad,
                "eos_token_id": 0,
                "forced_eos_token_id": 0,
                "bos_token_id": None,
            }
            for side, stack, block in (("encoder", config.encoder, reader), ("decoder", config.decoder, writer)):
                if not isinstance(block.ffn, FeedForwardConfig) or not isinstance(block.mixer, AttentionConfig):
                    return None
                hf |= {
                    f"{side}_layers": len(stack.blocks),
                    f"{side}_attention_heads": block.mixer.heads,
                    f"{side}_ffn_dim": block.ffn.hidden,
                    "activation_function": hf_activation(block.ffn.activation),
                }
            return hf
    return None


def rules(config: EncoderDecoderConfig, kind: str) -> Iterator[Rule]:
    size = config.head.vocabulary
    yield from copies({"source.tokens.weight": "shared.weight"})
    yield Reshaped(("head.bias",), ("final_logits_bias",), (size,), (1, size))
    for side, stack in {"encoder": config.encoder, "decoder": config.decoder}.items():
        for i, block in enumerate(stack.blocks):
            assert isinstance(block, BlockConfig)
            ours, theirs = f"{side}.blocks.{i}", f"{side}.layers.{i}"
            branches = {"mixer": (block.mixer, "self_attn"), "cross": (block.cross, "encoder_attn")}
            for mine, (mixer, their) in branches.items():
                if isinstance(mixer, AttentionConfig):
                    names = tuple(f"{theirs}.{their}.{name}_proj" for name in "qkv")
                    yield from joined_qkv(f"{ours}.{mine}.qkv", names, mixer, stack.dim)
                    yield from both(
                        {
                            f"{ours}.{mine}.out": f"{theirs}.{their}.out_proj",
                            f"{ours}.{mine}_residual.after": f"{theirs}.{their}_layer_norm",
                        }
                    )
            yield from both(
                {
                    f"{ours}.ffn.up": f"{theirs}.fc1",
                    f"{ours}.ffn.down": f"{theirs}.fc2",
                    f"{ours}.ffn_residual.after": f"{theirs}.final_layer_norm",
                }
            )
