"""LLaMA and its kin as `transformers` stores them: mistral, qwen2, qwen3, mixtral."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    ConfigError,
    GatedFeedForwardConfig,
    LMHeadConfig,
    MoEConfig,
    RMSNormConfig,
    SequenceModelConfig,
    Window,
)
from clearhead.configs.stack import FeedConfig
from clearhead.models.llama import decoder

from .rules import Rule, Stacked, activation, both, copies, joined_qkv, rotary

PREFIX = "model."
IGNORED = (r".*rotary_emb\.inv_freq",)


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    window = hf.get("sliding_window") if kind in ("mistral", "mixtral") else None
    if hf.get("use_sliding_window"):
        raise ConfigError(f"{kind} with use_sliding_window mixes window and full layers, which is not read yet")
    eps, biased = float(hf["rms_norm_eps"]), bool(hf.get("attention_bias", False))
    mixer = AttentionConfig(
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads"),
        head_dim=hf.get("head_dim"),
        mask=Causal() & Window(window) if window else Causal(),
        rotary=rotary(hf),
        qk_norm=RMSNormConfig(eps=eps) if kind == "qwen3" else None,
        qkv_bias=kind == "qwen2" or biased,
        out_bias=kind != "qwen2" and biased,
    )
    gated = GatedFeedForwardConfig(
        hidden=hf["intermediate_size"], activation=activation(hf["hidden_act"]), bias=bool(hf.get("mlp_bias", False))
    )
    ffn: FeedConfig = gated
    if kind == "mixtral":
        ffn = MoEConfig(expert=gated, experts=hf["num_local_experts"], active=hf["num_experts_per_tok"])
    return decoder(
        dim=hf["hidden_size"],
        layers=hf["num_hidden_layers"],
        mixer=mixer,
        ffn=ffn,
        vocabulary=hf["vocab_size"],
        eps=eps,
        tied=bool(hf.get("tie_word_embeddings", False)),
    )


def attention(block: Any) -> AttentionConfig:
    assert isinstance(block, BlockConfig)
    assert isinstance(block.mixer, AttentionConfig)
    return block.mixer


def rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield from outer_rules(config)
    for i, block in enumerate(config.stack.blocks):
        ours, theirs = f"stack.blocks.{i}", f"layers.{i}"
        mixer, ffn = attention(block), block.ffn
        yield from norm_rules(ours, theirs)
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
            yield Rule(f"{ours}.ffn.router.weight", (f"{moe}.gate.weight",))
            for name, letter in {"gate": "w1", "down": "w2", "up": "w3"}.items():
                experts = tuple(f"{moe}.experts.{e}.{letter}.weight" for e in range(ffn.experts))
                yield Stacked(f"{ours}.ffn.experts.{name}.weight", experts)
        else:
            assert isinstance(ffn, GatedFeedForwardConfig)
            yield from gated_rules(f"{ours}.ffn", f"{theirs}.mlp", ffn)


def outer_rules(config: SequenceModelConfig) -> Iterator[Rule]:
    yield from copies({"embedding.tokens.weight": "embed_tokens.weight", "stack.final_norm.weight": "norm.weight"})
    if isinstance(config.head, LMHeadConfig) and not config.head.tied:
        yield Rule("head.weight", ("lm_head.weight",))


def norm_rules(ours: str, theirs: str) -> Iterator[Rule]:
    norms = {"mixer_residual.before": "input_layernorm", "ffn_residual.before": "post_attention_layernorm"}
    yield from both({f"{ours}.{mine}": f"{theirs}.{their}" for mine, their in norms.items()}, ("weight",))


def gated_rules(ours: str, theirs: str, ffn: GatedFeedForwardConfig) -> Iterator[Rule]:
    matrices = {f"{ours}.{name}": f"{theirs}.{name}_proj" for name in ("gate", "up", "down")}
    yield from both(matrices, ("weight", "bias") if ffn.bias else ("weight",))
