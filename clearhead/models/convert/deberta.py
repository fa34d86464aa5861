"""DeBERTa-v2 and v3 as `transformers` stores them: BERT with disentangled attention, and no other positions."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import (
    BlockConfig,
    ClassHeadConfig,
    ConfigError,
    DisentangledAttentionConfig,
    DistanceVectorsConfig,
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

from .rules import (
    EncoderHeads,
    Rows,
    Rule,
    activation,
    architecture,
    both,
    classes,
    copies,
    encoder_class,
    encoder_classes,
    hf_activation,
    labels,
    present,
    token_head,
)

PREFIX = "deberta."
IGNORED = (
    r"embeddings\.position_(ids|embeddings\.weight)",
    r"cls\.predictions\.decoder\.(weight|bias)",
    r"(lm_predictions|mask_predictions)\..*",  # of pre-training
    r"pooler\..*",
)
ARCHITECTURES = {"deberta-v2": encoder_classes("DebertaV2")}
TERMS = {"c2p": "content to position", "p2c": "position to content"}
HEADS = EncoderHeads(
    dense="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    bias="cls.predictions.bias",
    pool="pooler.dense",
)
OUTSIDE = ("cls", "pooler", "classifier", "qa_outputs")


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    refuse_unsupported(hf)
    eps, act, dim = float(hf.get("layer_norm_eps", 1e-7)), activation(hf.get("hidden_act", "gelu")), hf["hidden_size"]
    norm, dropout = LayerNormConfig(eps=eps), hf.get("hidden_dropout_prob", 0.1)
    named = hf["pos_att_type"]
    terms = named.split("|") if isinstance(named, str) else named
    farthest = hf.get("max_relative_positions", -1)
    buckets = hf.get("position_buckets", -1)
    distances = DistanceVectorsConfig(
        limit=farthest if farthest > 0 else hf["max_position_embeddings"],
        buckets=buckets if buckets > 0 else None,
        norm=norm if "layer_norm" in (hf.get("norm_rel_ebd") or "none") else None,
    )
    block = BlockConfig(
        mixer=DisentangledAttentionConfig(
            heads=hf["num_attention_heads"],
            terms=tuple(TERMS[word.strip()] for word in terms),  # type: ignore[misc]
            own_positions=not hf.get("share_att_key", False),
            dropout=hf.get("attention_probs_dropout_prob", 0.1),
        ),
        ffn=FeedForwardConfig(hidden=hf["intermediate_size"], activation=act),
        norm=norm,
        placement="post",
        dropout=dropout,
    )
    saved = architecture(hf, "DebertaV2Model")
    head: HeadConfig | None = token_head(saved, hf)
    if saved.endswith("MaskedLM"):
        head = MaskedLMHeadConfig(vocabulary=hf["vocab_size"], activation=act, norm=norm)
    elif saved.endswith("SequenceClassification"):
        pool = PoolerConfig(activation=activation(hf.get("pooler_hidden_act", "gelu")))
        head = ClassHeadConfig(classes=classes(hf), pool=pool)
    biased = hf.get("position_biased_input", True)
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(
            vocabulary=hf["vocab_size"],
            position=LearnedConfig(length=hf["max_position_embeddings"]) if biased else None,
            segments=hf.get("type_vocab_size") or None,
            norm=norm,
            dropout=dropout,
        ),
        stack=StackConfig(dim=dim, pattern=(block,), repeats=hf["num_hidden_layers"], distances=distances),
        head=head,
    )


def refuse_unsupported(hf: Mapping[str, Any]) -> None:
    if not hf.get("relative_attention") or not hf.get("pos_att_type"):
        raise ConfigError("deberta-v2 without relative_attention and pos_att_type is not supported; use bert")
    if hf.get("conv_kernel_size"):
        raise ConfigError("deberta-v2 with a convolution (conv_kernel_size, as in xlarge) is not supported yet")
    if hf.get("embedding_size") not in (None, hf["hidden_size"]):
        raise ConfigError("deberta-v2 with a table narrower than the model (embedding_size) is not supported yet")
    if not hf.get("legacy", True) and architecture(hf, "").endswith("MaskedLM"):
        raise ConfigError("deberta-v2 with the newer masked-LM head (legacy: false) is not supported yet")


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig() as embedding,
            stack=StackConfig(
                pattern=(
                    BlockConfig(mixer=DisentangledAttentionConfig() as mixer, ffn=FeedForwardConfig() as ffn) as block,
                    *_,
                ),
                distances=DistanceVectorsConfig() as distances,
            ) as stack,
            head=None | MaskedLMHeadConfig() | ClassHeadConfig() | TokenClassHeadConfig() | SpanHeadConfig() as head,
        ):
            words = {term: word for word, term in TERMS.items()}
            pool = head.pool if isinstance(head, ClassHeadConfig) else None
            length = embedding.position.length if isinstance(embedding.position, LearnedConfig) else distances.limit
            return {
                "architectures": [encoder_class("DebertaV2", head)],
                "model_type": kind,
                "vocab_size": embedding.vocabulary,
                "hidden_size": stack.dim,
                "num_hidden_layers": len(stack.blocks),
                "num_attention_heads": mixer.heads,
                "intermediate_size": ffn.hidden,
                "hidden_act": hf_activation(ffn.activation),
                "pooler_hidden_act": hf_activation(pool.activation)
                if isinstance(pool, PoolerConfig) and pool.activation != "tanh"
                else "gelu",
                "pooler_hidden_size": stack.dim,
                "max_position_embeddings": length,
                "type_vocab_size": embedding.segments or 0,
                "layer_norm_eps": block.norm.eps,
                "hidden_dropout_prob": block.dropout,
                "attention_probs_dropout_prob": mixer.dropout,
                "relative_attention": True,
                "pos_att_type": [words[term] for term in mixer.terms],
                "share_att_key": not mixer.own_positions,
                "position_buckets": distances.buckets or -1,
                "max_relative_positions": distances.limit,
                "norm_rel_ebd": "none" if distances.norm is None else "layer_norm",
                "position_biased_input": embedding.position is not None,
                "tie_word_embeddings": True,
                "pad_token_id": 0,
                **labels(head),
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    return present(config, all_rules(config))


def all_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    tables = {"tokens": "word", "position": "position", "segments": "token_type"}
    yield from copies(
        {f"embedding.{mine}.weight": f"embeddings.{their}_embeddings.weight" for mine, their in tables.items()}
    )
    yield from both({"embedding.norm": "embeddings.LayerNorm", "stack.distances.norm": "encoder.LayerNorm"})
    yield Rule(("stack.distances.weight",), ("encoder.rel_embeddings.weight",))
    for i, block in enumerate(config.stack.blocks):
        assert isinstance(block.mixer, DisentangledAttentionConfig)
        ours, theirs = f"stack.blocks.{i}", f"encoder.layer.{i}"
        size = block.mixer.heads * block.mixer.width(config.stack.dim)
        for suffix in ("weight", "bias"):
            names = [f"{theirs}.attention.self.{name}_proj.{suffix}" for name in ("query", "key", "value")]
            yield Rows((f"{ours}.mixer.qkv.{suffix}",), tuple(names), (size,) * 3)
            words = {"position to content": "query", "content to position": "key"}
            names = [f"{theirs}.attention.self.pos_{words[term]}_proj.{suffix}" for term in block.mixer.projected]
            yield Rows((f"{ours}.mixer.positions.{suffix}",), tuple(names), (size,) * len(names))
        yield from both(
            {
                f"{ours}.mixer.out": f"{theirs}.attention.output.dense",
                f"{ours}.mixer_residual.after": f"{theirs}.attention.output.LayerNorm",
                f"{ours}.ffn.up": f"{theirs}.intermediate.dense",
                f"{ours}.ffn.down": f"{theirs}.output.dense",
                f"{ours}.ffn_residual.after": f"{theirs}.output.LayerNorm",
            }
        )
    yield from HEADS.rules(config.head)
