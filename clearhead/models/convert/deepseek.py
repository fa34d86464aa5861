"""DeepSeek-V2 and V3 as `transformers` stores them: latent attention, dense first layers, fine-grained experts."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from clearhead.configs import (
    BlockConfig,
    ChoiceConfig,
    ClassHeadConfig,
    ConfigError,
    GatedFeedForwardConfig,
    GroupedChoiceConfig,
    GroupedSoftmaxChoiceConfig,
    LatentAttentionConfig,
    LMHeadConfig,
    ModelConfig,
    MoEConfig,
    SequenceModelConfig,
    SoftmaxChoiceConfig,
    StackConfig,
    TokenEmbeddingConfig,
    YarnScaling,
)
from clearhead.configs.rotary import yarn_magnitude
from clearhead.models.deepseek import deepseek

from . import llama
from .llama import NORMS, gated_rules, outer_fields, outer_rules
from .rules import (
    Rule,
    Stacked,
    activation,
    both,
    context_length,
    decoder_head,
    hf_activation,
    present,
    rope_parameters,
    rotary,
    with_fields,
)

PREFIX = llama.PREFIX
IGNORED = (*llama.IGNORED, r"layers\.61\..*")  # V3's multi-token prediction module; transformers skips it too
ARCHITECTURES = {
    kind: (f"{name}Model", f"{name}ForCausalLM", f"{name}ForSequenceClassification")
    for kind, name in {"deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}.items()
}


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    known = ("greedy", "group_limited_greedy") if kind == "deepseek_v2" else ("noaux_tc",)
    method = hf.get("topk_method", known[0])
    if method not in known:
        raise ConfigError(f"the router method {method!r} of a {kind} is not supported yet; {' or '.join(known)} is")
    if hf.get("mlp_bias"):
        raise ConfigError(f"{kind} with mlp_bias has biases in some of its layers only, which is not supported yet")
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    weight = rope.get("mscale_all_dim", 0)
    act = activation(hf.get("hidden_act", "silu"))
    mixer = LatentAttentionConfig(
        heads=hf["num_attention_heads"],
        latent_dim=hf["kv_lora_rank"],
        plain_dim=hf["qk_nope_head_dim"],
        rope_dim=hf["qk_rope_head_dim"],
        value_dim=hf["v_head_dim"],
        query_latent_dim=hf.get("q_lora_rank"),
        rotary=rotary(hf, layout="interleaved" if hf.get("rope_interleave", True) else "halves"),
        bias=bool(hf.get("attention_bias", False)),
        magnitude=yarn_magnitude(rope["factor"], weight) if weight else 1.0,
        dropout=hf.get("attention_dropout") or 0.0,
    )
    width, shared = hf["moe_intermediate_size"], hf.get("n_shared_experts")
    choice: ChoiceConfig = SoftmaxChoiceConfig()
    if method == "group_limited_greedy":
        choice = GroupedSoftmaxChoiceConfig(groups=hf["n_group"], kept=hf["topk_group"])
    if kind == "deepseek_v3":
        choice = GroupedChoiceConfig(groups=hf.get("n_group") or 1, kept=hf.get("topk_group") or 1)
    moe = MoEConfig(
        expert=GatedFeedForwardConfig(hidden=width, activation=act),
        experts=hf["n_routed_experts"],
        active=hf["num_experts_per_tok"],
        shared=GatedFeedForwardConfig(hidden=width * shared, activation=act) if shared else None,
        normalised=bool(hf.get("norm_topk_prob", kind == "deepseek_v3")),
        scale=float(hf.get("routed_scaling_factor", 1.0)),
        choice=choice,
    )
    config = deepseek(
        dim=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        mixer=mixer,
        hidden=hf["intermediate_size"],
        moe=moe,
        vocabulary=hf["vocab_size"],
        dense_layers=hf["first_k_dense_replace"],
        eps=float(hf["rms_norm_eps"]),
    )
    fields: dict[str, Any] = {f"stack.first.{i}.ffn.activation": act for i in range(len(config.stack.first))}
    head = decoder_head(hf, ARCHITECTURES[kind], bool(hf.get("tie_word_embeddings", False)))
    return replace(with_fields(config, fields), head=head)


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(vocabulary=vocabulary),
            stack=StackConfig(
                pattern=(
                    *_,
                    BlockConfig(
                        mixer=LatentAttentionConfig() as mixer,
                        ffn=MoEConfig(
                            expert=GatedFeedForwardConfig(hidden=int(width)) as expert,
                            shared=GatedFeedForwardConfig(hidden=int(shared)),
                        ) as moe,
                        norm=norm,
                    ),
                )
            ) as stack,
            head=None | LMHeadConfig() | ClassHeadConfig() as head,
        ) if shared % width == 0 and stack.dim % mixer.heads == 0:
            plain = [block.ffn for block in stack.blocks if isinstance(block.ffn, GatedFeedForwardConfig)]
            return outer_fields(ARCHITECTURES[kind], stack, vocabulary, head) | {
                "model_type": kind,
                "intermediate_size": plain[0].hidden if plain else width,
                "moe_intermediate_size": width,
                "num_attention_heads": mixer.heads,
                "num_key_value_heads": mixer.heads,
                "kv_lora_rank": mixer.latent_dim,
                "q_lora_rank": mixer.query_latent_dim,
                "qk_nope_head_dim": mixer.plain_dim,
                "qk_rope_head_dim": mixer.rope_dim,
                "v_head_dim": mixer.value_dim,
                "first_k_dense_replace": len(plain),
                "n_routed_experts": moe.experts,
                "n_shared_experts": shared // width,
                "num_experts_per_tok": moe.active,
                "routed_scaling_factor": float(moe.scale),
                **router_fields(kind, mixer, moe),
                "hidden_act": hf_activation(expert.activation),
                "rms_norm_eps": norm.eps,
                "rope_parameters": rope_parameters(mixer.rotary) | yarn_weight(mixer),
                "max_position_embeddings": context_length(mixer.rotary),
                "attention_bias": mixer.bias,
                "attention_dropout": mixer.dropout,
            }
    return None


def router_fields(kind: str, mixer: LatentAttentionConfig, moe: MoEConfig) -> dict[str, Any]:
    """Return the fields that differ in V2 and V3. V2's class ignores `norm_topk_prob`, so it is never true in V2."""
    if isinstance(moe.choice, GroupedChoiceConfig) and kind == "deepseek_v3":
        return {
            "norm_topk_prob": moe.normalised,
            "n_group": moe.choice.groups,
            "topk_group": moe.choice.kept,
            "rope_interleave": mixer.rotary.layout == "interleaved",
            "num_nextn_predict_layers": 0,
        }
    if isinstance(moe.choice, GroupedSoftmaxChoiceConfig):
        groups = {"n_group": moe.choice.groups, "topk_group": moe.choice.kept}
        return {"norm_topk_prob": False, "topk_method": "group_limited_greedy", **groups}
    return {"norm_topk_prob": False, "topk_method": "greedy", "n_group": None, "topk_group": None}


