"""LLaMA and its kin as `transformers` stores them: mistral, qwen2, qwen3, mixtral."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    ClassHeadConfig,
    ConfigError,
    GatedFeedForwardConfig,
    HeadConfig,
    LMHeadConfig,
    ModelConfig,
    MoEConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
    Window,
)
from clearhead.configs.stack import FeedConfig
from clearhead.models.llama import decoder

from .rules import (
    Rule,
    Stacked,
    activation,
    both,
    context_length,
    copies,
    decoder_class,
    decoder_head,
    decoder_head_rules,
    hf_activation,
    joined_qkv,
    labels,
    rope_parameters,
    rotary,
)

PREFIX = "model."
IGNORED = (r".*rotary_emb\.inv_freq", r"lm_head\.weight")
ARCHITECTURES = {
    kind: (f"{name}Model", f"{name}ForCausalLM", f"{name}ForSequenceClassification")
    for kind, name in {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
        "mixtral": "Mixtral",
    }.items()
}


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    window = hf.get("sliding_window", {"mistral": 4096}.get(kind)) if kind in ("mistral", "mixtral") else None
    if hf.get("use_sliding_window"):
        raise ConfigError(f"{kind} with use_sliding_window mixes window and full layers, which is not supported yet")
    eps = float(hf["rms_norm_eps"])
    biased = kind in ("llama", "qwen3") and bool(hf.get("attention_bias", False))  # the others do not read the field
    mixer = AttentionConfig(
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads"),
        head_dim=hf.get("head_dim"),
        mask=Causal() & Window(window) if window else Causal(),
        rotary=rotary(hf, theta=1e6 if kind == "mixtral" else 1e4),
        qk_norm=RMSNormConfig(eps=eps) if kind == "qwen3" else None,
        qkv_bias=kind == "qwen2" or biased,
        out_bias=biased,
        dropout=hf.get("attention_dropout") or 0.0,
    )
    gated = GatedFeedForwardConfig(
        hidden=hf["intermediate_size"],
        activation=activation(hf.get("hidden_act", "silu")),
        bias=kind == "llama" and bool(hf.get("mlp_bias", False)),
    )
    ffn: FeedConfig = gated
    if kind == "mixtral":
        ffn = MoEConfig(expert=gated, experts=hf["num_local_experts"], active=hf["num_experts_per_tok"])
    config = decoder(
        dim=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        mixer=mixer,
        ffn=ffn,
        vocabulary=hf["vocab_size"],
        eps=eps,
    )
    return replace(config, head=decoder_head(hf, ARCHITECTURES[kind], bool(hf.get("tie_word_embeddings", False))))


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(vocabulary=vocabulary),
            stack=StackConfig(
                pattern=(
                    BlockConfig(
                        mixer=AttentionConfig(rotary=RotaryConfig() as turned) as mixer,
                        ffn=GatedFeedForwardConfig() | MoEConfig() as ffn,
                        norm=norm,
                    ),
                    *_,
                )
            ) as stack,
            head=None | LMHeadConfig() | ClassHeadConfig() as head,
        ):
            if isinstance(ffn, MoEConfig) != (kind == "mixtral"):
                return None
            if kind == "llama" and stack.dim % mixer.heads:
                return None  # `transformers` refuses it, whatever head_dim is
            gated = ffn.expert if isinstance(ffn, MoEConfig) else ffn
            return outer_fields(ARCHITECTURES[kind], stack, vocabulary, head) | {
                "model_type": kind,
                "intermediate_size": gated.hidden,
                "num_attention_heads": mixer.heads,
                "num_key_value_heads": mixer.kv_heads,
                "head_dim": mixer.head_dim,
                "hidden_act": hf_activation(gated.activation),
                "rms_norm_eps": norm.eps,
                "rope_parameters": rope_parameters(turned),
                "max_position_embeddings": context_length(turned),
                "attention_dropout": mixer.dropout,
                **own_fields(kind, mixer, ffn),
            }
    return None


def own_fields(kind: str, mixer: AttentionConfig, ffn: FeedConfig) -> dict[str, Any]:
    """What one of them says and another does not."""
    fields: dict[str, Any] = {}
    if kind in ("llama", "qwen3"):
        fields["attention_bias"] = mixer.qkv_bias
    if kind == "llama":
        fields["mlp_bias"] = isinstance(ffn, GatedFeedForwardConfig) and ffn.bias
    if kind in ("mistral", "mixtral"):
        fields["sliding_window"] = mixer.mask.reach
    if kind in ("qwen2", "qwen3"):
        fields["use_sliding_window"] = False
    if kind == "mixtral" and isinstance(ffn, MoEConfig):
        fields |= {"num_local_experts": ffn.experts, "num_experts_per_tok": ffn.active}
    return fields


def outer_fields(
    architectures: tuple[str, ...], stack: StackConfig, vocabulary: int, head: HeadConfig | None
) -> dict[str, Any]:
    """What every decoder of this kind says of itself. Which tokens begin and end a text, the config does not know."""
    return {
        "architectures": [decoder_class(architectures, head)],
        "vocab_size": vocabulary,
        "hidden_size": stack.dim,
        "num_hidden_layers": len(stack.blocks),
        "tie_word_embeddings": isinstance(head, LMHeadConfig) and head.tied,
        "bos_token_id": None,
        "eos_token_id": None,
        **labels(head),
    }


def rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield from outer_rules(config)
    for i, block in enumerate(config.stack.blocks):
        ours, theirs = f"stack.blocks.{i}", f"layers.{i}"
        assert isinstance(block, BlockConfig)
        assert isinstance(block.mixer, AttentionConfig)
        mixer, ffn = block.mixer, block.ffn
        yield from norm_rules(ours, theirs, block.placement)
        names = tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv")
        yield from joined_qkv(f"{ours}.mixer.qkv", names, mixer, config.stack.dim)
        yield from both(
            {f"{ours}.mixer.out": f"{theirs}.self_attn.o_proj"}, ("weight", "bias") if mixer.out_bias else ("weight",)
        )
        if mixer.qk_norm is not None:
            yield from both(
                {
                    f"{ours}.mixer.query_norm": f"{theirs}.self_attn.q_norm",
                    f"{ours}.mixer.key_norm": f"{theirs}.self_attn.k_norm",
                },
                ("weight",),
            )
        if isinstance(ffn, MoEConfig):
            moe = f"{theirs}.block_sparse_moe"
            yield Rule((f"{ours}.ffn.router.weight",), (f"{moe}.gate.weight",))
            for name, letter in {"gate": "w1", "down": "w2", "up": "w3"}.items():
                experts = tuple(f"{moe}.experts.{e}.{letter}.weight" for e in range(ffn.experts))
                yield Stacked((f"{ours}.ffn.experts.{name}.weight",), experts)
        else:
            assert isinstance(ffn, GatedFeedForwardConfig)
            yield from gated_rules(f"{ours}.ffn", f"{theirs}.mlp", ffn)


def outer_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield from copies({"embedding.tokens.weight": "embed_tokens.weight", "stack.final_norm.weight": "norm.weight"})
    yield from decoder_head_rules(config.head)


NORMS = {
    "pre": {"mixer_residual.before": "input_layernorm", "ffn_residual.before": "post_attention_layernorm"},
    "sandwich": {
        "mixer_residual.before": "input_layernorm",
        "mixer_residual.inside": "post_attention_layernorm",
        "ffn_residual.before": "pre_feedforward_layernorm",
        "ffn_residual.inside": "post_feedforward_layernorm",
    },
}


def norm_rules(ours: str, theirs: str, placement: str) -> Iterator[Rule]:
    norms = NORMS[placement]
    yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in norms.items()}, ("weight",))


def gated_rules(ours: str, theirs: str, ffn: GatedFeedForwardConfig) -> Iterator[Rule]:
    matrices = {f"{ours}.{name}": f"{theirs}.{name}_proj" for name in ("gate", "up", "down")}
    yield from both(matrices, ("weight", "bias") if ffn.bias else ("weight",))
