"""RoBERTa, XLM-RoBERTa and CamemBERT as `transformers` stores them: BERT with positions that begin at 2."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.configs import (
    ClassHeadConfig,
    ConfigError,
    HeadConfig,
    LayerNormConfig,
    LearnedConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    PoolerConfig,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)

from . import bert
from .rules import (
    EncoderHeads,
    Rule,
    SkippedRows,
    architecture,
    classes,
    encoder_class,
    encoder_classes,
    present,
    token_head,
)

PREFIX = "roberta."
IGNORED = (r"embeddings\.(position_ids|token_type_ids)", r"lm_head\.(bias|decoder\.(weight|bias))", r"pooler\..*")
NAMES = {"roberta": "Roberta", "xlm-roberta": "XLMRoberta", "camembert": "Camembert"}
ARCHITECTURES = {kind: (*encoder_classes(name), f"{name}ForCausalLM") for kind, name in NAMES.items()}
HEADS = EncoderHeads(
    dense="lm_head.dense",
    norm="lm_head.layer_norm",
    bias="lm_head.bias",
    decoder="lm_head.decoder",
    pooler="pooler.dense",
    pool="classifier.dense",
    classes="classifier.out_proj",
)
FIRST = 2  # the position of the first token; 1 is that of padding, and 0 is not used


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    if hf.get("pad_token_id", 1) != FIRST - 1:
        raise ConfigError(f"{kind} with pad_token_id {hf['pad_token_id']} is not supported; 1 is")
    config = bert.from_hf({**hf, "architectures": ["BertModel"]})
    saved, eps = architecture(hf, ARCHITECTURES[kind][0]), float(hf.get("layer_norm_eps", 1e-12))
    head: HeadConfig = token_head(saved, hf) or PoolerConfig()
    if saved.endswith(("MaskedLM", "CausalLM")):
        tied = bool(hf.get("tie_word_embeddings", True))
        head = MaskedLMHeadConfig(vocabulary=hf["vocab_size"], norm=LayerNormConfig(eps=eps), tied=tied)
    elif saved.endswith("SequenceClassification"):
        head = ClassHeadConfig(classes=classes(hf), pool=PoolerConfig())
    position = LearnedConfig(length=hf["max_position_embeddings"] - FIRST)
    assert isinstance(config.embedding, TokenEmbeddingConfig)
    return replace(config, embedding=replace(config.embedding, position=position), head=head)


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match bert.to_hf(config, kind), config:
        case (
            dict() as hf,
            SequenceModelConfig(embedding=TokenEmbeddingConfig(position=LearnedConfig(length=length)), head=head),
        ):
            saved = encoder_class(NAMES[kind], head)
            if isinstance(head, MaskedLMHeadConfig) and hf["is_decoder"]:
                saved = f"{NAMES[kind]}ForCausalLM"
            return hf | {
                "model_type": kind,
                "architectures": [saved],
                "max_position_embeddings": length + FIRST,
                "pad_token_id": FIRST - 1,
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    yield from table_rules(config)
    yield from bert.layer_rules(config)
    yield from HEADS.rules(config.head)


def table_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    """The embedding tables that this model has; MPNet has no segments."""
    positions = SkippedRows(("embedding.position.weight",), ("embeddings.position_embeddings.weight",), FIRST)
    return present(config, (*bert.table_rules(("tokens", "segments")), positions))
