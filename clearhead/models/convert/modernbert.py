"""ModernBERT as `transformers` stores it: a pre-norm encoder with rotary positions, GEGLU, and windows in most layers.

The first block has no norm before its attention, since the embedding ends in one.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    ConfigError,
    Full,
    GatedFeedForwardConfig,
    HeadConfig,
    LayerNormConfig,
    MaskedLMHeadConfig,
    ModelConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
    Window,
)

from .rules import (
    RowBlocks,
    Rule,
    activation,
    architecture,
    both,
    hf_activation,
    present,
    rope_parameters,
    rotary,
)

PREFIX = "model."
IGNORED = (r"decoder\.weight",)
OUTSIDE = ("head", "decoder")
ARCHITECTURES = {"modernbert": ("ModernBertModel", "ModernBertForMaskedLM")}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    if not hf.get("decoder_bias", True):
        raise ConfigError("modernbert without decoder_bias is not supported yet")
    norm = LayerNormConfig(eps=float(hf.get("norm_eps", 1e-5)), bias=bool(hf.get("norm_bias", False)))
    biased, dropout = bool(hf.get("attention_bias", False)), hf.get("attention_dropout") or 0.0
    turned, reach = rotaries(hf), hf.get("local_attention", 128) // 2  # to each side
    mixers = {
        kind: AttentionConfig(
            heads=hf["num_attention_heads"],
            mask=Window(reach + 1) if kind == LOCAL else Full(),
            rotary=turned[kind],
            qkv_bias=biased,
            out_bias=biased,
            dropout=dropout,
        )
        for kind in turned
    }
    act = activation(hf.get("hidden_activation", "gelu"))
    ffn = GatedFeedForwardConfig(hidden=hf["intermediate_size"], activation=act, bias=bool(hf.get("mlp_bias", False)))
    every = hf.get("global_attn_every_n_layers") or 3
    kinds = hf.get("layer_types") or [LOCAL if i % every else GLOBAL for i in range(hf["num_hidden_layers"])]
    blocks = [BlockConfig(mixer=mixers[kind], ffn=ffn, norm=norm) for kind in kinds]
    blocks[0] = replace(blocks[0], bare=("mixer",))
    head: HeadConfig | None = None
    if architecture(hf, "ModernBertModel") == "ModernBertForMaskedLM":
        head = MaskedLMHeadConfig(
            vocabulary=hf["vocab_size"],
            activation=activation(hf.get("classifier_activation", "gelu")),
            norm=norm,
            dense_bias=bool(hf.get("classifier_bias", False)),
        )
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(
            vocabulary=hf["vocab_size"], norm=norm, dropout=hf.get("embedding_dropout") or 0.0
        ),
        stack=StackConfig(dim=hf["hidden_size"], pattern=tuple(blocks), repeats=1, final_norm=norm),
        head=head,
    )


def rotaries(hf: Mapping[str, Any]) -> dict[str, RotaryConfig]:
    """`rope_parameters` of each kind of layer, or the older fields."""
    rope = hf.get("rope_parameters") or {}
    older = {LOCAL: hf.get("local_rope_theta") or 1e4, GLOBAL: hf.get("global_rope_theta") or 1.6e5}
    outer = {key: value for key, value in hf.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")}
    return {
        kind: rotary(outer | {"rope_parameters": {"rope_theta": theta} | dict(rope.get(kind) or {})})
        for kind, theta in older.items()
    }


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(norm=LayerNormConfig() as norm) as embedding,
            stack=StackConfig(
                pattern=(BlockConfig(mixer=AttentionConfig() as mixer, ffn=GatedFeedForwardConfig() as ffn), *_)
            ) as stack,
            head=None | MaskedLMHeadConfig() as head,
        ):
            mixers = [block.mixer for block in stack.blocks if isinstance(block.mixer, AttentionConfig)]
            kinds = [GLOBAL if each.mask.reach is None else LOCAL for each in mixers]
            first = dict(reversed([*zip(kinds, mixers, strict=True)]))
            rope = {
                name: rope_parameters(each.rotary)
                for name, each in first.items()
                if isinstance(each.rotary, RotaryConfig)
            }
            reach = first[LOCAL].mask.reach if LOCAL in first else 65
            return {
                "architectures": [ARCHITECTURES[kind][head is not None]],
                "model_type": kind,
                "vocab_size": embedding.vocabulary,
                "hidden_size": stack.dim,
                "num_hidden_layers": len(stack.blocks),
                "num_attention_heads": mixer.heads,
                "intermediate_size": ffn.hidden,
                "hidden_activation": hf_activation(ffn.activation),
                "norm_eps": norm.eps,
                "norm_bias": norm.bias,
                "attention_bias": mixer.qkv_bias,
                "attention_dropout": mixer.dropout,
                "embedding_dropout": embedding.dropout,
                "mlp_bias": ffn.bias,
                "layer_types": kinds,
                "local_attention": 2 * ((reach or 65) - 1),
                "rope_parameters": {name: {"rope_type": "default", "rope_theta": 1e4} for name in (LOCAL, GLOBAL)}
                | rope,
                "classifier_bias": head is not None and head.dense_bias,
                "classifier_activation": hf_activation(head.activation) if head is not None else "gelu",
                "decoder_bias": True,
                "tie_word_embeddings": True,
                **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "cls_token_id", "sep_token_id")),
            }
    return None


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    return present(config, all_rules(config))


def all_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield Rule(("embedding.tokens.weight",), ("embeddings.tok_embeddings.weight",))
    yield from both({"embedding.norm": "embeddings.norm", "stack.final_norm": "final_norm"})
    for i, block in enumerate(config.stack.blocks):
        assert isinstance(block.ffn, GatedFeedForwardConfig)
        ours, theirs, width = f"stack.blocks.{i}", f"layers.{i}", block.ffn.width(config.stack.dim)
        for suffix in ("weight", "bias"):
            halves = (f"{ours}.ffn.gate.{suffix}", f"{ours}.ffn.up.{suffix}")
            yield RowBlocks(halves, (f"{theirs}.mlp.Wi.{suffix}",), (width, width))
        yield from both(
            {
                f"{ours}.mixer_residual.before": f"{theirs}.attn_norm",
                f"{ours}.mixer.qkv": f"{theirs}.attn.Wqkv",
                f"{ours}.mixer.out": f"{theirs}.attn.Wo",
                f"{ours}.ffn_residual.before": f"{theirs}.mlp_norm",
                f"{ours}.ffn.down": f"{theirs}.mlp.Wo",
            }
        )
    yield from both({"head.dense": "head.dense", "head.norm": "head.norm"})
    yield Rule(("head.bias",), ("decoder.bias",))
