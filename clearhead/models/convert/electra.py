"""ELECTRA as `transformers` stores it: BERT with a table that may be narrower, and no pooler."""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from typing import Any

from clearhead.configs import (
    ClassHeadConfig,
    FactoredEmbeddingConfig,
    LayerNormConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    PoolerConfig,
    SequenceModelConfig,
    SpanHeadConfig,
    TokenClassHeadConfig,
    TokenEmbeddingConfig,
)

from . import bert
from .rules import EncoderHeads, Rule, architecture, both, classes, encoder_class, encoder_classes, token_head

PREFIX = "electra."
IGNORED = (
    r"embeddings\.(position_ids|token_type_ids)",
    r"generator_lm_head\.weight",
    r"discriminator_predictions\..*",  # of ElectraForPreTraining, which is loaded without its head
)
ARCHITECTURES = {"electra": (*encoder_classes("Electra"), "ElectraForPreTraining")}
HEADS = EncoderHeads(
    dense="generator_predictions.dense",
    norm="generator_predictions.LayerNorm",
    bias="generator_lm_head.bias",
    pool="classifier.dense",
    classes="classifier.out_proj",
)


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    config = bert.from_hf({**hf, "architectures": ["BertModel"], "hidden_act": hf.get("hidden_act", "gelu")})
    width = hf.get("embedding_size", hf["hidden_size"])
    narrow = width if width != hf["hidden_size"] else None
    embedding = config.embedding
    if narrow is not None:
        shared = {f.name: getattr(embedding, f.name) for f in fields(TokenEmbeddingConfig)}
        embedding = FactoredEmbeddingConfig(width=narrow, **shared)
    saved = architecture(hf, "ElectraModel")
    head = token_head(saved, hf)
    if saved == "ElectraForMaskedLM":
        norm = LayerNormConfig(eps=float(hf.get("layer_norm_eps", 1e-12)))
        head = MaskedLMHeadConfig(vocabulary=hf["vocab_size"], norm=norm, width=narrow)
    elif saved == "ElectraForSequenceClassification":
        head = ClassHeadConfig(classes=classes(hf), pool=PoolerConfig(activation="gelu"))
    return replace(config, embedding=embedding, head=head)


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(segments=int()) as embedding,
            stack=stack,
            head=None | MaskedLMHeadConfig() | ClassHeadConfig() | TokenClassHeadConfig() | SpanHeadConfig() as head,
        ) if (body := bert.body_fields(embedding, stack, head)) is not None:
            return body | {
                "architectures": [encoder_class("Electra", head)],
                "model_type": kind,
                "num_hidden_layers": len(stack.blocks),
                "embedding_size": embedding.width if isinstance(embedding, FactoredEmbeddingConfig) else stack.dim,
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    yield from bert.table_rules()
    if isinstance(config.embedding, FactoredEmbeddingConfig):
        yield from both({"embedding.projection": "embeddings_project"})
    yield from bert.layer_rules(config)
    yield from HEADS.rules(config.head)
