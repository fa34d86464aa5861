"""Decoders whose attention and feed-forward layer read the same input: GPT-NeoX, GPT-J, Phi and Cohere."""

from collections.abc import Iterator, Mapping
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    FeedForwardConfig,
    GatedFeedForwardConfig,
    HeadwiseNormConfig,
    LayerNormConfig,
    LMHeadConfig,
    ModelConfig,
    ParallelBlockConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
)
from clearhead.configs.stack import FeedConfig

from .rules import (
    GroupedRows,
    Rule,
    activation,
    architecture,
    both,
    context_length,
    hf_activation,
    joined_qkv,
    rope_parameters,
    rotary,
)

ARCHITECTURES = {
    "gpt_neox": ("GPTNeoXModel", "GPTNeoXForCausalLM"),
    "gptj": ("GPTJModel", "GPTJForCausalLM"),
    "phi": ("PhiModel", "PhiForCausalLM"),
    "cohere": ("CohereModel", "CohereForCausalLM"),
}
PREFIX = "model."
PREFIXES = {"gpt_neox": "gpt_neox.", "gptj": "transformer."}
IGNORED = (
    r".*rotary_emb\.inv_freq",
    r"layers\.\d+\.attention\.(bias|masked_bias)",
    r"h\.\d+\.attn\.(bias|masked_bias)",
    r"(lm_head|embed_out)\.weight",
)


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    block, dim = {"gpt_neox": neox_block, "gptj": gptj_block, "phi": phi_block, "cohere": cohere_block}[kind](hf)
    layers = hf["n_layer"] if kind == "gptj" else hf["num_hidden_layers"]
    tied = bool(hf.get("tie_word_embeddings", kind == "cohere"))
    head = None
    if architecture(hf, ARCHITECTURES[kind][1]) == ARCHITECTURES[kind][1]:
        scale = float(hf.get("logit_scale", 0.0625)) if kind == "cohere" else 1.0
        head = LMHeadConfig(vocabulary=hf["vocab_size"], tied=tied, bias=kind in ("gptj", "phi"), scale=scale)
    return SequenceModelConfig(
        embedding=TokenEmbeddingConfig(vocabulary=hf["vocab_size"]),
        stack=StackConfig(dim=dim, pattern=(block,), repeats=layers, final_norm=block.norm),
        head=head,
    )


def neox_block(hf: Mapping[str, Any]) -> tuple[BlockConfig | ParallelBlockConfig, int]:
    norm, dim = LayerNormConfig(eps=float(hf.get("layer_norm_eps", 1e-5))), hf["hidden_size"]
    biased = bool(hf.get("attention_bias", True))
    share = hf.get("rotary_pct", 0.25)
    mixer = AttentionConfig(
        heads=hf["num_attention_heads"],
        mask=Causal(),
        rotary=rotary(
            {"partial_rotary_factor": share, "rope_theta": hf.get("rotary_emb_base", 10000), **hf}, partial=True
        ),
        qkv_bias=biased,
        out_bias=biased,
    )
    ffn = FeedForwardConfig(hidden=hf["intermediate_size"], activation=activation(hf.get("hidden_act", "gelu")))
    if hf.get("use_parallel_residual", True):
        return ParallelBlockConfig(mixer=mixer, ffn=ffn, norm=norm, ffn_norm=norm), dim
    return BlockConfig(mixer=mixer, ffn=ffn, norm=norm), dim


def gptj_block(hf: Mapping[str, Any]) -> tuple[ParallelBlockConfig, int]:
    dim = hf["n_embd"]
    mixer = AttentionConfig(
        heads=hf["n_head"], mask=Causal(), rotary=RotaryConfig(layout="interleaved", dim=hf.get("rotary_dim") or None)
    )
    act = activation(hf.get("activation_function", "gelu_new"))
    ffn = FeedForwardConfig(hidden=hf.get("n_inner") or 4 * dim, activation=act)
    norm = LayerNormConfig(eps=float(hf.get("layer_norm_epsilon", 1e-5)))
    return ParallelBlockConfig(mixer=mixer, ffn=ffn, norm=norm), dim


