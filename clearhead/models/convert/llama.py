"""LLaMA as `transformers` stores it, and the families that differ from it in a few fields: `VARIANTS`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    ClassHeadConfig,
    ConfigError,
    GatedFeedForwardConfig,
    HeadConfig,
    LayerNormConfig,
    LMHeadConfig,
    ModelConfig,
    MoEConfig,
    ProjectionNormConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
    Window,
)
from clearhead.configs.stack import FeedConfig

from .rules import (
    RowBlocks,
    Rule,
    Stacked,
    activation,
    both,
    context_length,
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


@dataclass(frozen=True)
class Variant:
    """How one family differs from LLaMA. A text is the field of `config.json` that decides."""

    name: str  # of its classes in `transformers`
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    ffn_bias: bool | str = False
    qk_norm: Literal["heads", "projection"] | None = None
    window: bool = False  # `sliding_window` holds in every layer
    layer_types: bool = False  # some layers have a window, as `layer_types` says
    unrotated: bool = False  # some layers have no rotary positions, as `no_rope_layers` says
    theta: float = 1e4
    norm: type[RMSNormConfig] | type[LayerNormConfig] = RMSNormConfig
    placement: Literal["pre", "inside"] = "pre"
    partial: bool = False  # `partial_rotary_factor`
    joined: bool = False  # one matrix for q, k and v, and one for gate and up
    experts: str | None = None  # where the experts are in the names of tensors


VARIANTS = {
    "llama": Variant("Llama", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Variant("Mistral", window=True),
    "qwen2": Variant("Qwen2", True, layer_types=True),
    "qwen3": Variant("Qwen3", "attention_bias", "attention_bias", qk_norm="heads", layer_types=True),
    "mixtral": Variant("Mixtral", window=True, theta=1e6, experts="block_sparse_moe"),
    "qwen3_moe": Variant(
        "Qwen3Moe", "attention_bias", "attention_bias", qk_norm="heads", layer_types=True, experts="mlp"
    ),
    "phi3": Variant("Phi3", window=True, partial=True, joined=True),
    "olmo2": Variant("Olmo2", "attention_bias", "attention_bias", qk_norm="projection", placement="inside"),
    "smollm3": Variant(
        "SmolLM3", "attention_bias", "attention_bias", "mlp_bias", layer_types=True, unrotated=True, theta=2e6
    ),
    "stablelm": Variant("StableLm", "use_qkv_bias", norm=LayerNormConfig, partial=True),
}
ARCHITECTURES = {
    kind: tuple(f"{variant.name}{head}" for head in ("Model", "ForCausalLM", "ForSequenceClassification"))
    for kind, variant in VARIANTS.items()
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"
EXPERT_NAMES = {
    "block_sparse_moe": {"gate": "w1", "down": "w2", "up": "w3"},
    "mlp": {"gate": "gate_proj", "down": "down_proj", "up": "up_proj"},
}


def decide(hf: Mapping[str, Any], answer: bool | str) -> bool:
    return bool(hf.get(answer, False)) if isinstance(answer, str) else answer


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    variant = VARIANTS[kind]
    refuse_unsupported(kind, hf)
    eps = float(hf["layer_norm_eps" if variant.norm is LayerNormConfig else "rms_norm_eps"])
    norm = variant.norm(eps=eps)
    qk_norm = {"heads": norm, "projection": ProjectionNormConfig(norm=norm), None: None}[variant.qk_norm]
    mixer = AttentionConfig(
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads"),
        head_dim=hf.get("head_dim"),
        mask=Causal(),
        rotary=rotary(hf, theta=variant.theta, partial=variant.partial),
        qk_norm=qk_norm,
        qkv_bias=decide(hf, variant.qkv_bias),
        out_bias=decide(hf, variant.out_bias),
        dropout=hf.get("attention_dropout") or 0.0,
    )
    gated = GatedFeedForwardConfig(
        hidden=hf["moe_intermediate_size" if kind == "qwen3_moe" else "intermediate_size"],
        activation=activation(hf.get("hidden_act", "silu")),
        bias=decide(hf, variant.ffn_bias),
    )
    ffn: FeedConfig = gated
    if kind == "mixtral":
        ffn = MoEConfig(expert=gated, experts=hf["num_local_experts"], active=hf["num_experts_per_tok"])
    elif kind == "qwen3_moe":
        ffn = MoEConfig(
            expert=gated,
            experts=hf.get("num_experts") or hf["num_local_experts"],
            active=hf["num_experts_per_tok"],
            normalised=bool(hf.get("norm_topk_prob", False)),
        )
    blocks = [
        BlockConfig(mixer=each, ffn=ffn, norm=norm, placement=variant.placement)
        for each in layer_mixers(kind, hf, mixer)
    ]
    same = all(block == blocks[0] for block in blocks)
    stack = StackConfig(
        dim=hf["hidden_size"],
        pattern=(blocks[0],) if same else tuple(blocks),
        repeats=len(blocks) if same else 1,
        final_norm=norm,
    )
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=hf["vocab_size"]),
        stack=stack,
        head=decoder_head(hf, ARCHITECTURES[kind], bool(hf.get("tie_word_embeddings", False))),
    )


def refuse_unsupported(kind: str, hf: Mapping[str, Any]) -> None:
    if kind == "qwen3_moe" and (hf.get("decoder_sparse_step", 1) != 1 or hf.get("mlp_only_layers")):
        raise ConfigError("qwen3_moe with dense layers among the sparse ones is not supported yet")
    for field in ("use_parallel_residual", "qk_layernorm"):
        if kind == "stablelm" and hf.get(field):
            raise ConfigError(f"stablelm with {field} is not supported yet")


def layer_mixers(kind: str, hf: Mapping[str, Any], mixer: AttentionConfig) -> list[AttentionConfig]:
    """The attention of each layer: some may have a window, and some no rotary positions."""
    variant, count = VARIANTS[kind], hf["num_hidden_layers"]
    window = hf.get("sliding_window", 4096 if kind == "mistral" else None)
    windows = [window if variant.window else None] * count
    if variant.layer_types and hf.get("use_sliding_window") and window:
        first = hf.get("max_window_layers", 28)
        kinds = hf.get("layer_types") or [LOCAL if i >= first else GLOBAL for i in range(count)]
        windows = [window if name == LOCAL else None for name in kinds]
    rotated = [True] * count
    if variant.unrotated:
        every = hf.get("no_rope_layer_interval", 4)
        rotated = [bool(flag) for flag in hf.get("no_rope_layers") or [(i + 1) % every for i in range(count)]]
    return [
        replace(
            mixer,
            mask=Causal() & Window(window) if window else Causal(),
            rotary=mixer.rotary if turned else None,
        )
        for window, turned in zip(windows, rotated, strict=True)
    ]


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(vocabulary=vocabulary),
            stack=StackConfig(
                pattern=(
                    BlockConfig(
                        mixer=AttentionConfig() as mixer,
                        ffn=GatedFeedForwardConfig() | MoEConfig() as ffn,
                        norm=norm,
                    ),
                    *_,
                )
            ) as stack,
            head=None | LMHeadConfig() | ClassHeadConfig() as head,
        ):
            mixers = [block.mixer for block in stack.blocks if isinstance(block.mixer, AttentionConfig)]
            turned = next((each.rotary for each in mixers if isinstance(each.rotary, RotaryConfig)), None)
            if turned is None or isinstance(ffn, MoEConfig) != (VARIANTS[kind].experts is not None):
                return None
            if kind in ("llama", "smollm3") and stack.dim % mixer.heads:
                return None  # `transformers` refuses it, whatever head_dim is
            gated = ffn.expert if isinstance(ffn, MoEConfig) else ffn
            eps = "layer_norm_eps" if VARIANTS[kind].norm is LayerNormConfig else "rms_norm_eps"
            return outer_fields(ARCHITECTURES[kind], stack, vocabulary, head) | {
                "model_type": kind,
                "intermediate_size": gated.hidden,
                "num_attention_heads": mixer.heads,
                "num_key_value_heads": mixer.kv_heads,
                "head_dim": mixer.head_dim,
                "hidden_act": hf_activation(gated.activation),
                eps: norm.eps,
                "rope_parameters": rope_parameters(turned, mixer.head_dim),
                "max_position_embeddings": context_length(turned),
                "attention_dropout": mixer.dropout,
                **variant_fields(kind, mixers, ffn),
            }
    return None


def variant_fields(kind: str, mixers: list[AttentionConfig], ffn: FeedConfig) -> dict[str, Any]:
    """The fields that not all of these families have."""
    variant, mixer, fields = VARIANTS[kind], mixers[0], dict[str, Any]()
    gated = ffn.expert if isinstance(ffn, MoEConfig) else ffn
    biases = {variant.qkv_bias: mixer.qkv_bias, variant.ffn_bias: getattr(gated, "bias", False)}
    fields |= {name: value for name, value in biases.items() if isinstance(name, str)}
    if variant.window:
        fields["sliding_window"] = mixer.mask.reach
    if variant.layer_types:
        windows = [each.mask.reach for each in mixers]
        fields |= {"use_sliding_window": any(windows), "sliding_window": max((w for w in windows if w), default=None)}
        fields["layer_types"] = [LOCAL if window else GLOBAL for window in windows]
    if variant.unrotated:
        fields["no_rope_layers"] = [int(each.rotary is not None) for each in mixers]
    if variant.partial and isinstance(mixer.rotary, RotaryConfig) and mixer.head_dim:
        fields["partial_rotary_factor"] = mixer.rotary.width(mixer.head_dim) / mixer.head_dim
    if isinstance(ffn, MoEConfig):
        fields["num_experts_per_tok"] = ffn.active
        if kind == "mixtral":
            fields["num_local_experts"] = ffn.experts
        else:
            fields |= {"num_experts": ffn.experts, "norm_topk_prob": ffn.normalised, "decoder_sparse_step": 1}
            fields |= {"moe_intermediate_size": gated.hidden, "mlp_only_layers": []}
    return fields


def outer_fields(
    architectures: tuple[str, ...], stack: StackConfig, vocabulary: int, head: HeadConfig | None
) -> dict[str, Any]:
    """The fields that all decoders of this kind have. Our config does not know which tokens begin and end a text."""
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


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    variant = VARIANTS.get(kind, VARIANTS["llama"])
    yield from outer_rules(config)
    suffixes = ("weight", "bias") if isinstance(config.stack.final_norm, LayerNormConfig) else ("weight",)
    for i, block in enumerate(config.stack.blocks):
        ours, theirs = f"stack.blocks.{i}", f"layers.{i}"
        assert isinstance(block, BlockConfig)
        assert isinstance(block.mixer, AttentionConfig)
        mixer, ffn = block.mixer, block.ffn
        yield from norm_rules(ours, theirs, block.placement, suffixes)
        if variant.joined:
            yield Rule((f"{ours}.mixer.qkv.weight",), (f"{theirs}.self_attn.qkv_proj.weight",))
        else:
            names = tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv")
            yield from joined_qkv(f"{ours}.mixer.qkv", names, mixer, config.stack.dim)
        yield from both(
            {f"{ours}.mixer.out": f"{theirs}.self_attn.o_proj"}, ("weight", "bias") if mixer.out_bias else ("weight",)
        )
        if mixer.qk_norm is not None:
            inner = ".norm" if isinstance(mixer.qk_norm, ProjectionNormConfig) else ""
            yield from both(
                {
                    f"{ours}.mixer.query_norm{inner}": f"{theirs}.self_attn.q_norm",
                    f"{ours}.mixer.key_norm{inner}": f"{theirs}.self_attn.k_norm",
                },
                ("weight",),
            )
        if isinstance(ffn, MoEConfig):
            assert variant.experts is not None
            yield Rule((f"{ours}.ffn.router.weight",), (f"{theirs}.{variant.experts}.gate.weight",))
            for name, their in EXPERT_NAMES[variant.experts].items():
                experts = (f"{theirs}.{variant.experts}.experts.{e}.{their}.weight" for e in range(ffn.experts))
                yield Stacked((f"{ours}.ffn.experts.{name}.weight",), tuple(experts))
        elif variant.joined:
            assert isinstance(ffn, GatedFeedForwardConfig)
            width = ffn.width(config.stack.dim)
            halves = (f"{ours}.ffn.gate.weight", f"{ours}.ffn.up.weight")
            yield RowBlocks(halves, (f"{theirs}.mlp.gate_up_proj.weight",), (width, width))
            yield Rule((f"{ours}.ffn.down.weight",), (f"{theirs}.mlp.down_proj.weight",))
        else:
            assert isinstance(ffn, GatedFeedForwardConfig)
            yield from gated_rules(f"{ours}.ffn", f"{theirs}.mlp", ffn)


def outer_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield Rule(("embedding.tokens.weight",), ("embed_tokens.weight",))
    suffixes = ("weight", "bias") if isinstance(config.stack.final_norm, LayerNormConfig) else ("weight",)
    yield from both({"stack.final_norm": "norm"}, suffixes)
    yield from decoder_head_rules(config.head)


NORMS = {
    "pre": {"mixer_residual.before": "input_layernorm", "ffn_residual.before": "post_attention_layernorm"},
    "sandwich": {
        "mixer_residual.before": "input_layernorm",
        "mixer_residual.inside": "post_attention_layernorm",
        "ffn_residual.before": "pre_feedforward_layernorm",
        "ffn_residual.inside": "post_feedforward_layernorm",
    },
    "inside": {
        "mixer_residual.inside": "post_attention_layernorm",
        "ffn_residual.inside": "post_feedforward_layernorm",
    },
}


def norm_rules(ours: str, theirs: str, placement: str, suffixes: tuple[str, ...] = ("weight",)) -> Iterator[Rule]:
    norms = NORMS[placement]
    yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in norms.items()}, suffixes)


def gated_rules(ours: str, theirs: str, ffn: GatedFeedForwardConfig) -> Iterator[Rule]:
    matrices = {f"{ours}.{name}": f"{theirs}.{name}_proj" for name in ("gate", "up", "down")}
    yield from both(matrices, ("weight", "bias") if ffn.bias else ("weight",))