def yarn_weight(mixer: LatentAttentionConfig) -> dict[str, float]:
    """Return `mscale_all_dim` for the mixer's magnitude m: solve m = 0.1·weight·ln(factor) + 1 for the weight."""
    scaling = mixer.rotary.scaling
    if mixer.magnitude == 1 or not isinstance(scaling, YarnScaling) or scaling.factor <= 1:
        return {}
    return {"mscale_all_dim": round((mixer.magnitude - 1) / (0.1 * math.log(scaling.factor)), 12)}


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    return present(config, all_rules(config))


def all_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield from outer_rules(config)
    for i, block in enumerate(config.stack.blocks):
        assert isinstance(block, BlockConfig)
        assert isinstance(block.mixer, LatentAttentionConfig)
        ours, theirs = f"stack.blocks.{i}", f"layers.{i}"
        yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in NORMS["pre"].items()})
        yield from mixer_rules(f"{ours}.mixer", f"{theirs}.self_attn", block.mixer)
        if isinstance(block.ffn, MoEConfig):
            yield from moe_rules(f"{ours}.ffn", f"{theirs}.mlp", block.ffn)
        else:
            yield from gated_rules(f"{ours}.ffn", f"{theirs}.mlp")


def mixer_rules(ours: str, theirs: str, mixer: LatentAttentionConfig) -> Iterator[Rule]:
    low_rank = mixer.query_latent_dim is not None
    names = {
        "latent_norm": "kv_a_layernorm",
        "up": "kv_b_proj",
        "query": "q_b_proj" if low_rank else "q_proj",
        "query_norm": "q_a_layernorm",
        "query_down": "q_a_proj",
        "down": "kv_a_proj_with_mqa",
        "out": "o_proj",
    }
    yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in names.items()})


def moe_rules(ours: str, theirs: str, moe: MoEConfig) -> Iterator[Rule]:
    yield Rule((f"{ours}.router.weight",), (f"{theirs}.gate.weight",))
    yield Rule((f"{ours}.choice.bias",), (f"{theirs}.gate.e_score_correction_bias",))
    for name in ("gate", "up", "down"):
        experts = tuple(f"{theirs}.experts.{e}.{name}_proj.weight" for e in range(moe.experts))
        yield Stacked((f"{ours}.experts.{name}.weight",), experts)
    yield from gated_rules(f"{ours}.shared", f"{theirs}.shared_experts")
