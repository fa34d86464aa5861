"""Gemma, Gemma 2 and the text model of Gemma 3 as `transformers` stores them.

They are LLaMA with scaled embeddings, GEGLU and gains of 1 + γ. Gemma 2 and 3 have norms inside the branches, windows
in some layers and a scale of the scores. Gemma 2 caps scores and logits with tanh, and Gemma 3 norms queries and keys.
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
    Full,
    GatedFeedForwardConfig,
    HeadConfig,
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
    "gemma2": ("Gemma2Model", "Gemma2ForCausalLM", "Gemma2ForSequenceClassification"),
    "gemma3_text": ("Gemma3TextModel", "Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
}
LOCAL, GLOBAL = "sliding_attention", "full_attention"


def from_hf(hf: Mapping[str, Any]) -> SequenceModelConfig:
    kind = hf["model_type"]
    both_ways = bool(hf.get("use_bidirectional_attention"))  # EmbeddingGemma
    if both_ways and kind != "gemma3_text":
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
        mask=Full() if both_ways else Causal(),
        qkv_bias=biased,
        out_bias=biased,
        dropout=hf.get("attention_dropout") or 0.0,
    )
    if kind == "gemma":
        config = gemma(layers=hf["num_hidden_layers"], mixer=replace(mixer, rotary=rotary(hf)), **sizes)
    else:
        scalar = hf.get("query_pre_attn_scalar", 256)
        mixer = replace(
            mixer,
            scale=None if scalar == mixer.head_dim else float(scalar) ** -0.5,
            softcap=hf.get("attn_logit_softcapping", 50.0 if kind == "gemma2" else None),
        )
        turned = rotaries(hf) if kind == "gemma3_text" else dict.fromkeys((LOCAL, GLOBAL), rotary(hf))
        size = hf.get("sliding_window") or 4096  # in both directions together, if there are two
        window = Window(size // 2 + 1) if both_ways else Causal() & Window(size)
        mixers = {
            LOCAL: replace(mixer, mask=window, rotary=turned[LOCAL]),
            GLOBAL: replace(mixer, rotary=turned[GLOBAL]),
        }
        every = 2 if kind == "gemma2" else 6
        config = gemma3(mixers=[mixers[name] for name in layer_types(hf, every)], normed=kind != "gemma2", **sizes)
    head = decoder_head(hf, ARCHITECTURES[kind], bool(hf.get("tie_word_embeddings", True)))
    if isinstance(head, LMHeadConfig):
        head = replace(head, softcap=hf.get("final_logit_softcapping", 30.0 if kind == "gemma2" else None))
    return replace(config, head=head)


def activation_name(hf: Mapping[str, Any]) -> str:
    """`gelu` in an old file means the tanh form: it was written before the name was settled."""
    return hf.get("hidden_activation") or hf.get("hidden_act") or "gelu_pytorch_tanh"


def layer_types(hf: Mapping[str, Any], every: int) -> list[str]:
    """The kind of each layer. Older files do not list them: every `every`-th layer has no window."""
    every = hf.get("sliding_window_pattern", every)
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
                    else layer_fields(kind, [block.mixer for block in stack.blocks], head)
                ),
            }
    return None


def window_fields(local: AttentionConfig | None, mixer: AttentionConfig) -> dict[str, Any]:
    """The window, which `transformers` counts in both directions together in a model that reads both ways."""
    size = None if local is None else local.mask.reach
    if mixer.mask.causal:
        return {"sliding_window": size}
    return {"sliding_window": 2 * (size - 1) if size else 4096, "use_bidirectional_attention": True}


def layer_fields(kind: str, mixers: Iterable[Any], head: HeadConfig | None) -> dict[str, Any]:
    """The fields of Gemma 2 and 3, which have two kinds of layer. `Family.hf` rejects a stack with more kinds."""
    mixers = [mixer for mixer in mixers if isinstance(mixer, AttentionConfig) and mixer.rotary is not None]
    kinds = [GLOBAL if mixer.mask.reach is None else LOCAL for mixer in mixers]
    first = dict(reversed([*zip(kinds, mixers, strict=True)]))
    rope = {name: rope_parameters(mixer.rotary) for name, mixer in first.items()}
    scale = mixers[0].scale or mixers[0].head_dim ** -0.5
    scalar = scale**-2
    return {
        "layer_types": kinds,
        **window_fields(first.get(LOCAL), mixers[0]),
        "query_pre_attn_scalar": round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar,
        "attn_logit_softcapping": mixers[0].softcap,
        "final_logit_softcapping": head.softcap if isinstance(head, LMHeadConfig) else None,
        "rope_parameters": rope if kind == "gemma3_text" else next(iter(rope.values())),
    }