def phi_block(hf: Mapping[str, Any]) -> tuple[ParallelBlockConfig, int]:
    eps = float(hf.get("layer_norm_eps", 1e-5))
    mixer = AttentionConfig(
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads"),
        mask=Causal(),
        rotary=rotary({"partial_rotary_factor": 0.5, **hf}, partial=True),
        qk_norm=LayerNormConfig(eps=eps) if hf.get("qk_layernorm") else None,
        qkv_bias=True,
        out_bias=True,
    )
    ffn = FeedForwardConfig(hidden=hf["intermediate_size"], activation=activation(hf.get("hidden_act", "gelu_new")))
    return ParallelBlockConfig(mixer=mixer, ffn=ffn, norm=LayerNormConfig(eps=eps)), hf["hidden_size"]


def cohere_block(hf: Mapping[str, Any]) -> tuple[ParallelBlockConfig, int]:
    eps = float(hf.get("layer_norm_eps", 1e-5))
    width = hf.get("head_dim") or hf["hidden_size"] // hf["num_attention_heads"]
    biased = bool(hf.get("attention_bias", False))
    mixer = AttentionConfig(
        heads=hf["num_attention_heads"],
        kv_heads=hf.get("num_key_value_heads"),
        mask=Causal(),
        head_dim=width,
        rotary=rotary(hf, "interleaved"),
        qk_norm=HeadwiseNormConfig(width=width, eps=eps) if hf.get("use_qk_norm") else None,
        qkv_bias=biased,
        out_bias=biased,
    )
    ffn = GatedFeedForwardConfig(hidden=hf["intermediate_size"], activation=activation(hf.get("hidden_act", "silu")))
    norm = LayerNormConfig(eps=eps, bias=False)
    return ParallelBlockConfig(mixer=mixer, ffn=ffn, norm=norm), hf["hidden_size"]


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(vocabulary=vocabulary),
            stack=StackConfig(
                pattern=(
                    ParallelBlockConfig(
                        mixer=AttentionConfig(rotary=RotaryConfig() as turned) as mixer, ffn=ffn, norm=norm
                    )
                    | BlockConfig(mixer=AttentionConfig(rotary=RotaryConfig() as turned) as mixer, ffn=ffn, norm=norm),
                    *_,
                )
            ) as stack,
            head=None | LMHeadConfig() as head,
        ) if isinstance(ffn, GatedFeedForwardConfig if kind == "cohere" else FeedForwardConfig):
            fields = {
                "architectures": [ARCHITECTURES[kind][head is not None]],
                "model_type": kind,
                "vocab_size": vocabulary,
                "tie_word_embeddings": isinstance(head, LMHeadConfig) and head.tied,
                "bos_token_id": None,
                "eos_token_id": None,
            }
            if kind == "gptj":
                return fields | gptj_fields(stack, mixer, ffn, norm.eps, turned)
            return fields | {
                "hidden_size": stack.dim,
                "num_hidden_layers": len(stack.blocks),
                "num_attention_heads": mixer.heads,
                "intermediate_size": ffn.hidden,
                "hidden_act": hf_activation(ffn.activation),
                "layer_norm_eps": norm.eps,
                "rope_parameters": rope_parameters(turned, mixer.head_dim),
                "max_position_embeddings": context_length(turned),
                **own_fields(kind, config, mixer),
            }
    return None


def gptj_fields(
    stack: StackConfig, mixer: AttentionConfig, ffn: FeedConfig, eps: float, turned: RotaryConfig
) -> dict[str, Any]:
    assert isinstance(ffn, FeedForwardConfig)
    return {
        "n_embd": stack.dim,
        "n_layer": len(stack.blocks),
        "n_head": mixer.heads,
        "n_inner": ffn.hidden,
        "n_positions": 2048,
        "rotary_dim": turned.dim,
        "activation_function": hf_activation(ffn.activation),
        "layer_norm_epsilon": eps,
    }


def own_fields(kind: str, config: SequenceModelConfig, mixer: AttentionConfig) -> dict[str, Any]:
    if kind == "gpt_neox":
        parallel = isinstance(config.stack.pattern[0], ParallelBlockConfig)
        turned = mixer.rotary.width(mixer.head_dim or 0) if isinstance(mixer.rotary, RotaryConfig) else 0
        share = turned / (mixer.head_dim or 1)
        return {"use_parallel_residual": parallel, "attention_bias": mixer.qkv_bias, "rotary_pct": share}
    fields: dict[str, Any] = {"num_key_value_heads": mixer.kv_heads}
    fields["use_qk_norm" if kind == "cohere" else "qk_layernorm"] = mixer.qk_norm is not None
    if kind == "cohere":
        fields["attention_bias"] = mixer.qkv_bias
        if isinstance(config.head, LMHeadConfig):
            fields["logit_scale"] = config.head.scale
    return fields


