"""How llama.cpp names and lays out what `transformers` has: tables and conversions for reading and writing GGUF."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.configs import Llama3Scaling, RotaryConfig

CLASSES = {"llama": "Llama", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma"}
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
}
"""The architecture of llama.cpp for each model_type."""
PRECISIONS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "q4_k_m")
FALLBACKS = {"Q4_K": "Q5_0", "Q6_K": "Q8_0"}
"""The type of a matrix whose rows are not a multiple of 256, as llama.cpp chooses it."""

OUTER = {"token_embd": "embed_tokens", "output_norm": "norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate",
}
SCALING_FIELDS = tuple(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned"))
EXPERTS = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}


def mixed_type(name: str, layers: int, tied: bool) -> str:
    """The type of a matrix in llama.cpp's mixture Q4_K_M: sensitive matrices have six bits.

    Those are the output table, and the values and the last feed-forward matrix of an eighth of the layers at either
    end and of every third layer between them.
    """
    part = name.removesuffix(".weight").split(".")
    if part[0] == "output" or (tied and part[0] == "token_embd"):
        return "Q6_K"
    if part[0] == "blk" and part[2] in ("attn_v", "ffn_down", "ffn_down_exps"):
        layer, eighth = int(part[1]), layers // 8
        if layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2:
            return "Q6_K"
    return "Q4_K"


def llama3_factors(theta: float, scaling: Llama3Scaling, pairs: int) -> np.ndarray:
    """The number that each frequency is divided by."""
    plain, scaled = (RotaryConfig(theta=theta, scaling=s).frequencies(2 * pairs) for s in (None, scaling))
    return np.asarray(plain) / np.asarray(scaled)


def permute_rotary(array: Any, part: str, hf: Mapping[str, Any], back: bool) -> Any:
    """Reorder the rows of LLaMA's queries and keys, a tensor or a packed matrix.

    llama.cpp rotates pairs of neighbouring rows; `transformers` rotates row i with row i + K/2. `back` undoes it.
    """
    heads = {"attn_q": hf["num_attention_heads"], "attn_k": hf["num_key_value_heads"]}.get(part)
    if heads is None or ARCHITECTURES[hf["model_type"]] != "llama":
        return array
    halves = (heads, -1, 2) if back else (heads, 2, array.shape[0] // heads // 2)
    order = torch.arange(array.shape[0]).unflatten(0, halves).transpose(1, 2).flatten()
    return array[order] if isinstance(array, Tensor) else array.gather(order)


def shift_gain(array: Any, part: str, hf: Mapping[str, Any], by: int) -> Any:
    """Add `by` to a norm's gain: llama.cpp stores Gemma's gains as 1 + γ, `transformers` as γ."""
    return array + by if hf["model_type"] == "gemma" and part.endswith("norm") else array
