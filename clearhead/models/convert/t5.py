"""T5 and Flan-T5 as `transformers` stores them: learned biases of distances, and no other positions."""

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
    GatedFeedForwardConfig,
    LMHeadConfig,
    Mask,
    ModelConfig,
    RelativeBiasConfig,
    RMSNormConfig,
    StackConfig,
    TokenEmbeddingConfig,
)

from .rules import Rule, Transposed, activation, both, copies, hf_activation, joined_qkv, present

PREFIX = ""
IGNORED = (
    r"(encoder|decoder)\.embed_tokens\.weight",
    r"lm_head\.weight",
    r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",  # of old files; unused
)
ARCHITECTURES = {"t5": ("T5ForConditionalGeneration",)}


def from_hf(hf: Mapping[str, Any]) -> EncoderDecoderConfig:
    gate, _, act = (hf.get("feed_forward_proj") or "relu").rpartition("-")
    if gate not in ("", "gated"):
        raise ConfigError(f"t5 with feed_forward_proj {hf['feed_forward_proj']!r} is not supported yet")
    # `gated-gelu` has always meant the tanh form
    act = activation("gelu_new" if gate and act == "gelu" else act)
    dim, heads, hidden = hf["d_model"], hf["num_heads"], hf["d_ff"]
    norm = RMSNormConfig(eps=float(hf.get("layer_norm_epsilon", 1e-6)))
    plain = FeedForwardConfig(hidden=hidden, activation=act, bias=False)
    ffn = GatedFeedForwardConfig(hidden=hidden, activation=act) if gate else plain
    dropout = hf.get("dropout_rate", 0.1)

    def attention(mask: Mask) -> AttentionConfig:
        return AttentionConfig(heads=heads, head_dim=hf["d_kv"], mask=mask, scale=1.0, dropout=dropout)

    def stack(mask: Mask, layers: int, cross: AttentionConfig | None) -> StackConfig:
        block = BlockConfig(mixer=attention(mask), cross=cross, ffn=ffn, norm=norm, dropout=dropout)
        bias = RelativeBiasConfig(
            heads=heads,
            buckets=hf.get("relative_attention_num_buckets", 32),
            limit=hf.get("relative_attention_max_distance", 128),
            mirrored=cross is None,
        )
        return StackConfig(dim=dim, pattern=(block,), repeats=layers, final_norm=norm, score_bias=bias)

    tied = bool(hf.get("tie_word_embeddings", True))
    scaled = bool(hf.get("scale_decoder_outputs", tied))
    return EncoderDecoderConfig(
        source=TokenEmbeddingConfig(vocabulary=hf["vocab_size"], dropout=dropout),
        encoder=stack(Full(), hf["num_layers"], None),
        decoder=stack(Causal(), hf.get("num_decoder_layers") or hf["num_layers"], attention(Full())),
        head=LMHeadConfig(vocabulary=hf["vocab_size"], tied=tied, scale=dim**-0.5 if scaled else 1.0),
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case EncoderDecoderConfig(
            source=TokenEmbeddingConfig() as source,
            encoder=StackConfig(
                pattern=(BlockConfig(mixer=AttentionConfig() as mixer, norm=norm, ffn=ffn), *_),
                score_bias=RelativeBiasConfig() as bias,
            ) as encoder,
            decoder=decoder,
            head=head,
        ) if isinstance(ffn, FeedForwardConfig | GatedFeedForwardConfig):
            gated = isinstance(ffn, GatedFeedForwardConfig)
            act = {"gelu_tanh": "gelu" if gated else "gelu_new"}.get(ffn.activation, hf_activation(ffn.activation))
            return {
                "architectures": [*ARCHITECTURES[kind]],
                "model_type": kind,
                "is_encoder_decoder": True,
                "vocab_size": source.vocabulary,
                "d_model": encoder.dim,
                "d_kv": mixer.head_dim,
                "d_ff": ffn.hidden,
                "num_layers": len(encoder.blocks),
                "num_decoder_layers": len(decoder.blocks),
                "num_heads": mixer.heads,
                "relative_attention_num_buckets": bias.buckets,
                "relative_attention_max_distance": bias.limit,
                "dropout_rate": source.dropout,
                "layer_norm_epsilon": norm.eps,
                "feed_forward_proj": f"gated-{act}" if gated else act,
                "tie_word_embeddings": head.tied,
                "scale_decoder_outputs": head.scale != 1.0,
                "pad_token_id": 0,
                "eos_token_id": 1,
                "decoder_start_token_id": 0,
            }
    return None


def rules(config: EncoderDecoderConfig, kind: str) -> Iterator[Rule]:
    return present(config, all_rules(config))


def all_rules(config: EncoderDecoderConfig) -> Iterator[Rule]:
    yield from copies({"source.tokens.weight": "shared.weight", "head.weight": "lm_head.weight"})
    for side, stack in {"encoder": config.encoder, "decoder": config.decoder}.items():
        first = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Transposed((f"{side}.score_bias.weight",), (first,))
        yield from both({f"{side}.final_norm": f"{side}.final_layer_norm"})
        for i, block in enumerate(stack.blocks):
            assert isinstance(block, BlockConfig)
            ours, theirs = f"{side}.blocks.{i}", f"{side}.block.{i}.layer"
            names = {"mixer": "SelfAttention", "cross": "EncDecAttention", "ffn": "DenseReluDense"}
            for number, (mine, part) in enumerate(block.branches().items()):
                their = f"{theirs}.{number}.{names[mine]}"
                yield from both({f"{ours}.{mine}_residual.before": f"{theirs}.{number}.layer_norm"})
                if isinstance(part, AttentionConfig):
                    yield from joined_qkv(f"{ours}.{mine}.qkv", tuple(f"{their}.{x}" for x in "qkv"), part, stack.dim)
                    yield from both({f"{ours}.{mine}.out": f"{their}.o"})
            gated = isinstance(block.ffn, GatedFeedForwardConfig)
            matrices = {"gate": "wi_0", "up": "wi_1" if gated else "wi", "down": "wo"}
            dense = f"{theirs}.{len(block.branches()) - 1}.DenseReluDense"
            yield from both({f"{ours}.ffn.{mine}": f"{dense}.{their}" for mine, their in matrices.items()})
