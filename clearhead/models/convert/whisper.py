"""Whisper as `transformers` stores it: sound into the encoder of 2017, with norms first, and text out of its decoder.

Whisper's keys have no bias. A bias of the keys adds the same number to all scores of a query, and the softmax cancels
it; so ours is zero when a model is loaded, and is left out when it is saved.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    AudioEmbeddingConfig,
    BlockConfig,
    Causal,
    EncoderDecoderConfig,
    FeedForwardConfig,
    Full,
    LayerNormConfig,
    LearnedConfig,
    LMHeadConfig,
    Mask,
    ModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)

from .rules import Array, Reshaped, Rows, Rule, activation, copies, hf_activation, library
from .seq2seq import stack_rules

PREFIX = "model."
IGNORED = (r"proj_out\.weight",)
ARCHITECTURES = {"whisper": ("WhisperForConditionalGeneration",)}
TOKENS = {"pad_token_id": 50256, "bos_token_id": 50257, "eos_token_id": 50256, "decoder_start_token_id": 50257}


@dataclass(frozen=True)
class KeylessBias(Rows):
    """They store the biases of queries and values only."""

    def gather(self, parts: list[Array]) -> list[Array]:
        queries, values = parts
        zeros = (values * 0)[: self.sizes[1]]
        return [library(queries).concatenate([queries, zeros, values])]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        queries, _, values = super().scatter(arrays)
        return [queries, values]


def from_hf(hf: Mapping[str, Any]) -> EncoderDecoderConfig:
    dim, norm = hf["d_model"], LayerNormConfig(eps=1e-5)
    dropout, attention_dropout = hf.get("dropout", 0.0), hf.get("attention_dropout", 0.0)

    def attention(heads: int, mask: Mask) -> AttentionConfig:
        return AttentionConfig(heads=heads, mask=mask, qkv_bias=True, out_bias=True, dropout=attention_dropout)

    def stack(side: str, mask: Mask) -> StackConfig:
        heads = hf[f"{side}_attention_heads"]
        block = BlockConfig(
            mixer=attention(heads, mask),
            cross=attention(heads, Full()) if side == "decoder" else None,
            ffn=FeedForwardConfig(
                hidden=hf[f"{side}_ffn_dim"], activation=activation(hf.get("activation_function") or "gelu")
            ),
            norm=norm,
            dropout=dropout,
        )
        return StackConfig(dim=dim, pattern=(block,), repeats=hf[f"{side}_layers"], final_norm=norm)

    return EncoderDecoderConfig(
        source=AudioEmbeddingConfig(mels=hf["num_mel_bins"], length=hf["max_source_positions"], dropout=dropout),
        encoder=stack("encoder", Full()),
        target=TokenEmbeddingConfig(
            vocabulary=hf["vocab_size"], position=LearnedConfig(length=hf["max_target_positions"]), dropout=dropout
        ),
        decoder=stack("decoder", Causal()),
        head=LMHeadConfig(vocabulary=hf["vocab_size"], tied=True),
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case EncoderDecoderConfig(
            source=AudioEmbeddingConfig() as sound,
            target=TokenEmbeddingConfig(position=LearnedConfig() as positions) as target,
            encoder=StackConfig(pattern=(BlockConfig() as reader, *_)),
            decoder=StackConfig(pattern=(BlockConfig() as writer, *_)),
        ):
            hf: dict[str, Any] = {
                "architectures": [*ARCHITECTURES[kind]],
                "model_type": kind,
                "is_encoder_decoder": True,
                "vocab_size": target.vocabulary,
                "num_mel_bins": sound.mels,
                "max_source_positions": sound.length,
                "max_target_positions": positions.length,
                "d_model": config.encoder.dim,
                "scale_embedding": False,
                "tie_word_embeddings": True,
                "dropout": reader.dropout,
                "activation_dropout": 0.0,
                **{name: id for name, id in TOKENS.items() if id < target.vocabulary},
            }
            for side, stack, block in (("encoder", config.encoder, reader), ("decoder", config.decoder, writer)):
                if not isinstance(block.ffn, FeedForwardConfig) or not isinstance(block.mixer, AttentionConfig):
                    return None
                hf |= {
                    f"{side}_layers": len(stack.blocks),
                    f"{side}_attention_heads": block.mixer.heads,
                    f"{side}_ffn_dim": block.ffn.hidden,
                    "activation_function": hf_activation(block.ffn.activation),
                    "attention_dropout": block.mixer.dropout,
                }
            return hf
    return None


def rules(config: EncoderDecoderConfig, kind: str) -> Iterator[Rule]:
    sound, dim = config.source, config.encoder.dim
    assert isinstance(sound, AudioEmbeddingConfig)
    for ours, theirs, width in (("first", "conv1", sound.mels), ("second", "conv2", dim)):
        names = (f"source.{ours}.weight",), (f"encoder.{theirs}.weight",)
        yield Reshaped(*names, (dim, 3 * width), (dim, width, 3))
        yield Rule((f"source.{ours}.bias",), (f"encoder.{theirs}.bias",))
    yield from copies(
        {
            "source.position.weight": "encoder.embed_positions.weight",
            "target.position.weight": "decoder.embed_positions.weight",
            "target.tokens.weight": "decoder.embed_tokens.weight",
        }
    )
    for rule in stack_rules(config):
        if isinstance(rule, Rows) and rule.ours[0].endswith("qkv.bias"):
            rule = KeylessBias(rule.ours, (rule.theirs[0], rule.theirs[2]), rule.sizes)
        yield rule
