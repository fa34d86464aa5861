"""Gemma and the text model of Gemma 3 as `transformers` stores them: LLaMA with scaled embeddings, GEGLU and 1 + γ.

Gemma 2 caps its scores with tanh, which no part here does yet.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from clearhead.configs import (
    AttentionConfig,
    BlockConfig,
    Causal,
    ClassHeadConfig,
    ConfigError,
    GatedFeedForwardConfig,
    LMHeadConfig,
    ModelConfig,
    RotaryConfig,
    SequenceModelConfig,
    StackConfig,
    TokenEmbeddingConfig,
    Window,
)
from clearhead.models.gemma import gemma, gemma3

from .llama import IGNORED, PREFIX, outer_fields, rules
from .rules import activation, context_length, decoder_head, hf_activation, rope_parameters, rotary

__all__ = ["ARCHITECTURES", "IGNORED", "PREFIX", "from_hf", "rules", "to_hf"]

ARCHITECTURES = {
    "gemma": ("GemmaModel", "GemmaForCausalLM", "GemmaForSequenceClassification"),
    "gemma3_text": ("Gemma3TextModel", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    if hf.get("use_bidirectional_attention"):
        raise ConfigError(f"{kind} with use_bidirectional_attention is not supported yet")
    biased = bool(hf.get("attention_bias", False))
    sizes: dict[str, Any] = {
        "dim": hf["hidden_size"],
        "hidden": hf["intermediate_size"],
        "vocabulary": hf["vocab_size"],
        "activation": activation({"gelu": "gelu_new"}.get(named := activation_name(hf), named)),
        "eps": float(hf.get("rms_norm_eps", 1e-6)),
    }
    mixer = AttentionConfig(
        heads=hf["num_attention_heads"],
        kv_heads=hf["num_key_value_heads"],
        head_dim=hf.get("head_dim", 256),
        mask=Causal(),
        qkv_bias=biased,
        out_bias=biased,
        dropout=hf.get("attention_dropout") or 0.0,
    )
    if kind == "gemma":
        config = gemma(layers=hf["num_hidden_layers"], mixer=replace(mixer, rotary=rotary(hf)), **sizes)
    else:
        refuse_capped(hf, mixer)
        turned = rotaries(hf)
        mixers = {
            LOCAL: replace(mixer, mask=Causal() & Window(hf.get("sliding_window") or 4096), rotary=turned[LOCAL]),
            GLOBAL: replace(mixer, rotary=turned[GLOBAL]),
        }
        config = gemma3(mixers=[mixers[name] for name in layer_types(hf)], **sizes)
    return replace(config, head=decoder_head(hf, ARCHITECTURES[kind], bool(hf.get("tie_word_embeddings", True))))


def activation_name(hf: Mapping[str, Any]) -> str:
    """`gelu` in an old file means the tanh form: it was written before the name was settled."""
    return hf.get("hidden_activation") or hf.get("hidden_act") or "gelu_pytorch_tanh"


def refuse_capped(hf: Mapping[str, Any], mixer: AttentionConfig) -> None:
    if hf.get("final_logit_softcapping") or hf.get("attn_logit_softcapping"):
        raise ConfigError("gemma3_text with capped scores or logits is not supported yet")
    if hf.get("query_pre_attn_scalar", 256) != mixer.head_dim:
        raise ConfigError(
            f"gemma3_text with query_pre_attn_scalar {hf.get('query_pre_attn_scalar', 256)} and head_dim "
            f"{mixer.head_dim} has another scale of the scores than 1/√K, which is not supported yet"
        )


def layer_types(hf: Mapping[str, Any]) -> list[str]:
    """Newer files list them; older ones say that every so many-th layer reads everything."""
    every = hf.get("sliding_window_pattern", 6)
    return hf.get("layer_types") or [GLOBAL if (i + 1) % every == 0 else LOCAL for i in range(hf["num_hidden_layers"])]


def rotaries(hf: Mapping[str, Any]) -> dict[str, RotaryConfig]:
    """`rope_parameters` of each kind of layer, or the older fields, whose scaling is for the global layers alone."""
    rope = hf.get("rope_parameters") or {}
    outer = {key: value for key, value in hf.items() if key not in ("rope_parameters", "rope_scaling", "rope_theta")}
    older = {
        LOCAL: {"rope_theta": hf.get("rope_local_base_freq", 1e4)},
        GLOBAL: {"rope_theta": hf.get("rope_theta", 1e6)} | dict(hf.get("rope_scaling") or {}),
    }
    return {name: rotary(outer | {"rope_parameters": older[name] | dict(rope.get(name) or {})}) for name in older}


def to_hf(config: ModelConfig, kind: str) -> dict[str, Any] | None:
    match config:
        case SequenceModelConfig(
            embedding=TokenEmbeddingConfig(vocabulary=vocabulary),
            stack=StackConfig(
                pattern=(
                    BlockConfig(
                        mixer=AttentionConfig(rotary=RotaryConfig() as turned) as mixer,
                        ffn=GatedFeedForwardConfig() as ffn,
                        norm=norm,
                    ),
                    *_,
                )
            ) as stack,
            head=None | LMHeadConfig() | ClassHeadConfig() as head,
        ) if kind == "gemma" or stack.dim % mixer.heads == 0:
            return outer_fields(ARCHITECTURES[kind], stack, vocabulary, head) | {
                "model_type": kind,
                "intermediate_size": ffn.hidden,
                "num_attention_heads": mixer.heads,
                "num_key_value_heads": mixer.kv_heads,
                "head_dim": mixer.head_dim,
                "hidden_act" if kind == "gemma" else "hidden_activation": hf_activation(ffn.activation),
                "rms_norm_eps": norm.eps,
                "max_position_embeddings": context_length(turned, 8192),
                "attention_bias": mixer.qkv_bias,
                "attention_dropout": mixer.dropout,
                "pad_token_id": 0,
                **(
                    {"rope_parameters": rope_parameters(turned)}
                    if kind == "gemma"
                    else layer_fields([block.mixer for block in stack.blocks])
                ),
            }
    return None


def layer_fields(mixers: Iterable[Any]) -> dict[str, Any]:
    """Gemma 3's two kinds of layer. A stack that has more kinds is not Gemma 3's, which the way back shows."""
    mixers = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.rotary is not None]
    kinds = [GLOBAL if mixer.mask.reach is None else LOCAL for mixer in mixers]
    first = dict(reversed([*zip(kinds, mixers, strict=True)]))
    return {
        "layer_types": kinds,
        "sliding_window": first[LOCAL].mask.reach if LOCAL in first else None,
        "query_pre_attn_scalar": mixers[0].head_dim,
        "rope_parameters": {name: rope_parameters(mixer.rotary) for name, mixer in first.items()},
    }