NAMES = {
    "gpt_neox": {
        "layer": "layers.{}",
        "tokens": "embed_in",
        "final": "final_layer_norm",
        "norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "out": "attention.dense",
        "up": "mlp.dense_h_to_4h",
        "down": "mlp.dense_4h_to_h",
    },
    "gptj": {
        "layer": "h.{}",
        "tokens": "wte",
        "final": "ln_f",
        "norm": "ln_1",
        "qkv": "attn.{}_proj",
        "out": "attn.out_proj",
        "up": "mlp.fc_in",
        "down": "mlp.fc_out",
    },
    "phi": {
        "layer": "layers.{}",
        "tokens": "embed_tokens",
        "final": "final_layernorm",
        "norm": "input_layernorm",
        "qkv": "self_attn.{}_proj",
        "out": "self_attn.dense",
        "up": "mlp.fc1",
        "down": "mlp.fc2",
    },
    "cohere": {
        "layer": "layers.{}",
        "tokens": "embed_tokens",
        "final": "norm",
        "norm": "input_layernorm",
        "qkv": "self_attn.{}_proj",
        "out": "self_attn.o_proj",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    },
}


def rules(config: SequenceModelConfig, kind: str) -> Iterator[Rule]:
    names = NAMES[kind]
    norms = ("weight",) if kind == "cohere" else ("weight", "bias")
    yield Rule(("embedding.tokens.weight",), (f"{names['tokens']}.weight",))
    yield from both({"stack.final_norm": names["final"]}, norms)
    for i, block in enumerate(config.stack.blocks):
        mixer, ffn = block.mixer, block.ffn
        assert isinstance(mixer, AttentionConfig)
        assert isinstance(ffn, FeedForwardConfig | GatedFeedForwardConfig)
        ours, theirs = f"stack.blocks.{i}", names["layer"].format(i)
        if kind == "gpt_neox":
            parallel = isinstance(block, ParallelBlockConfig)
            first, second = ("norm", "ffn_norm") if parallel else ("mixer_residual.before", "ffn_residual.before")
            yield from both({f"{ours}.{first}": f"{theirs}.{names['norm']}"})
            yield from both({f"{ours}.{second}": f"{theirs}.{names['ffn_norm']}"})
            for suffix in ("weight", "bias") if mixer.qkv_bias else ("weight",):
                joined = (f"{theirs}.attention.query_key_value.{suffix}",)
                yield GroupedRows((f"{ours}.mixer.qkv.{suffix}",), joined, mixer.heads, 1)
        else:
            yield from both({f"{ours}.norm": f"{theirs}.{names['norm']}"}, norms)
            parts = tuple(f"{theirs}.{names['qkv'].format(letter)}" for letter in "qkv")
            yield from joined_qkv(f"{ours}.mixer.qkv", parts, mixer, config.stack.dim)
        if mixer.qk_norm is not None:
            their = ("q_layernorm", "k_layernorm") if kind == "phi" else ("q_norm", "k_norm")
            pairs = zip(("query_norm", "key_norm"), their, strict=True)
            yield from both({f"{ours}.mixer.{a}": f"{theirs}.self_attn.{b}" for a, b in pairs}, norms)
        suffixes = ("weight", "bias") if mixer.out_bias else ("weight",)
        yield from both({f"{ours}.mixer.out": f"{theirs}.{names['out']}"}, suffixes)
        matrices = {f"{ours}.ffn.{name}": f"{theirs}.{names[name]}" for name in ffn.matrices(config.stack.dim)}
        yield from both(matrices, ("weight", "bias") if ffn.bias else ("weight",))
    if isinstance(config.head, LMHeadConfig):
        if not config.head.tied:
            yield Rule(("head.weight",), ("embed_out.weight" if kind == "gpt_neox" else "lm_head.weight",))
        if config.head.bias:
            yield Rule(("head.bias",), ("lm_head.bias",))
