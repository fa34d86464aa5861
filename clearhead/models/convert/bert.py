"""BERT as `transformers` stores it, with its pooler, masked-LM or classification head."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    ClassHeadConfig,
    ConfigError,
    FeedForwardConfig,
    HeadConfig,
    LayerNormConfig,
    LearnedConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    PoolerConfig,
    SequenceModelConfig,
    SpanHeadConfig,
    StackConfig,
    TokenClassHeadConfig,
    TokenEmbeddingConfig,
)
from clearhead.models.bert import bert

from .rules import (
    EncoderHeads,
    Rule,
    activation,
    architecture,
    both,
    classes,
    copies,
    encoder_class,
    encoder_classes,
    hf_activation,
    joined_qkv,
    labels,
    token_head,
    with_fields,
)

PREFIX = "bert."
IGNORED = (
    r"embeddings\.position_ids",
    r"cls\.predictions\.(bias|decoder\.(weight|bias))",
    r"cls\.seq_relationship\..*",
    r"pooler\..*",  # checkpoints with another head may still hold a pooler
)
ALIASES = {f"cls.seq_relationship.{name}": f"classifier.{name}" for name in ("weight", "bias")}  # next sentence
ARCHITECTURES = {
    "bert": (*encoder_classes("Bert"), "BertForPreTraining", "BertLMHeadModel", "BertForNextSentencePrediction")
}
HEADS = EncoderHeads(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    bias="cls.predictions.bias",
    decoder="cls.predictions.decoder",
    pooler="pooler.dense",
    pool="pooler.dense",
)
TABLES = {"tokens": "word", "position": "position", "segments": "token_type"}


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    if hf.get("add_cross_attention") or hf.get("position_embedding_type", "absolute") != "absolute":
        raise ConfigError("bert with cross-attention or relative positions is not supported yet")
    eps, act = float(hf.get("layer_norm_eps", 1e-12)), activation(hf["hidden_act"])
    saved = architecture(hf, "BertModel")
    head: HeadConfig = token_head(saved, hf) or PoolerConfig()
    if saved in ("BertForMaskedLM", "BertForPreTraining", "BertLMHeadModel"):
        tied = bool(hf.get("tie_word_embeddings", True))
        norm = LayerNormConfig(eps=eps)
        head = MaskedLMHeadConfig(vocabulary=hf["vocab_size"], activation=act, norm=norm, tied=tied)
    elif saved == "BertForSequenceClassification":
        head = ClassHeadConfig(classes=classes(hf), pool=PoolerConfig())
    elif saved == "BertForNextSentencePrediction":
        head = ClassHeadConfig(classes=2, pool=PoolerConfig())
    config = bert(
        dim=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        hidden=hf["intermediate_size"],
        vocabulary=hf["vocab_size"],
        length=hf["max_position_embeddings"],
        segments=hf["type_vocab_size"],
        head=head,
        dropout=hf.get("hidden_dropout_prob", 0.1),
    )
    fields = {
        "embedding.norm.eps": eps,
        "stack.pattern.0.norm.eps": eps,
        "stack.pattern.0.ffn.activation": act,
        "stack.pattern.0.mixer.dropout": hf.get("attention_probs_dropout_prob", 0.1),
    }
    config = with_fields(config, fields)
    return config.with_value("stack.pattern.0.mixer.mask", Causal()) if hf.get("is_decoder") else config


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(segments=int()) as embedding,
            stack=stack,
            head=PoolerConfig()
            | MaskedLMHeadConfig()
            | ClassHeadConfig()
            | TokenClassHeadConfig()
            | SpanHeadConfig() as head,
        ) if (body := body_fields(embedding, stack, head)) is not None:
            saved = encoder_class("Bert", head)
            if isinstance(head, MaskedLMHeadConfig) and stack.causal:
                saved = "BertLMHeadModel"
            return body | {
                "architectures": [saved],
                "is_decoder": stack.causal,
                "model_type": kind,
                "num_hidden_layers": len(stack.blocks),
            }
    return None


def body_fields(embedding: TokenEmbeddingConfig, stack: StackConfig, head: HeadConfig | None) -> dict[str, Any] | None:
    """Return the fields that BERT and its variants share."""
    match embedding.position, stack.pattern[0]:
        case (
            LearnedConfig(length=length),
            BlockConfig(mixer=AttentionConfig() as mixer, ffn=FeedForwardConfig() as ffn) as block,
        ):
            return {
                "vocab_size": embedding.vocabulary,
                "hidden_size": stack.dim,
                "num_attention_heads": mixer.heads,
                "intermediate_size": ffn.hidden,
                "hidden_act": hf_activation(ffn.activation),
                "max_position_embeddings": length,
                "type_vocab_size": embedding.segments,
                "layer_norm_eps": block.norm.eps,
                "hidden_dropout_prob": block.dropout,
                "attention_probs_dropout_prob": mixer.dropout,
                "tie_word_embeddings": not isinstance(head, MaskedLMHeadConfig) or head.tied,
                "pad_token_id": 0,
                **labels(head),
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    yield from table_rules()
    yield from layer_rules(config)
    yield from HEADS.rules(config.head)


def layer_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    for i, block in enumerate(config.stack.blocks):
        assert isinstance(block, BlockConfig)
        assert isinstance(block.mixer, AttentionConfig)
        ours, theirs = f"stack.blocks.{i}", f"encoder.layer.{i}"
        names = tuple(f"{theirs}.attention.self.{name}" for name in ("query", "key", "value"))
        yield from joined_qkv(f"{ours}.mixer.qkv", names, block.mixer, config.stack.dim)
        yield from both(
            {
                f"{ours}.mixer.out": f"{theirs}.attention.output.dense",
                f"{ours}.mixer_residual.after": f"{theirs}.attention.output.LayerNorm",
                f"{ours}.ffn.up": f"{theirs}.intermediate.dense",
                f"{ours}.ffn.down": f"{theirs}.output.dense",
                f"{ours}.ffn_residual.after": f"{theirs}.output.LayerNorm",
            }
        )


def table_rules(tables: tuple[str, ...] = tuple(TABLES)) -> Iterator[Rule]:
    """The embedding tables, all or some, and the norm after them."""
    yield from copies({f"embedding.{name}.weight": f"embeddings.{TABLES[name]}_embeddings.weight" for name in tables})
    yield from both({"embedding.norm": "embeddings.LayerNorm"})
