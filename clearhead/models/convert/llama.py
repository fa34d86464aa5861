"""LLaMA as `transformers` stores it, and the families that differ from it in a few fields: `VARIANTS`."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    ClampedFeedForwardConfig,
    ClassHeadConfig,
    GatedFeedForwardConfig,
    HeadConfig,
    HeadwiseNormConfig,
    LayerNormConfig,
    LMHeadConfig,
    LongRopeScaling,
    ModelConfig,
    MoEConfig,
    ParallelBlockConfig,
    PlainLayerNormConfig,
    ProjectionNormConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    SinksConfig,
    StackConfig,
    SwitchedFeedForwardConfig,
    TokenEmbeddingConfig,
    Window,
)
from clearhead.configs.stack import FeedConfig

from .rules import (
    Array,
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
    library,
    present,
    rope_parameters,
    rotary,
)

PREFIX = "model."
QkNormConfig = RMSNormConfig | LayerNormConfig | ProjectionNormConfig | HeadwiseNormConfig | None
IGNORED = (r".*rotary_emb\.inv_freq", r"lm_head\.weight")


@dataclass(frozen=True)
class ExpertNames:
    """How a family names its experts in `config.json` and in the names of tensors."""

    where: str = "mlp"
    count: str = "num_experts"
    hidden: str = "moe_intermediate_size"
    matrices: Mapping[str, str] | None = field(
        default_factory=lambda: {"gate": "gate_proj", "down": "down_proj", "up": "up_proj"}
    )  # None: all experts in one tensor, gates and ups in turns (gpt-oss)
    dense: bool = True  # some layers may have a plain feed-forward layer: `mlp_only_layers`, `decoder_sparse_step`
    shared: bool = False  # with a switched expert that every token passes


MIXTRAL = ExpertNames(
    "block_sparse_moe", "num_local_experts", "intermediate_size", {"gate": "w1", "down": "w2", "up": "w3"}, dense=False
)
GPT_OSS = ExpertNames("mlp", "num_local_experts", "intermediate_size", None, dense=False)


@dataclass(frozen=True)
class Variant:
    """How one family differs from LLaMA. A text is the field of `config.json` that decides."""

    name: str  # of its classes in `transformers`
    qkv_bias: bool | str = False
    out_bias: bool | str = False
    ffn_bias: bool | str = False
    qk_norm: Literal["heads", "projection", "headwise"] | None = None
    qk_normed: bool | str = True  # whether it has that norm
    parallel: bool | str = False  # attention and the feed-forward layer read the same normed input
    window: bool = False  # `sliding_window` holds in every layer
    layer_types: bool = False  # some layers have a window, as `layer_types` says, if `use_sliding_window`
    alternating: bool = False  # every other layer has a window, unless `layer_types` says otherwise
    unrotated: bool = False  # some layers have no rotary positions, as `no_rope_layers` says
    theta: float = 1e4
    norm: type[RMSNormConfig] | type[LayerNormConfig] | type[PlainLayerNormConfig] = RMSNormConfig
    eps: str = "rms_norm_eps"
    placement: Literal["pre", "inside"] = "pre"
    partial: bool = False  # `partial_rotary_factor`
    joined: bool = False  # one matrix for q, k and v, and one for gate and up
    experts: ExpertNames | None = None
    sinks: bool = False
    multipliers: bool = False  # of embeddings, scores, branches and logits
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of fields that older files lack


VARIANTS = {
    "llama": Variant("Llama", "attention_bias", "attention_bias", "mlp_bias"),
    "mistral": Variant("Mistral", window=True),
    "qwen2": Variant("Qwen2", True, layer_types=True),
    "qwen3": Variant("Qwen3", "attention_bias", "attention_bias", qk_norm="heads", layer_types=True),
    "mixtral": Variant("Mixtral", window=True, theta=1e6, experts=MIXTRAL),
    "qwen3_moe": Variant(
        "Qwen3Moe", "attention_bias", "attention_bias", qk_norm="heads", layer_types=True, experts=ExpertNames()
    ),
    "qwen2_moe": Variant(
        "Qwen2Moe", "qkv_bias", layer_types=True, experts=ExpertNames(shared=True), defaults={"qkv_bias": True}
    ),
    "granite": Variant("Granite", "attention_bias", "attention_bias", "mlp_bias", multipliers=True),
    "olmo": Variant("Olmo", "attention_bias", "attention_bias", norm=PlainLayerNormConfig, eps="no_eps"),
    "gpt_oss": Variant(
        "GptOss",
        "attention_bias",
        "attention_bias",
        True,
        alternating=True,
        theta=150000.0,
        experts=GPT_OSS,
        sinks=True,
        defaults={"attention_bias": True},
    ),
    "phi3": Variant("Phi3", window=True, partial=True, joined=True),
    "olmo2": Variant("Olmo2", "attention_bias", "attention_bias", qk_norm="projection", placement="inside"),
    "smollm3": Variant(
        "SmolLM3", "attention_bias", "attention_bias", "mlp_bias", layer_types=True, unrotated=True, theta=2e6
    ),
    "stablelm": Variant(
        "StableLm",
        "use_qkv_bias",
        norm=LayerNormConfig,
        eps="layer_norm_eps",
        partial=True,
        qk_norm="headwise",
        qk_normed="qk_layernorm",
        parallel="use_parallel_residual",
    ),
}
ARCHITECTURES = {
    kind: tuple(f"{variant.name}{head}" for head in ("Model", "ForCausalLM", "ForSequenceClassification"))
    for kind, variant in VARIANTS.items()
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def decide(hf: Mapping[str, Any], answer: bool | str) -> bool:
    return bool(hf.get(answer, False)) if isinstance(answer, str) else answer


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    variant = VARIANTS[kind]
    hf = {**variant.defaults, **hf}
    norm = variant.norm(eps=1e-5 if variant.norm is PlainLayerNormConfig else float(hf[variant.eps]))
    width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    qk_norm: QkNormConfig = None
    if variant.qk_norm is not None and decide(hf, variant.qk_normed):
        assert not isinstance(norm, PlainLayerNormConfig)
        headwise = HeadwiseNormConfig(width=width, eps=norm.eps)
        qk_norm = {"heads": norm, "projection": ProjectionNormConfig(norm=norm), "headwise": headwise}[variant.qk_norm]
    mixer = AttentionConfig(
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads"),
        head_dim=width if isinstance(qk_norm, HeadwiseNormConfig) else hf.get("head_dim"),
        mask=Causal(),
        rotary=rotary(hf, theta=variant.theta, partial=variant.partial),
        qk_norm=qk_norm,
        scale=hf.get("attention_multiplier", 1.0) if variant.multipliers else None,
        sinks=SinksConfig() if variant.sinks else None,
        qkv_clip=hf.get("clip_qkv"),
        qkv_bias=decide(hf, variant.qkv_bias),
        out_bias=decide(hf, variant.out_bias),
        dropout=hf.get("attention_dropout") or 0.0,
    )
    branch_scale = hf.get("residual_multiplier", 1.0) if variant.multipliers else 1.0

    def block(mixer: AttentionConfig, ffn: FeedConfig) -> BlockConfig | ParallelBlockConfig:
        if decide(hf, variant.parallel):
            return ParallelBlockConfig(mixer=mixer, ffn=ffn, norm=norm)
        return BlockConfig(mixer=mixer, ffn=ffn, norm=norm, placement=variant.placement, branch_scale=branch_scale)

    blocks = list(map(block, layer_mixers(kind, hf, mixer), layer_ffns(kind, hf)))
    same = all(block == blocks[0] for block in blocks)
    stack = StackConfig(
        dim=hf["hidden_size"],
        pattern=(blocks[0],) if same else tuple(blocks),
        repeats=len(blocks) if same else 1,
        final_norm=norm,
    )
    multiplier = float(hf.get("embedding_multiplier", 1.0)) if variant.multipliers else 1.0
    head = decoder_head(hf, ARCHITECTURES[kind], bool(hf.get("tie_word_embeddings", False)))
    if isinstance(head, LMHeadConfig) and variant.multipliers:
        head = replace(head, scale=1 / hf.get("logits_scaling", 1.0))
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=hf["vocab_size"], scaled=False if multiplier == 1.0 else multiplier),
        stack=stack,
        head=head,
    )


def layer_ffns(kind: str, hf: Mapping[str, Any]) -> list[FeedConfig]:
    """The feed-forward layer of each layer: plain, experts, or experts in some layers only."""
    variant, count = VARIANTS[kind], hf["num_hidden_layers"]
    experts = variant.experts

    def gated(hidden: int) -> GatedFeedForwardConfig:
        act, bias = activation(hf.get("hidden_act", "silu")), decide(hf, variant.ffn_bias)
        if experts is not None and experts.matrices is None:
            limit, steepness = hf.get("swiglu_limit", 7.0), hf.get("swiglu_alpha", 1.702)
            return ClampedFeedForwardConfig(hidden=hidden, bias=bias, limit=limit, steepness=steepness)
        return GatedFeedForwardConfig(hidden=hidden, activation=act, bias=bias)

    dense: FeedConfig = gated(hf["intermediate_size"])
    if experts is None:
        return [dense] * count
    shared = SwitchedFeedForwardConfig(ffn=gated(hf["shared_expert_intermediate_size"])) if experts.shared else None
    sparse = MoEConfig(
        expert=gated(hf[experts.hidden]),
        experts=hf.get(experts.count) or hf["num_local_experts"],
        active=hf["num_experts_per_tok"],
        shared=shared,
        normalised=bool(hf.get("norm_topk_prob", False)) if experts.dense else True,
        router_bias=experts.matrices is None,
    )
    every, plain = hf.get("decoder_sparse_step") or 1, hf.get("mlp_only_layers") or ()
    return [dense if experts.dense and (i in plain or (i + 1) % every) else sparse for i in range(count)]


def layer_mixers(kind: str, hf: Mapping[str, Any], mixer: AttentionConfig) -> list[AttentionConfig]:
    """The attention of each layer: some may have a window, and some no rotary positions."""
    variant, count = VARIANTS[kind], hf["num_hidden_layers"]
    window = hf.get("sliding_window", 4096 if kind == "mistral" else None)
    windows = [window if variant.window else None] * count
    if variant.layer_types and hf.get("use_sliding_window") and window:
        first = hf.get("max_window_layers", 28)
        kinds = hf.get("layer_types") or [LOCAL if i >= first else GLOBAL for i in range(count)]
        windows = [window if name == LOCAL else None for name in kinds]
    if variant.alternating and window:
        kinds = hf.get("layer_types") or [GLOBAL if i % 2 else LOCAL for i in range(count)]
        windows = [window if name == LOCAL else None for name in kinds]
    rotated = [True] * count
    if variant.unrotated:
        every = hf.get("no_rope_layer_interval", 4)
        rotated = [bool(flag) for flag in hf.get("no_rope_layers") or [(i + 1) % every for i in range(count)]]
    layers = list(zip(windows, rotated, strict=True))
    kinds_of_layers = {  # few: a config may have thousands of layers
        (window, turned): replace(
            mixer,
            mask=Causal() & Window(window) if window else Causal(),
            rotary=mixer.rotary if turned else None,
        )
        for window, turned in set(layers)
    }
    return [kinds_of_layers[layer] for layer in layers]


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(vocabulary=vocabulary) as embedding,
            stack=StackConfig(
                pattern=(
                    (
                        BlockConfig(mixer=AttentionConfig() as mixer)
                        | ParallelBlockConfig(mixer=AttentionConfig() as mixer)
                    ) as block,
                    *_,
                )
            ) as stack,
            head=None | LMHeadConfig() | ClassHeadConfig() as head,
        ):
            variant = VARIANTS[kind]
            mixers = [block.mixer for block in stack.blocks if isinstance(block.mixer, AttentionConfig)]
            turned = next((each.rotary for each in mixers if isinstance(each.rotary, RotaryConfig)), None)
            feeds = [block.ffn for block in stack.blocks]
            sparse = next((ffn for ffn in feeds if isinstance(ffn, MoEConfig)), None)
            dense = next((ffn for ffn in feeds if isinstance(ffn, GatedFeedForwardConfig)), None)
            if turned is None or (sparse is None) != (variant.experts is None):
                return None
            if kind in ("llama", "smollm3") and stack.dim % mixer.heads:
                return None  # `transformers` refuses it, whatever head_dim is
            gated = dense if dense is not None else sparse.expert if sparse is not None else None
            if not isinstance(gated, GatedFeedForwardConfig):
                return None
            fields = outer_fields(ARCHITECTURES[kind], stack, vocabulary, head) | {
                "model_type": kind,
                "intermediate_size": gated.hidden,
                "num_attention_heads": mixer.heads,
                "num_key_value_heads": mixer.kv_heads,
                "head_dim": mixer.head_dim,
                "hidden_act": hf_activation(gated.activation),
                variant.eps: block.norm.eps,
                "rope_parameters": rope_parameters(turned, mixer.head_dim),
                "max_position_embeddings": context_length(turned),
                "attention_dropout": mixer.dropout,
                **variant_fields(variant, mixers, gated),
                **(
                    {variant.parallel: isinstance(block, ParallelBlockConfig)}
                    if isinstance(variant.parallel, str)
                    else {}
                ),
                **expert_fields(variant, feeds, sparse),
            }
            if variant.multipliers and isinstance(block, BlockConfig):
                fields |= {
                    "embedding_multiplier": embedding.scale(stack.dim),
                    "attention_multiplier": mixer.scale,
                    "residual_multiplier": block.branch_scale,
                    "logits_scaling": 1 / head.scale if isinstance(head, LMHeadConfig) else 1.0,
                }
            return {name: value for name, value in fields.items() if name != "no_eps"}
    return None


def variant_fields(variant: Variant, mixers: list[AttentionConfig], gated: GatedFeedForwardConfig) -> dict[str, Any]:
    """The fields that not all of these families have."""
    mixer, fields = mixers[0], dict[str, Any]()
    biases = {variant.qkv_bias: mixer.qkv_bias, variant.ffn_bias: gated.bias}
    biases |= {variant.qk_normed: mixer.qk_norm is not None}
    fields |= {name: value for name, value in biases.items() if isinstance(name, str)}
    windows = [each.mask.reach for each in mixers]
    if variant.window:
        fields["sliding_window"] = mixer.mask.reach
    if variant.layer_types or variant.alternating:
        fields |= {"use_sliding_window": any(windows), "sliding_window": max((w for w in windows if w), default=None)}
        fields["layer_types"] = [LOCAL if window else GLOBAL for window in windows]
    if variant.unrotated:
        fields["no_rope_layers"] = [int(each.rotary is not None) for each in mixers]
    if variant.partial and isinstance(mixer.rotary, RotaryConfig) and mixer.head_dim:
        fields["partial_rotary_factor"] = mixer.rotary.width(mixer.head_dim) / mixer.head_dim
    if isinstance(mixer.rotary, RotaryConfig) and isinstance(mixer.rotary.scaling, LongRopeScaling):
        fields["original_max_position_embeddings"] = mixer.rotary.scaling.length
    if mixer.qkv_clip is not None:
        fields["clip_qkv"] = mixer.qkv_clip
    return fields


def expert_fields(variant: Variant, feeds: Sequence[FeedConfig | None], sparse: MoEConfig | None) -> dict[str, Any]:
    if variant.experts is None or sparse is None:
        return {}
    fields: dict[str, Any] = {
        variant.experts.count: sparse.experts,
        "num_experts_per_tok": sparse.active,
        variant.experts.hidden: sparse.expert.hidden,
    }
    if variant.experts.dense:
        plain = [i for i, ffn in enumerate(feeds) if not isinstance(ffn, MoEConfig)]
        fields |= {"norm_topk_prob": sparse.normalised, "decoder_sparse_step": 1, "mlp_only_layers": plain}
    if isinstance(sparse.shared, SwitchedFeedForwardConfig):
        fields["shared_expert_intermediate_size"] = sparse.shared.ffn.hidden
    if isinstance(sparse.expert, ClampedFeedForwardConfig):
        fields |= {"swiglu_limit": sparse.expert.limit, "swiglu_alpha": sparse.expert.steepness}
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
    return present(config, all_rules(config, VARIANTS.get(kind, VARIANTS["llama"])))


def all_rules(config: SequenceModelConfig, variant: Variant) -> Iterator[Rule]:
    yield from outer_rules(config)
    for i, block in enumerate(config.stack.blocks):
        ours, theirs = f"stack.blocks.{i}", f"layers.{i}"
        assert isinstance(block.mixer, AttentionConfig)
        mixer, ffn = block.mixer, block.ffn
        norms = NORMS[block.placement] if isinstance(block, BlockConfig) else {"norm": "input_layernorm"}
        yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in norms.items()})
        if variant.joined:
            yield Rule((f"{ours}.mixer.qkv.weight",), (f"{theirs}.self_attn.qkv_proj.weight",))
        else:
            names = tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv")
            yield from joined_qkv(f"{ours}.mixer.qkv", names, mixer, config.stack.dim)
        yield from both({f"{ours}.mixer.out": f"{theirs}.self_attn.o_proj"})
        yield Rule((f"{ours}.mixer.sinks.weight",), (f"{theirs}.self_attn.sinks",))
        inner = ".norm" if isinstance(mixer.qk_norm, ProjectionNormConfig) else ""
        normed = {"query_norm": "q_norm", "key_norm": "k_norm"}
        if isinstance(mixer.qk_norm, HeadwiseNormConfig):
            for mine, letter, heads in (("query_norm", "q", mixer.heads), ("key_norm", "k", mixer.groups)):
                each = (f"{theirs}.self_attn.{letter}_layernorm.norms.{head}.weight" for head in range(heads))
                yield Stacked((f"{ours}.mixer.{mine}.weight",), tuple(each))
        else:
            yield from both({f"{ours}.mixer.{a}{inner}": f"{theirs}.self_attn.{b}" for a, b in normed.items()})
        if isinstance(ffn, MoEConfig):
            assert variant.experts is not None
            yield from expert_rules(f"{ours}.ffn", f"{theirs}.{variant.experts.where}", ffn, variant.experts)
        elif variant.joined:
            assert isinstance(ffn, GatedFeedForwardConfig)
            width = ffn.width(config.stack.dim)
            halves = (f"{ours}.ffn.gate.weight", f"{ours}.ffn.up.weight")
            yield RowBlocks(halves, (f"{theirs}.mlp.gate_up_proj.weight",), (width, width))
            yield Rule((f"{ours}.ffn.down.weight",), (f"{theirs}.mlp.down_proj.weight",))
        else:
            yield from gated_rules(f"{ours}.ffn", f"{theirs}.mlp")


def expert_rules(ours: str, theirs: str, ffn: MoEConfig, experts: ExpertNames) -> Iterator[Rule]:
    yield from both({f"{ours}.router": f"{theirs}.{'gate' if experts.matrices else 'router'}"})
    yield from gated_rules(f"{ours}.shared.ffn", f"{theirs}.shared_expert")
    yield Rule((f"{ours}.shared.switch.weight",), (f"{theirs}.shared_expert_gate.weight",))
    for name, their in (experts.matrices or {}).items():
        each = (f"{theirs}.experts.{e}.{their}.weight" for e in range(ffn.experts))
        yield Stacked((f"{ours}.experts.{name}.weight",), tuple(each))
    if experts.matrices is None:
        for suffix, their in {"weight": "", "bias": "_bias"}.items():
            names = (f"{ours}.experts.gate.{suffix}", f"{ours}.experts.up.{suffix}")
            yield InTurns(names, (f"{theirs}.experts.gate_up_proj{their}",))
        yield Swapped((f"{ours}.experts.down.weight",), (f"{theirs}.experts.down_proj",))
        yield Rule((f"{ours}.experts.down.bias",), (f"{theirs}.experts.down_proj_bias",))


@dataclass(frozen=True)
class Swapped(Rule):
    """They store each expert's matrix as [in, out]."""

    def gather(self, parts: list[Array]) -> list[Array]:
        return [parts[0].swapaxes(-1, -2)]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        return [arrays[0].swapaxes(-1, -2)]


@dataclass(frozen=True)
class InTurns(Rule):
    """They store columns of the gate and of `up` in turns, for all experts; biases likewise."""

    def gather(self, parts: list[Array]) -> list[Array]:
        both = [parts[0][..., first::2] for first in (0, 1)]
        return both if parts[0].ndim == 2 else [array.swapaxes(-1, -2) for array in both]

    def scatter(self, arrays: list[Array]) -> list[Array]:
        if arrays[0].ndim == 3:
            arrays = [array.swapaxes(-1, -2) for array in arrays]
        turns = library(arrays[0]).stack(arrays, -1)
        return [turns.reshape(*turns.shape[:-2], -1)]


def outer_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield Rule(("embedding.tokens.weight",), ("embed_tokens.weight",))
    yield from both({"stack.final_norm": "norm"})
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


def gated_rules(ours: str, theirs: str) -> Iterator[Rule]:
    yield from both({f"{ours}.{name}": f"{theirs}.{name}_proj" for name in ("gate", "up", "down")})
