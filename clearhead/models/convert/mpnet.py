"""MPNet as `transformers` stores it: RoBERTa without segments, and with T5's bias of distances."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.configs import (
    ConfigError,
    ModelConfig,
    RelativeBiasConfig,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)

from . import roberta
from .bert import layer_rules
from .rules import Rule, Transposed, architecture, encoder_class, encoder_classes

PREFIX = "mpnet."
IGNORED = roberta.IGNORED
ARCHITECTURES = {"mpnet": encoder_classes("MPNet")}
BUCKETS, LIMIT = 32, 128  # the code of MPNet uses these whatever its config says
LAYER = {
    "attention.self.query": "attention.attn.q",
    "attention.self.key": "attention.attn.k",
    "attention.self.value": "attention.attn.v",
    "attention.output.dense": "attention.attn.o",
    "attention.output.LayerNorm": "attention.LayerNorm",
}
"""What RoBERTa and MPNet call the same layer."""


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    if hf.get("relative_attention_num_buckets", BUCKETS) != BUCKETS:
        buckets = hf["relative_attention_num_buckets"]
        raise ConfigError(f"mpnet with {buckets} buckets of distances is not supported; {BUCKETS} is")
    saved = architecture(hf, "MPNetModel").replace("MPNet", "Roberta")
    config = roberta.from_hf({**hf, "model_type": "roberta", "architectures": [saved], "type_vocab_size": 1})
    assert isinstance(config.embedding, TokenEmbeddingConfig)
    bias = RelativeBiasConfig(heads=hf["num_attention_heads"], buckets=BUCKETS, limit=LIMIT)
    return replace(
        config, embedding=replace(config.embedding, segments=None), stack=replace(config.stack, score_bias=bias)
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(embedding=TokenEmbeddingConfig() as embedding, stack=stack):
            plain = replace(config, embedding=replace(embedding, segments=1), stack=replace(stack, score_bias=None))
            hf = roberta.to_hf(plain, "roberta")
            names = {"model_type": kind, "architectures": [encoder_class("MPNet", config.head)]}
            return hf and hf | names | {"relative_attention_num_buckets": BUCKETS}
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    yield from roberta.table_rules(config)
    yield Transposed(("stack.score_bias.weight",), ("encoder.relative_attention_bias.weight",))
    for rule in layer_rules(config):
        yield replace(rule, theirs=tuple(map(mpnet_name, rule.theirs)))
    yield from roberta.HEADS.rules(config.head)


def mpnet_name(name: str) -> str:
    """MPNet's name of a tensor that has this name in RoBERTa."""
    for theirs, ours in LAYER.items():
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name
