"""Marian, Pegasus, M2M-100 (NLLB), BART and mBART as `transformers` stores them: the 2017 model, with biases."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    BorrowedEmbeddingConfig,
    Causal,
    ConfigError,
    EncoderDecoderConfig,
    FeedForwardConfig,
    Full,
    LayerNormConfig,
    LearnedConfig,
    LMHeadConfig,
    Mask,
    ModelConfig,
    SinusoidalConfig,
    StackConfig,
    TokenEmbeddingConfig,
)

from .rules import (
    Reshaped,
    Rule,
    SkippedRows,
    activation,
    architecture,
    both,
    copies,
    hf_activation,
    joined_qkv,
    present,
)

PREFIX = "model."
IGNORED = (
    r"lm_head\.weight",
    r"(encoder|decoder)\.(embed_positions\.weight|version)",
    r"(encoder|decoder)\.embed_tokens\.weight",
    r"shared\.weight",
)
ARCHITECTURES = {
    "marian": ("MarianMTModel",),
    "pegasus": ("PegasusForConditionalGeneration",),
    "m2m_100": ("M2M100ForConditionalGeneration",),
    "bart": ("BartModel", "BartForConditionalGeneration"),  # the first has no bias of the logits
    "mbart": ("MBartModel", "MBartForConditionalGeneration"),
}
PRE_NORM = ("pegasus", "m2m_100", "mbart")  # and a norm at the end of each stack
LEARNED = ("bart", "mbart")  # a table of positions for each side, and a norm after the embedding
HEADLESS = ("BartModel", "MBartModel")
FIRST = 2  # the position of the first token in M2M-100, BART and mBART; 1 is that of padding
DEFAULTS = {"pegasus": "gelu", "m2m_100": "relu", "bart": "gelu", "mbart": "gelu"}
TOKENS: dict[str, dict[str, int | None]] = {
    "pegasus": {"pad_token_id": 0, "decoder_start_token_id": 0, "eos_token_id": 1, "bos_token_id": None},
    "m2m_100": {"pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": None},
    "bart": {"pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 0},
    "mbart": {"pad_token_id": 1, "decoder_start_token_id": 2, "eos_token_id": 2, "bos_token_id": 0},
}


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

    start = FIRST if kind == "m2m_100" else 0
    # the fastest wave of M2M-100 has 1 radian per position and the slowest exactly 1/10000
    base = 10000.0 ** (dim / (dim - 2)) if kind == "m2m_100" else 10000.0
    waves = SinusoidalConfig(layout="halves", base=base, start=start)
    embedding = TokenEmbeddingConfig(
        vocabulary=hf["vocab_size"],
        position=LearnedConfig(length=hf["max_position_embeddings"]) if kind in LEARNED else waves,
        norm=norm if kind in LEARNED else None,
        scaled=bool(hf.get("scale_embedding", kind == "m2m_100")),
        dropout=dropout,
    )
    written: int = hf["vocab_size"]
    target: TokenEmbeddingConfig | None = None
    if kind in LEARNED:
        target = BorrowedEmbeddingConfig(**{f.name: getattr(embedding, f.name) for f in fields(embedding)})
    elif not hf.get("share_encoder_decoder_embeddings", True):
        written = hf.get("decoder_vocab_size") or written
        target = replace(embedding, vocabulary=written)
    return EncoderDecoderConfig(
        source=embedding,
        encoder=stack("encoder", Full(), cross=False),
        target=target,
        decoder=stack("decoder", Causal(), cross=True),
        head=LMHeadConfig(
            vocabulary=written, tied=True, bias=kind != "m2m_100" and architecture(hf, "") not in HEADLESS
        ),
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case EncoderDecoderConfig(
            source=TokenEmbeddingConfig() as source,
            encoder=StackConfig(pattern=(BlockConfig(mixer=AttentionConfig() as attention) as reader, *_)),
            decoder=StackConfig(pattern=(BlockConfig() as writer, *_)),
        ):
            # Marian's vocabularies end with padding; decoding starts from it
            pad = source.vocabulary - 1
            marian: dict[str, int | None] = {
                "pad_token_id": pad,
                "decoder_start_token_id": pad,
                "eos_token_id": 0,
                "bos_token_id": None,
            }
            tokens = TOKENS.get(kind, marian)
            hf = {
                "architectures": [ARCHITECTURES[kind][-1 if config.head.bias else 0]],
                "model_type": kind,
                "is_encoder_decoder": True,
                "vocab_size": source.vocabulary,
                "decoder_vocab_size": config.head.vocabulary,
                "d_model": config.encoder.dim,
                "scale_embedding": bool(source.scaled),
                "share_encoder_decoder_embeddings": config.target is None
                or isinstance(config.target, BorrowedEmbeddingConfig),
                "tie_word_embeddings": True,
                "static_position_embeddings": True,
                "max_position_embeddings": source.position.length
                if isinstance(source.position, LearnedConfig)
                else 1024,
                "dropout": reader.dropout,
                "attention_dropout": attention.dropout,
                "activation_dropout": 0.0,
                **tokens,
                "forced_eos_token_id": tokens["eos_token_id"],
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
    size, borrowed = config.head.vocabulary, isinstance(config.target, BorrowedEmbeddingConfig)
    source = "shared.weight" if config.target is None or borrowed else "encoder.embed_tokens.weight"
    yield from copies({"source.tokens.weight": source, "target.tokens.weight": "decoder.embed_tokens.weight"})
    for mine, side in {"source": "encoder", "target": "decoder"}.items():
        yield SkippedRows((f"{mine}.position.weight",), (f"{side}.embed_positions.weight",), FIRST)
        yield from both({f"{mine}.norm": f"{side}.layernorm_embedding"})
    yield Reshaped(("head.bias",), ("final_logits_bias",), (size,), (1, size))
    yield from stack_rules(config)


def stack_rules(config: EncoderDecoderConfig) -> Iterator[Rule]:
    """The blocks and the last norms of both sides."""
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
