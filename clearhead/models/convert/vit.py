"""ViT as `transformers` stores it: the patch projection is a convolution; its kernel is our matrix."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    ClassHeadConfig,
    ConfigError,
    FeedForwardConfig,
    FirstTokenConfig,
    HeadConfig,
    ModelConfig,
    PatchEmbeddingConfig,
    PoolerConfig,
    SequenceModelConfig,
    StackConfig,
)
from clearhead.models.vit import vit

from .rules import (
    Reshaped,
    Rule,
    activation,
    architecture,
    both,
    classes,
    hf_activation,
    joined_qkv,
    labels,
    with_fields,
)

PREFIX = "vit."
IGNORED = ()
ARCHITECTURES = {"vit": ("ViTModel", "ViTForImageClassification")}


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    if hf.get("pooler_act", "tanh") != "tanh" or hf.get("pooler_output_size") not in (None, hf["hidden_size"]):
        raise ConfigError("a ViT pooler other than tanh of the model's own width is not supported yet")
    head: HeadConfig = PoolerConfig()
    if architecture(hf, "ViTModel") == "ViTForImageClassification":
        head = ClassHeadConfig(classes=classes(hf), pool=FirstTokenConfig())
    config = vit(
        dim=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        hidden=hf["intermediate_size"],
        image=hf["image_size"],
        patch=hf["patch_size"],
        channels=hf["num_channels"],
        head=head,
        dropout=hf.get("hidden_dropout_prob", 0.0),
    )
    eps = float(hf.get("layer_norm_eps", 1e-12))
    fields = {
        "stack.final_norm.eps": eps,
        "stack.pattern.0.norm.eps": eps,
        "stack.pattern.0.mixer.qkv_bias": bool(hf.get("qkv_bias", True)),
        "stack.pattern.0.mixer.dropout": hf.get("attention_probs_dropout_prob", 0.0),
        "stack.pattern.0.ffn.activation": activation(hf["hidden_act"]),
    }
    return with_fields(config, fields)


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=PatchEmbeddingConfig() as embedding,
            stack=StackConfig(
                pattern=(BlockConfig(mixer=AttentionConfig() as mixer, ffn=FeedForwardConfig() as ffn) as block, *_)
            ) as stack,
            head=PoolerConfig() | ClassHeadConfig() as head,
        ):
            return {
                "architectures": [ARCHITECTURES[kind][isinstance(head, ClassHeadConfig)]],
                "model_type": kind,
                "image_size": embedding.image,
                "patch_size": embedding.patch,
                "num_channels": embedding.channels,
                "hidden_size": stack.dim,
                "num_hidden_layers": len(stack.blocks),
                "num_attention_heads": mixer.heads,
                "intermediate_size": ffn.hidden,
                "hidden_act": hf_activation(ffn.activation),
                "qkv_bias": mixer.qkv_bias,
                "layer_norm_eps": block.norm.eps,
                "hidden_dropout_prob": block.dropout,
                "attention_probs_dropout_prob": mixer.dropout,
                **labels(head),
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    patches, dim = config.embedding, config.stack.dim
    assert isinstance(patches, PatchEmbeddingConfig)
    kernel = (dim, patches.channels, patches.patch, patches.patch)
    length = patches.patches + 1
    projection = "embeddings.patch_embeddings.projection"
    yield Reshaped(("embedding.patches.weight",), (f"{projection}.weight",), (dim, patches.pixels), kernel)
    yield Rule(("embedding.patches.bias",), (f"{projection}.bias",))
    yield Reshaped(("embedding.class_token",), ("embeddings.cls_token",), (dim,), (1, 1, dim))
    yield Reshaped(("embedding.position.weight",), ("embeddings.position_embeddings",), (length, dim), (1, length, dim))
    for i, block in enumerate(config.stack.blocks):
        assert isinstance(block, BlockConfig)
        assert isinstance(block.mixer, AttentionConfig)
        ours, theirs = f"stack.blocks.{i}", f"encoder.layer.{i}"
        names = tuple(f"{theirs}.attention.attention.{name}" for name in ("query", "key", "value"))
        yield from joined_qkv(f"{ours}.mixer.qkv", names, block.mixer, dim)
        yield from both(
            {
                f"{ours}.mixer.out": f"{theirs}.attention.output.dense",
                f"{ours}.mixer_residual.before": f"{theirs}.layernorm_before",
                f"{ours}.ffn.up": f"{theirs}.intermediate.dense",
                f"{ours}.ffn.down": f"{theirs}.output.dense",
                f"{ours}.ffn_residual.before": f"{theirs}.layernorm_after",
            }
        )
    yield from both({"stack.final_norm": "layernorm"})
    if isinstance(config.head, ClassHeadConfig):
        yield from both({"head.classes": "classifier"})
    elif isinstance(config.head, PoolerConfig):
        yield from both({"head.dense": "pooler.dense"})
