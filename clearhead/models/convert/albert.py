"""ALBERT as `transformers` stores it: BERT with one block repeated at every layer, and a narrow token table."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    ClassHeadConfig,
    ConfigError,
    FactoredEmbeddingConfig,
    HeadConfig,
    LayerNormConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    PoolerConfig,
    SequenceModelConfig,
    SharedStackConfig,
    SpanHeadConfig,
    TokenClassHeadConfig,
)
from clearhead.models.bert import albert

from .bert import body_fields, table_rules
from .rules import (
    EncoderHeads,
    Rule,
    activation,
    architecture,
    both,
    classes,
    encoder_class,
    encoder_classes,
    joined_qkv,
    token_head,
    with_fields,
)

PREFIX = "albert."
IGNORED = (
    r"embeddings\.position_ids",
    r"predictions\.decoder\.(weight|bias)",
    r"sop_classifier\..*",
    r"pooler(_fc)?\..*",
)
ARCHITECTURES = {"albert": (*encoder_classes("Albert"), "AlbertForPreTraining")}
HEADS = EncoderHeads(
    dense="predictions.dense",
    norm="predictions.LayerNorm",
    bias="predictions.bias",
    pooler="pooler",
    pool="pooler",
)


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    if hf.get("num_hidden_groups", 1) != 1:
        raise ConfigError(f"albert with {hf['num_hidden_groups']} groups of shared layers is not supported yet; one is")
    eps, act = float(hf.get("layer_norm_eps", 1e-12)), activation(hf.get("hidden_act", "gelu_new"))
    saved, width = architecture(hf, "AlbertModel"), hf["embedding_size"]
    head: HeadConfig = token_head(saved, hf) or PoolerConfig()
    if saved in ("AlbertForMaskedLM", "AlbertForPreTraining"):
        norm = LayerNormConfig(eps=eps)
        head = MaskedLMHeadConfig(vocabulary=hf["vocab_size"], activation=act, norm=norm, width=width)
    elif saved == "AlbertForSequenceClassification":
        head = ClassHeadConfig(classes=classes(hf), pool=PoolerConfig())
    dropout = hf.get("hidden_dropout_prob", 0.0)
    config = albert(
        dim=hf["hidden_size"],
        width=width,
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        hidden=hf["intermediate_size"],
        vocabulary=hf["vocab_size"],
        length=hf["max_position_embeddings"],
        segments=hf["type_vocab_size"],
        head=head,
        dropout=dropout,
    )
    fields = {
        "embedding.norm.eps": eps,
        "stack.pattern.0.norm.eps": eps,
        "stack.pattern.0.ffn.activation": act,
        "stack.pattern.0.mixer.dropout": hf.get("attention_probs_dropout_prob", 0.0),
    }
    config = with_fields(config, fields)
    pattern = config.stack.pattern * hf.get("inner_group_num", 1)
    return replace(config, stack=replace(config.stack, pattern=pattern))


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=FactoredEmbeddingConfig(segments=int()) as embedding,
            stack=SharedStackConfig() as stack,
            head=PoolerConfig()
            | MaskedLMHeadConfig()
            | ClassHeadConfig()
            | TokenClassHeadConfig()
            | SpanHeadConfig() as head,
        ) if (body := body_fields(embedding, stack, head)) is not None:
            return body | {
                "architectures": [encoder_class("Albert", head)],
                "model_type": kind,
                "embedding_size": embedding.width,
                "num_hidden_layers": stack.repeats,
                "num_hidden_groups": 1,
                "inner_group_num": len(stack.pattern),
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    yield from table_rules()
    yield from both({"embedding.projection": "encoder.embedding_hidden_mapping_in"})
    for i, block in enumerate(config.stack.pattern):
        assert isinstance(block, BlockConfig)
        assert isinstance(block.mixer, AttentionConfig)
        ours, theirs = f"stack.blocks.{i}", f"encoder.albert_layer_groups.0.albert_layers.{i}"
        names = tuple(f"{theirs}.attention.{name}" for name in ("query", "key", "value"))
        yield from joined_qkv(f"{ours}.mixer.qkv", names, block.mixer, config.stack.dim)
        yield from both(
            {
                f"{ours}.mixer.out": f"{theirs}.attention.dense",
                f"{ours}.mixer_residual.after": f"{theirs}.attention.LayerNorm",
                f"{ours}.ffn.up": f"{theirs}.ffn",
                f"{ours}.ffn.down": f"{theirs}.ffn_output",
                f"{ours}.ffn_residual.after": f"{theirs}.full_layer_layer_norm",
            }
        )
    yield from HEADS.rules(config.head)
