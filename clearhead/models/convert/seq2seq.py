"""Marian, Pegasus and M2M-100 (NLLB) as `transformers` stores them: the 2017 encoder–decoder, with biases."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
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

from .rules import Reshaped, Rule, activation, both, copies, hf_activation, joined_qkv, present

PREFIX = "model."
IGNORED = (
    r"lm_head\.weight",
    r"(encoder|decoder)\.embed_positions\.weight",
    r"(encoder|decoder)\.embed_tokens\.weight",
    r"shared\.weight",
)
ARCHITECTURES = {
    "marian": ("MarianMTModel",),
    "pegasus": ("PegasusForConditionalGeneration",),
    "m2m_100": ("M2M100ForConditionalGeneration",),
}
PRE_NORM = ("pegasus", "m2m_100")  # and a norm at the end of each stack
POSITIONS = {"m2m_100": 2}  # of the first token; 1 is that of padding
DEFAULTS = {"pegasus": "gelu", "m2m_100": "relu"}


def from_hf(hf: Mapping[str, Any]) -> EncoderDecoderConfig:
    kind, dim = hf["model_type"], hf["d_model"]
    act, norm = activation(hf.get("activation_function") or DEFAULTS[kind]), LayerNormConfig(eps=1e-5)
    dropout, attention_dropout = hf.get("dropout", 0.1), hf.get("attention_dropout", 0.0)
    if kind == "m2m_100" and (dim % 2 or hf.get("pad_token_id", 1) != 1):
        raise ConfigError("m2m_100 with an odd width or a pad_token_id other than 1 is not supported yet")

    def attention(heads: int, mask: Mask) -> AttentionConfig:
        return AttentionConfig(heads=heads, mask=mask, qkv_bias=True, out_bias=True, dropout=attention_dropout)

    def stack(side: str, mask: Mask, cross: bool) -> StackConfig:
        heads = hf[f"{side}_attention_heads"]
        block = BlockConfig(
            mixer=attention(heads, mask),
            cross=attention(heads, Full()) if cross else None,
            ffn=FeedForwardConfig(hidden=hf[f"{side}_ffn_dim"], activation=act),
            norm=norm,
            placement="pre" if kind in PRE_NORM else "post",
            dropout=dropout,
        )
        final = norm if kind in PRE_NORM else None
        return StackConfig(dim=dim, pattern=(block,), repeats=hf[f"{side}_layers"], final_norm=final)

    start = POSITIONS.get(kind, 0)
    # the fastest wave of M2M-100 has 1 radian per position and the slowest exactly 1/10000
    base = 10000.0 ** (dim / (dim - 2)) if kind == "m2m_100" else 10000.0
    embedding = TokenEmbeddingConfig(
        vocabulary=hf["vocab_size"],
        position=SinusoidalConfig(layout="halves", base=base, start=start),
        scaled=bool(hf.get("scale_embedding", kind == "m2m_100")),
        dropout=dropout,
    )
    written = hf["vocab_size"]
    if not hf.get("share_encoder_decoder_embeddings", True):
        written = hf.get("decoder_vocab_size") or written
    return EncoderDecoderConfig(
        source=embedding,
        encoder=stack("encoder", Full(), cross=False),
        target=None if hf.get("share_encoder_decoder_embeddings", True) else replace(embedding, vocabulary=written),
        decoder=stack("decoder", Causal(), cross=True),
        head=LMHeadConfig(vocabulary=written, tied=True, bias=kind != "m2m_100"),
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case EncoderDecoderConfig(
            source=source,
            encoder=StackConfig(pattern=(BlockConfig(mixer=AttentionConfig() as attention) as reader, *_)),
            decoder=StackConfig(pattern=(BlockConfig() as writer, *_)),
        ):
            # Marian's vocabularies end with padding; decoding starts from it
            pad = {"marian": source.vocabulary - 1, "pegasus": 0}.get(kind, 1)
            start, end = {"marian": (pad, 0), "pegasus": (0, 1)}.get(kind, (2, 2))
            hf = {
                "architectures": [*ARCHITECTURES[kind]],
                "model_type": kind,
                "is_encoder_decoder": True,
                "vocab_size": source.vocabulary,
                "decoder_vocab_size": config.head.vocabulary,
                "d_model": config.encoder.dim,
                "scale_embedding": bool(source.scaled),
                "share_encoder_decoder_embeddings": config.target is None,
                "tie_word_embeddings": True,
                "static_position_embeddings": True,
                "max_position_embeddings": 1024,
                "dropout": reader.dropout,
                "attention_dropout": attention.dropout,
                "activation_dropout": 0.0,
                "pad_token_id": pad,
                "decoder_start_token_id": start,
                "eos_token_id": end,
                "forced_eos_token_id": end,
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
    return present(config, all_rules(config))


def all_rules(config: EncoderDecoderConfig) -> Iterator[Rule]:
    size = config.head.vocabulary
    source = "shared.weight" if config.target is None else "encoder.embed_tokens.weight"
    yield from copies({"source.tokens.weight": source, "target.tokens.weight": "decoder.embed_tokens.weight"})
    yield Reshaped(("head.bias",), ("final_logits_bias",), (size,), (1, size))
    for side, stack in {"encoder": config.encoder, "decoder": config.decoder}.items():
        yield from both({f"{side}.final_norm": f"{side}.layer_norm"})
        for i, block in enumerate(stack.blocks):
            assert isinstance(block, BlockConfig)
            ours, theirs = f"{side}.blocks.{i}", f"{side}.layers.{i}"
            place = "after" if block.placement == "post" else "before"
            branches = {"mixer": (block.mixer, "self_attn"), "cross": (block.cross, "encoder_attn")}
            for mine, (mixer, their) in branches.items():
                if isinstance(mixer, AttentionConfig):
                    names = tuple(f"{theirs}.{their}.{name}_proj" for name in "qkv")
                    yield from joined_qkv(f"{ours}.{mine}.qkv", names, mixer, stack.dim)
                    yield from both(
                        {
                            f"{ours}.{mine}.out": f"{theirs}.{their}.out_proj",
                            f"{ours}.{mine}_residual.{place}": f"{theirs}.{their}_layer_norm",
                        }
                    )
            yield from both(
                {
                    f"{ours}.ffn.up": f"{theirs}.fc1",
                    f"{ours}.ffn.down": f"{theirs}.fc2",
                    f"{ours}.ffn_residual.{place}": f"{theirs}.final_layer_norm",
                }
            )
