"""The types of the fields that Clearhead reads from `config.json` and `generation_config.json`.

Every file is checked against this table when it is read, so the code that builds configs meets only these types.
A field that is not in the table may hold anything; `tests/parity/test_fields.py` finds fields that the table lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from clearhead.configs.stack import MAX_BLOCKS
from clearhead.typed_json import check_fields

Count = Annotated[int, Meta(ge=0, le=2**40)]
Id = Annotated[int, Meta(ge=-1, lt=2**31)]  # -1 stands for none in some files
Layers = Annotated[int, Meta(ge=0, le=MAX_BLOCKS)]
Flag = bool | None
Number = float | None
Word = str | None
Words = list[str] | None
Object = dict[str, Any] | None

COUNTS = """
    num_mel_bins max_source_positions max_target_positions max_initial_timestamp_index
    vocab_size num_hidden_layers hidden_size num_attention_heads intermediate_size max_position_embeddings n_positions
    head_dim num_key_value_heads num_local_experts num_experts_per_tok n_embd n_layer n_head n_inner type_vocab_size
    v_head_dim qk_rope_head_dim qk_nope_head_dim patch_size num_channels image_size n_routed_experts n_shared_experts
    n_group topk_group moe_intermediate_size kv_lora_rank q_lora_rank first_k_dense_replace embedding_size d_model
    state_size expand conv_kernel sliding_window sliding_window_pattern num_hidden_groups inner_group_num num_labels
    pooler_output_size encoder_layers decoder_layers encoder_attention_heads decoder_attention_heads encoder_ffn_dim
    decoder_ffn_dim max_new_tokens top_k num_beams min_length min_new_tokens no_repeat_ngram_size
    encoder_no_repeat_ngram_size decoder_vocab_size decoder_sparse_step dim hidden_dim max_window_layers n_heads
    num_experts rotary_dim shared_expert_intermediate_size ffn_dim word_embed_proj_dim num_ln_in_parallel_attn
    num_decoder_layers relative_attention_num_buckets relative_attention_max_distance d_kv d_ff
    local_attention global_attn_every_n_layers n_groups mamba_expand mamba_d_state mamba_d_conv mamba_n_heads
    mamba_n_groups conv_kernel_size attention_chunk_size floor_scale intermediate_size_mlp
    num_kv_heads ffn_hidden_size num_layers num_heads window_size original_max_position_embeddings
"""
NUMBERS = """
    rms_norm_eps layer_norm_eps layer_norm_epsilon attention_dropout hidden_dropout_prob resid_pdrop embd_pdrop
    attn_pdrop dropout attention_probs_dropout_prob activation_dropout rope_theta rope_local_base_freq
    partial_rotary_factor routed_scaling_factor query_pre_attn_scalar final_logit_softcapping attn_logit_softcapping
    temperature top_p min_p repetition_penalty length_penalty classifier_dropout logit_scale
    rotary_emb_base rotary_pct attention_multiplier embedding_multiplier residual_multiplier logits_scaling clip_qkv
    dropout_rate swiglu_limit swiglu_alpha hidden_dropout resid_dropout embed_dropout residual_dropout
    embedding_dropout norm_epsilon norm_eps global_rope_theta local_rope_theta attn_scale
"""
FLAGS = """
    is_multilingual
    tie_word_embeddings attention_bias mlp_bias use_sliding_window use_conv_bias use_bias
    share_encoder_decoder_embeddings scale_embedding scale_attn_weights scale_attn_by_inverse_layer_idx
    rope_interleave qkv_bias norm_topk_prob is_decoder use_bidirectional_attention do_sample
    static_position_embeddings
    qk_layernorm use_parallel_residual use_qk_norm do_layer_norm_before _remove_final_layer_norm enable_bias
    add_cross_attention layer_norm_elementwise_affine apply_residual_connection_post_layernorm new_decoder_architecture
    scale_decoder_outputs multi_query parallel_attn alibi bias use_qkv_bias
    norm_bias decoder_bias classifier_bias mamba_conv_bias mamba_proj_bias
    attn_temperature_tuning relative_attention share_att_key position_biased_input legacy
"""
WORDS = """
    model_type hidden_act hidden_activation activation_function afn topk_method position_embedding_type pooler_act
    problem_type dtype torch_dtype activation feed_forward_proj text_half_of
    classifier_activation pooler_hidden_act norm_rel_ebd
"""
FIELDS: dict[str, Any] = {
    **dict.fromkeys(COUNTS.split(), Count | None),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers"), Layers | None),
    **dict.fromkeys(NUMBERS.split(), Number),
    **dict.fromkeys(FLAGS.split(), Flag),
    **dict.fromkeys(WORDS.split(), Word),
    **dict.fromkeys(("bos_token_id", "pad_token_id", "decoder_start_token_id"), Id | None),
    **dict.fromkeys(("eos_token_id", "forced_eos_token_id"), Id | list[Id] | None),
    **dict.fromkeys(("rope_scaling", "rope_parameters", "text_config", "vision_config"), Object),
    "architectures": Words,
    "mlp_only_layers": list[int] | None,
    "no_rope_layers": list[int] | None,
    "no_rope_layer_interval": Annotated[int, Meta(ge=1)] | None,
    "layer_types": Words,
    "attention_layers": Words,
    "attention_types": list[tuple[list[str], Layers]] | None,
    "auto_map": Object,
    "quantization_config": Object,
    "id2label": dict[str, str | int] | None,
    "label2id": dict[str, int] | None,
    **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens"), list[Id] | None),
    "bad_words_ids": list[list[Id]] | None,
    "early_stopping": bool | str | None,
    **dict.fromkeys(("time_step_rank", "mamba_dt_rank", "mamba_d_head"), Count | str | None),
    **dict.fromkeys(("attn_layer_period", "expert_layer_period"), Annotated[int, Meta(ge=1)] | None),
    **dict.fromkeys(("attn_layer_offset", "expert_layer_offset"), Layers | None),
    **dict.fromkeys(("attn_layer_indices", "moe_layers"), list[int] | None),
    "interleave_moe_layer_step": Annotated[int, Meta(ge=1)] | None,
    **dict.fromkeys(("position_buckets", "max_relative_positions"), Id | None),
    "pos_att_type": str | list[str] | None,
    "time_step_limit": Annotated[list[float | dict[str, str] | None], Meta(min_length=2, max_length=2)] | None,
}
ROPE_NUMBERS = """
    factor rope_theta mscale mscale_all_dim low_freq_factor high_freq_factor partial_rotary_factor beta_slow beta_fast
    attention_factor original_max_position_embeddings
"""
ROPE_FIELDS: dict[str, Any] = {
    **dict.fromkeys(ROPE_NUMBERS.split(), Number),
    **dict.fromkeys(("rope_type", "type"), Word),
    "truncate": Flag,
    **dict.fromkeys(("short_factor", "long_factor"), list[float] | None),
}


def check_hf(data: Mapping[str, Any], name: str) -> None:
    """Check a `config.json`, or a `generation_config.json`, called `name` in messages."""
    check_fields(data, FIELDS, name)
    for rope in (data.get("rope_scaling"), data.get("rope_parameters")):
        if rope:
            check_fields(rope, ROPE_FIELDS, f"{name}: rotary")
            for key, inner in rope.items():  # one set of values for each kind of layer
                if isinstance(inner, dict):
                    check_fields(inner, ROPE_FIELDS, f"{name}: rotary {key}")
