"""ViT as `transformers` stores it: the patch projection is a convolution, whose kernel is our matrix."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    ClassHeadConfig,
    FirstTokenConfig,
    HeadConfig,
    PatchEmbeddingConfig,
    PoolerConfig,
    SequenceModelConfig,
)
from clearhead.models.vit import vit

from .rules import Reshaped, Rule, activation, both, joined_qkv

PREFIX = "vit."
IGNORED = ()


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    architecture = (hf.get("architectures") or ["ViTModel"])[0]
    head: HeadConfig = PoolerConfig()
    if architecture == "ViTForImageClassification":
        classes = len(hf["id2label"]) if hf.get("id2label") else hf.get("num_labels", 2)
        head = ClassHeadConfig(classes=classes, pool=FirstTokenConfig())
    config = vit(
        dim=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        heads=hf["num_attention_heads"],
        hidden=hf["intermediate_size"],
        image=hf["image_size"],
        patch=hf["patch_size"],
        channels=hf["num_channels"],
        head=head,
    )
    eps = float(hf.get("layer_norm_eps", 1e-12))
    for path in ("stack.final_norm.eps", "stack.pattern.0.norm.eps"):
        config = config.changed(path, eps)
    config = config.changed("stack.pattern.0.mixer.qkv_bias", bool(hf.get("qkv_bias", True)))
    return config.changed("stack.pattern.0.ffn.activation", activation(hf["hidden_act"]))


def rules(config: SequenceModelConfig) -> Iterator[Rule]:
    patches, dim = config.embedding, config.stack.dim
    assert isinstance(patches, PatchEmbeddingConfig)
    kernel = (dim, patches.channels, patches.patch, patches.patch)
    length = patches.patches + 1
    projection = "embeddings.patch_embeddings.projection"
    yield Reshaped("embedding.patches.weight", (f"{projection}.weight",), (dim, patches.pixels), kernel)
    yield Rule("embedding.patches.bias", (f"{projection}.bias",))
    yield Reshaped("embedding.class_token", ("embeddings.cls_token",), (dim,), (1, 1, dim))
    yield Reshaped("embedding.position.weight", ("embeddings.position_embeddings",), (length, dim), (1, length, dim))
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
