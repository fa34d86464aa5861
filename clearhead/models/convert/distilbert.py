"""DistilBERT as `transformers` stores it: BERT without segments and pooler, under names of its own."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    ClassHeadConfig,
    FeedForwardConfig,
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

from .bert import table_rules
from .rules import (
    EncoderHeads,
    Rule,
    activation,
    architecture,
    both,
    classes,
    encoder_class,
    encoder_classes,
    hf_activation,
    joined_qkv,
    labels,
    token_head,
)

PREFIX = "distilbert."
IGNORED = (r"vocab_projector\.weight", r"embeddings\.position_ids")
ARCHITECTURES = {"distilbert": encoder_classes("DistilBert")}
NORM = LayerNormConfig(eps=1e-12)
HEADS = EncoderHeads(
    dense="vocab_transform", norm="vocab_layer_norm", bias="vocab_projector.bias", pool="pre_classifier"
)


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    act, dropout = activation(hf.get("activation", "gelu")), hf.get("dropout", 0.1)
    saved = architecture(hf, "DistilBertModel")
    head = token_head(saved, hf)
    if saved == "DistilBertForMaskedLM":
        head = MaskedLMHeadConfig(vocabulary=hf["vocab_size"], activation=act, norm=NORM)
    elif saved == "DistilBertForSequenceClassification":
        head = ClassHeadConfig(classes=classes(hf), pool=PoolerConfig(activation="relu"))
    attention = AttentionConfig(
        heads=hf["n_heads"], qkv_bias=True, out_bias=True, dropout=hf.get("attention_dropout", 0.1)
    )
    ffn = FeedForwardConfig(hidden=hf["hidden_dim"], activation=act)
    block = BlockConfig(mixer=attention, ffn=ffn, norm=NORM, placement="post", dropout=dropout)
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(
            vocabulary=hf["vocab_size"],
            position=LearnedConfig(length=hf["max_position_embeddings"]),
            norm=NORM,
            dropout=dropout,
        ),
        stack=StackConfig(dim=hf["dim"], pattern=(block,), repeats=hf["n_layers"]),
        head=head,
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(position=LearnedConfig(length=length)) as embedding,
            stack=StackConfig(
                pattern=(BlockConfig(mixer=AttentionConfig() as mixer, ffn=FeedForwardConfig() as ffn) as block, *_)
            ) as stack,
            head=None | MaskedLMHeadConfig() | ClassHeadConfig() | TokenClassHeadConfig() | SpanHeadConfig() as head,
        ):
            return {
                "architectures": [encoder_class("DistilBert", head)],
                "model_type": kind,
                "vocab_size": embedding.vocabulary,
                "dim": stack.dim,
                "n_layers": len(stack.blocks),
                "n_heads": mixer.heads,
                "hidden_dim": ffn.hidden,
                "activation": hf_activation(ffn.activation),
                "max_position_embeddings": length,
                "dropout": block.dropout,
                "attention_dropout": mixer.dropout,
                "pad_token_id": 0,
                **labels(head),
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    yield from table_rules(("tokens", "position"))
    for i, block in enumerate(config.stack.blocks):
        assert isinstance(block, BlockConfig)
        assert isinstance(block.mixer, AttentionConfig)
        ours, theirs = f"stack.blocks.{i}", f"transformer.layer.{i}"
        names = tuple(f"{theirs}.attention.{name}_lin" for name in "qkv")
        yield from joined_qkv(f"{ours}.mixer.qkv", names, block.mixer, config.stack.dim)
        yield from both(
            {
                f"{ours}.mixer.out": f"{theirs}.attention.out_lin",
                f"{ours}.mixer_residual.after": f"{theirs}.sa_layer_norm",
                f"{ours}.ffn.up": f"{theirs}.ffn.lin1",
                f"{ours}.ffn.down": f"{theirs}.ffn.lin2",
                f"{ours}.ffn_residual.after": f"{theirs}.output_layer_norm",
            }
        )
    yield from HEADS.rules(config.head)
