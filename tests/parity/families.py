"""A tiny model of each family of `transformers` that Clearhead loads, with odd settings. A new family is a line."""

from __future__ import annotations

from typing import Any

V = 61
SIZES: dict[str, Any] = {
    "hidden_size": 36,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {**SIZES, "head_dim": 8}
MULTI = {key: value for key, value in SIZES.items() if key != "num_key_value_heads"}
PLAIN = {key: value for key, value in MULTI.items() if key != "intermediate_size"}
MOE = {"moe_intermediate_size": 12, "num_experts": 5, "num_experts_per_tok": 2}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 500.0,
    "short_factor": [1.0, 1.5, 2.0],
    "long_factor": [2.0, 5.0, 9.0],
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "truncate": False,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}

LLAMA4 = HEADS | {
    "attention_chunk_size": 4,
    "no_rope_layers": [1, 0, 1],
    "moe_layers": [0, 1],
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size_mlp": 44,
    "floor_scale": 3,
    "attn_scale": 0.4,
}


def config_class(name: str, head: str) -> str:
    """The config of a class of `transformers`; Llama 4's language model has the config of its text half."""
    return "Llama4TextConfig" if (name, head) == ("Llama4", "ForCausalLM") else f"{name}Config"


# name: (the classes' common name, the head, the fields)
DECODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama, dynamic": ("Llama", "ForCausalLM", {**HEADS, "max_position_embeddings": 7, "rope_parameters": DYNAMIC}),
    "mistral, no window": ("Mistral", "ForCausalLM", HEADS | {"sliding_window": None}),
    "phi3, short": (
        "Phi3",
        "ForCausalLM",
        SIZES | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "phi3, long": ("Phi3", "ForCausalLM", SIZES | {"rope_parameters": LONGROPE, "original_max_position_embeddings": 8}),
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", SIZES | MOE | {"shared_expert_intermediate_size": 20}),
    "qwen2_moe, dense layers": (
        "Qwen2Moe",
        "ForCausalLM",
        SIZES
        | MOE
        | {
            "shared_expert_intermediate_size": 20,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
        },
    ),
    "qwen3_moe, every other": ("Qwen3Moe", "ForCausalLM", HEADS | MOE | {"decoder_sparse_step": 2}),
    "granite": (
        "Granite",
        "ForCausalLM",
        SIZES
        | {
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.4,
            "logits_scaling": 2.5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "olmo": ("Olmo", "ForCausalLM", SIZES | {"clip_qkv": 0.7}),
    "gpt_oss": (
        "GptOss",
        "ForCausalLM",
        HEADS
        | {
            "num_local_experts": 5,
            "num_experts_per_tok": 2,
            "sliding_window": 5,
            "swiglu_limit": 0.6,
            "rope_parameters": YARN,
        },
    ),
    "llama4": ("Llama4", "ForCausalLM", LLAMA4),
    "opt": ("OPT", "ForCausalLM", PLAIN | {"ffn_dim": 41}),
    "opt, post": ("OPT", "ForCausalLM", PLAIN | {"ffn_dim": 41, "do_layer_norm_before": False, "enable_bias": False}),
    "opt, 350m": (
        "OPT",
        "ForCausalLM",
        PLAIN | {"ffn_dim": 41, "do_layer_norm_before": False, "word_embed_proj_dim": 14},
    ),
    "bloom": (
        "Bloom",
        "ForCausalLM",
        {"hidden_size": 36, "n_layer": 3, "n_head": 6, "vocab_size": V, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "falcon, 7B": ("Falcon", "ForCausalLM", PLAIN),
    "falcon, 40B": ("Falcon", "ForCausalLM", PLAIN | {"new_decoder_architecture": True, "num_kv_heads": 2}),
    "falcon, 11B": (
        "Falcon",
        "ForCausalLM",
        PLAIN
        | {
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "ffn_hidden_size": 41,
        },
    ),
    "falcon, RW": (
        "Falcon",
        "ForCausalLM",
        PLAIN | {"alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
    ),
    "gpt_neo": (
        "GPTNeo",
        "ForCausalLM",
        {
            "hidden_size": 36,
            "num_layers": 3,
            "num_heads": 6,
            "attention_types": [[["global", "local", "local"], 1]],
            "window_size": 4,
            "vocab_size": V,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
    ),
    "starcoder2": ("Starcoder2", "ForCausalLM", SIZES | {"sliding_window": 5, "norm_epsilon": 1e-3}),
    "phi, normed": ("Phi", "ForCausalLM", SIZES | {"qk_layernorm": True, "partial_rotary_factor": 0.4}),
    "stablelm, parallel, normed": (
        "StableLm",
        "ForCausalLM",
        SIZES
        | {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True, "partial_rotary_factor": 0.7},
    ),
    "mamba2": (
        "Mamba2",
        "ForCausalLM",
        PLAIN | {"num_heads": 6, "head_dim": 12, "n_groups": 2, "state_size": 7, "conv_kernel": 3, "chunk_size": 4},
    ),
    "mamba2, biased": (
        "Mamba2",
        "ForCausalLM",
        PLAIN
        | {"num_heads": 8, "head_dim": 9, "n_groups": 1, "use_bias": True, "use_conv_bias": False}
        | {"tie_word_embeddings": True, "chunk_size": 16},
    ),
    "jamba": (
        "Jamba",
        "ForCausalLM",
        SIZES
        | {"num_hidden_layers": 4, "attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5}
        | {"mamba_d_state": 7, "mamba_d_conv": 3, "mamba_dt_rank": 5},
    ),
    "bamba": (
        "Bamba",
        "ForCausalLM",
        SIZES
        | {"attn_layer_indices": [1], "mamba_n_heads": 6, "mamba_d_state": 7, "mamba_n_groups": 2, "mamba_d_conv": 3}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.7}}
        | {"mamba_chunk_size": 4, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True},
    ),
    "cohere, normed": ("Cohere", "ForCausalLM", SIZES | {"use_qk_norm": True}),
    "deepseek_v2, groups": (
        "DeepseekV2",
        "ForCausalLM",
        {
            **SIZES,
            "hidden_size": 40,
            "num_attention_heads": 5,
            "num_key_value_heads": 5,
            "moe_intermediate_size": 12,
            "n_routed_experts": 12,
            "n_shared_experts": 2,
            "num_experts_per_tok": 3,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 18,
            "q_lora_rank": None,
            "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 10,
            "v_head_dim": 13,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
        },
    ),
}

DEBERTA = MULTI | {
    "relative_attention": True,
    "pos_att_type": "p2c|c2p",
    "share_att_key": True,
    "position_buckets": 6,
    "max_relative_positions": -1,
    "max_position_embeddings": 16,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
    "num_labels": 5,
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "modernbert": (
        "ModernBert",
        "ForMaskedLM",
        MULTI | {"num_hidden_layers": 4, "local_attention": 6, "global_attn_every_n_layers": 3, "norm_eps": 1e-3},
    ),
    **{
        f"deberta-v3, {head}": ("DebertaV2", head, DEBERTA)
        for head in ("ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")
    },
    "deberta-v2, own matrices": (
        "DebertaV2",
        "ForMaskedLM",
        DEBERTA
        | {"share_att_key": False, "pos_att_type": ["c2p"], "position_buckets": -1, "max_relative_positions": 5}
        | {"norm_rel_ebd": "none", "position_biased_input": True, "type_vocab_size": 2},
    ),
    "modernbert, biased": (
        "ModernBert",
        "ForMaskedLM",
        MULTI
        | {
            "local_attention": 5,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "hidden_activation": "silu",
            "classifier_activation": "relu",
            **dict.fromkeys(("norm_bias", "attention_bias", "mlp_bias", "classifier_bias"), True),
        },
    ),
}

SIDES: dict[str, Any] = {
    "d_model": 28,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 7,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 41,
    "decoder_ffn_dim": 37,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "scale_embedding": True,
}
T5: dict[str, Any] = {
    "vocab_size": V,
    "d_model": 28,
    "d_kv": 5,
    "d_ff": 41,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "num_heads": 6,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 7,
    "pad_token_id": 0,
    "decoder_start_token_id": 0,
}
END = {"pad_token_id": 60, "decoder_start_token_id": 60, "eos_token_id": 0, "forced_eos_token_id": 0}

TRANSLATORS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "t5": ("T5", "ForConditionalGeneration", T5),
    "flan-t5": (
        "T5",
        "ForConditionalGeneration",
        T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    ),
    "pegasus": ("Pegasus", "ForConditionalGeneration", SIDES | {"activation_function": "relu"}),
    "m2m_100": ("M2M100", "ForConditionalGeneration", SIDES),
    "bart": ("Bart", "ForConditionalGeneration", SIDES | {"scale_embedding": False}),
    "mbart": ("MBart", "ForConditionalGeneration", SIDES | {"activation_function": "relu"}),
    "marian, two vocabularies": (
        "Marian",
        "MTModel",
        SIDES | END | {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": V},
    ),
}

EMBEDDING_GEMMA = HEADS | {
    "sliding_window": 6,
    "query_pre_attn_scalar": 5,
    "use_bidirectional_attention": True,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

TINY_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 36}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
MROPE = {"rope_type": "default", "rope_theta": 500.0, "mrope_section": [1, 1, 1]}

# the whole model's class, the text half's fields, the image half's
MULTIMODAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3": (
        HEADS
        | {
            "sliding_window": 5,
            "query_pre_attn_scalar": 5,
            "layer_types": ["sliding_attention"] * 2 + ["full_attention"],
        },
        TINY_VISION | {"image_size": 8, "patch_size": 4},
    ),
    "Qwen2VL": (
        SIZES | {"rope_parameters": MROPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        {"depth": 1, "embed_dim": 16, "hidden_size": 36, "mlp_ratio": 1, "num_heads": 2, "patch_size": 4},
    ),
    "Qwen2_5_VL": (SIZES | {"rope_parameters": MROPE}, QWEN_VISION | {"patch_size": 4}),
    "Qwen3VL": (
        HEADS | {"rope_parameters": MROPE | {"mrope_section": [2, 1, 1], "mrope_interleaved": True}},
        QWEN_VISION | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "Llama4": (
        LLAMA4 | {"use_qk_norm": False, "rope_parameters": LLAMA3},
        TINY_VISION
        | {"image_size": 8, "patch_size": 4, "vision_output_dim": 16, "projector_input_dim": 16}
        | {"projector_output_dim": 16, "vision_feature_layer": -1},
    ),
    "Mistral3": (
        HEADS | {"model_type": "mistral", "sliding_window": 5},
        TINY_VISION | {"head_dim": 8, "model_type": "pixtral"},
    ),
}

WHISPER: dict[str, tuple[str, str, dict[str, Any]]] = {
    "whisper": (
        "Whisper",
        "ForConditionalGeneration",
        {
            **{
                name: value
                for name, value in SIDES.items()
                if name not in ("scale_embedding", "max_position_embeddings")
            },
            "num_mel_bins": 9,
            "max_source_positions": 23,
            "max_target_positions": 30,
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        },
    ),
}
