"""Jamba and Bamba as `transformers` stores them: state spaces in most layers, attention in some.

Jamba has Mamba with normed steps, attention without positions, and experts in some layers. Bamba has Mamba-2 and
rotary attention.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    ClassHeadConfig,
    GatedFeedForwardConfig,
    LMHeadConfig,
    Mamba2Config,
    MambaConfig,
    MixerConfig,
    ModelConfig,
    MoEConfig,
    RMSNormConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)

from .llama import gated_rules, outer_fields
from .mamba import mamba2_mixer, mixer_rules
from .rules import (
    Rule,
    Stacked,
    activation,
    both,
    context_length,
    decoder_head,
    decoder_head_rules,
    hf_activation,
    joined_qkv,
    present,
    rope_parameters,
    rotary,
)

PREFIX = "model."
IGNORED = (r"lm_head\.weight",)
ARCHITECTURES = {
    "jamba": ("JambaModel", "JambaForCausalLM", "JambaForSequenceClassification"),
    "bamba": ("BambaModel", "BambaForCausalLM"),
}


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind, count = hf["model_type"], hf["num_hidden_layers"]
    norm = RMSNormConfig(eps=float(hf.get("rms_norm_eps", 1e-6 if kind == "jamba" else 1e-5)))
    biased = kind == "bamba" and bool(hf.get("attention_bias", False))
    attention = AttentionConfig(
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads"),
        mask=Causal(),
        rotary=rotary(hf, partial=True) if kind == "bamba" else None,
        qkv_bias=biased,
        out_bias=biased,
        dropout=hf.get("attention_dropout") or 0.0,
    )
    recurrent = jamba_mixer(hf, norm) if kind == "jamba" else bamba_mixer(hf)
    gated = GatedFeedForwardConfig(
        hidden=hf["intermediate_size"],
        activation=activation(hf.get("hidden_act", "silu")),
        bias=kind == "bamba" and bool(hf.get("mlp_bias", False)),
    )
    experts = (
        MoEConfig(
            expert=gated, experts=hf.get("num_experts", 16), active=hf.get("num_experts_per_tok", 2), normalised=False
        )
        if kind == "jamba" and hf.get("num_experts", 16) > 1
        else gated
    )
    attends, sparse = hf.get("attn_layer_indices") or [], range(0)
    if kind == "jamba":
        attends = range(hf.get("attn_layer_offset", 4), count, hf.get("attn_layer_period", 8))
        sparse = range(hf.get("expert_layer_offset", 1), count, hf.get("expert_layer_period", 2))
    blocks = tuple(
        BlockConfig(mixer=attention if i in attends else recurrent, ffn=experts if i in sparse else gated, norm=norm)
        for i in range(count)
    )
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=hf["vocab_size"]),
        stack=StackConfig(dim=hf["hidden_size"], pattern=blocks, repeats=1, final_norm=norm),
        head=decoder_head(hf, ARCHITECTURES[kind], bool(hf.get("tie_word_embeddings", False))),
    )


def jamba_mixer(hf: Mapping[str, Any], norm: RMSNormConfig) -> MambaConfig:
    rank = hf.get("mamba_dt_rank", "auto")
    return MambaConfig(
        inner=hf.get("mamba_expand", 2) * hf["hidden_size"],
        state_dim=hf.get("mamba_d_state", 16),
        conv=hf.get("mamba_d_conv", 4),
        rank=None if rank == "auto" else rank,
        conv_bias=bool(hf.get("mamba_conv_bias", True)),
        bias=bool(hf.get("mamba_proj_bias", False)),
        select_norm=norm,
    )


def bamba_mixer(hf: Mapping[str, Any]) -> Mamba2Config:
    heads, width = hf.get("mamba_n_heads", 128), hf.get("mamba_d_head", "auto")
    inner = hf.get("mamba_expand", 2) * hf["hidden_size"]
    return mamba2_mixer(
        {
            "num_heads": heads,
            "head_dim": inner // heads if width == "auto" else width,
            "n_groups": hf.get("mamba_n_groups", 1),
            "state_size": hf.get("mamba_d_state", 256),
            "conv_kernel": hf.get("mamba_d_conv", 4),
            "use_conv_bias": hf.get("mamba_conv_bias", True),
            "use_bias": hf.get("mamba_proj_bias", False),
            "layer_norm_epsilon": hf.get("rms_norm_eps", 1e-5),
            "time_step_limit": hf.get("time_step_limit"),
        }
    )


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig() as embedding,
            stack=StackConfig() as stack,
            head=None | LMHeadConfig() | ClassHeadConfig() as head,
        ):
            blocks = [block for block in stack.blocks if isinstance(block, BlockConfig)]
            attends = {i: b.mixer for i, b in enumerate(blocks) if isinstance(b.mixer, AttentionConfig)}
            kinds = MambaConfig if kind == "jamba" else Mamba2Config
            recurrent = next((b.mixer for b in blocks if isinstance(b.mixer, kinds)), None)
            sparse = {i: b.ffn for i, b in enumerate(blocks) if isinstance(b.ffn, MoEConfig)}
            gated = next((b.ffn for b in blocks if isinstance(b.ffn, GatedFeedForwardConfig)), None)
            if gated is None and sparse and isinstance(expert := next(iter(sparse.values())).expert, type(gated)):
                gated = expert
            known = ARCHITECTURES[kind]
            if gated is None or recurrent is None or not blocks or len(blocks) != len(stack.blocks):
                return None
            if not attends or (isinstance(head, ClassHeadConfig) and len(known) < 3):
                return None
            attention = next(iter(attends.values()))
            own = (
                jamba_fields(recurrent, [*attends], sparse, len(blocks))
                if isinstance(recurrent, MambaConfig)
                else (bamba_fields(recurrent, attention, gated, [*attends]))
            )
            return (
                outer_fields(known, stack, embedding.vocabulary, head)
                | own
                | {
                    "model_type": kind,
                    "num_attention_heads": attention.heads,
                    "num_key_value_heads": attention.kv_heads,
                    "attention_dropout": attention.dropout,
                    "intermediate_size": gated.hidden,
                    "hidden_act": hf_activation(gated.activation),
                    "rms_norm_eps": blocks[0].norm.eps,
                    "mamba_d_state": recurrent.state_dim,
                    "mamba_d_conv": recurrent.conv,
                    "mamba_expand": (recurrent.inner or 0) // stack.dim,
                    "mamba_conv_bias": recurrent.conv_bias,
                    "mamba_proj_bias": recurrent.bias,
                    "pad_token_id": None,
                }
            )
    return None


def jamba_fields(
    recurrent: MambaConfig, attends: Sequence[int], sparse: Mapping[int, MoEConfig], count: int
) -> dict[str, Any]:
    experts = next(iter(sparse.values()), None)
    attention, expert = regular(attends, count), regular([*sparse], count)
    return {
        "mamba_dt_rank": recurrent.rank,
        "attn_layer_period": attention[0],
        "attn_layer_offset": attention[1],
        "expert_layer_period": expert[0],
        "expert_layer_offset": expert[1],
        "num_experts": 1 if experts is None else experts.experts,
        "num_experts_per_tok": 1 if experts is None else experts.active,
    }


def bamba_fields(
    recurrent: Mamba2Config, attention: AttentionConfig, gated: GatedFeedForwardConfig, attends: Sequence[int]
) -> dict[str, Any]:
    turned = attention.rotary if isinstance(attention.rotary, RotaryConfig) else RotaryConfig()
    return {
        "attn_layer_indices": [*attends],
        "mamba_n_heads": recurrent.heads,
        "mamba_d_head": recurrent.head_dim,
        "mamba_n_groups": recurrent.groups,
        "attention_bias": attention.qkv_bias,
        "mlp_bias": gated.bias,
        "rope_parameters": {"partial_rotary_factor": 1.0} | rope_parameters(turned, attention.head_dim),
        "max_position_embeddings": context_length(turned),
    }


def regular(places: Sequence[int], count: int) -> tuple[int, int]:
    """Period and offset of places that are as far apart as each other. `Family.hf` rejects what they do not fit."""
    if not places:
        return count + 1, count
    return (places[1] - places[0] if len(places) > 1 else max(count, places[0] + 1)), places[0]


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    return present(config, all_rules(config))


def all_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield Rule(("embedding.tokens.weight",), ("embed_tokens.weight",))
    yield from both({"stack.final_norm": "final_layernorm"})
    for i, block in enumerate(config.stack.blocks):
        ours, theirs = f"stack.blocks.{i}", f"layers.{i}"
        norms = {"mixer_residual.before": "input_layernorm", "ffn_residual.before": "pre_ff_layernorm"}
        yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in norms.items()})
        yield from hybrid_mixer_rules(f"{ours}.mixer", theirs, block.mixer, config.stack.dim)
        if isinstance(block.ffn, MoEConfig):
            yield Rule((f"{ours}.ffn.router.weight",), (f"{theirs}.feed_forward.router.weight",))
            for name in ("gate", "up", "down"):
                each = (f"{theirs}.feed_forward.experts.{e}.{name}_proj.weight" for e in range(block.ffn.experts))
                yield Stacked((f"{ours}.ffn.experts.{name}.weight",), tuple(each))
        else:
            yield from gated_rules(f"{ours}.ffn", f"{theirs}.feed_forward")
    yield from decoder_head_rules(config.head)


def hybrid_mixer_rules(ours: str, theirs: str, mixer: MixerConfig, dim: int) -> Iterator[Rule]:
    """Attention under `self_attn`, state spaces under `mamba`."""
    if isinstance(mixer, AttentionConfig):
        yield from joined_qkv(f"{ours}.qkv", tuple(f"{theirs}.self_attn.{name}_proj" for name in "qkv"), mixer, dim)
        yield from both({f"{ours}.out": f"{theirs}.self_attn.o_proj"})
    else:
        yield from mixer_rules(ours, f"{theirs}.mamba", mixer)
