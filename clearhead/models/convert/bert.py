"""BERT as `transformers` stores it, with its pooler, masked-LM or classification head."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    ClassHeadConfig,
    HeadConfig,
    LayerNormConfig,
    MaskedLMHeadConfig,
    PoolerConfig,
    SequenceModelConfig,
)
from clearhead.models.bert import bert

from .rules import Rule, activation, both, copies, joined_qkv

PREFIX = "bert."
IGNORED = (r"embeddings\.position_ids", r"cls\.predictions\.decoder\.(weight|bias)", r"cls\.seq_relationship\..*")


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    eps, act = float(hf.get("layer_norm_eps", 1e-12)), activation(hf["hidden_act"])
    architecture = (hf.get("architectures") or ["BertModel"])[0]
    head: HeadConfig = PoolerConfig()
    if architecture in ("BertForMaskedLM", "BertForPreTraining"):
        head = MaskedLMHeadConfig(vocabulary=hf["vocab_size"], activation=act, norm=LayerNormConfig(eps=eps))
    elif architecture == "BertForSequenceClassification":
        classes = len(hf["id2label"]) if hf.get("id2label") else hf.get("num_labels", 2)
        head = ClassHeadConfig(classes=classes, pool=PoolerConfig())
    config = bert(
        dim=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        hidden=hf["intermediate_size"],
        vocabulary=hf["vocab_size"],
        length=hf["max_position_embeddings"],
        segments=hf["type_vocab_size"],
        head=head,
    )
    for path in ("embedding.norm.eps", "stack.pattern.0.norm.eps"):
        config = config.changed(path, eps)
    return config.changed("stack.pattern.0.ffn.activation", act)


def rules(config: SequenceModelConfig) -> Iterator[Rule]:
    tables = {"tokens": "word", "position": "position", "segments": "token_type"}
    yield from copies(
        {f"embedding.{mine}.weight": f"embeddings.{their}_embeddings.weight" for mine, their in tables.items()}
    )
    yield from both({"embedding.norm": "embeddings.LayerNorm"})
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
    yield from head_rules(config.head)


def head_rules(head: HeadConfig | None) -> Iterator[Rule]:
    if isinstance(head, MaskedLMHeadConfig):
        transform = "cls.predictions.transform"
        yield from both({"head.dense": f"{transform}.dense", "head.norm": f"{transform}.LayerNorm"})
        yield Rule("head.bias", ("cls.predictions.bias",))
    elif isinstance(head, PoolerConfig):
        yield from both({"head.dense": "pooler.dense"})
    elif isinstance(head, ClassHeadConfig):
        yield from both({"head.pool.dense": "pooler.dense", "head.classes": "classifier"})
