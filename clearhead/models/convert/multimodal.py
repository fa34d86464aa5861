"""Folders of models that read images and text: their text half, as a family of its own.

The text half is a decoder that `transformers` also has alone. `config.json` keeps its fields in `text_config`, and the
names of its tensors have prefixes. With text alone, a rotary embedding with three kinds of positions is a plain one.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from typing import Any

TEXT_HALVES = {
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "qwen2_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3_vl": ("qwen3", "Qwen3ForCausalLM"),
    "llama4": ("llama4_text", "Llama4ForCausalLM"),
    "mistral3": ("mistral", "MistralForCausalLM"),
}
"""`model_type` of the whole model -> family and class of its text half."""
DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    }
}
"""Fields that published files lack."""
IMAGES = re.compile(r"(model\.)?(visual|vision_tower|vision_model|multi_modal_projector)\.")
TEXT = re.compile(r"^(model\.)?language_model\.(model\.)?")


def text_half(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of the text half, with `text_half_of` naming the whole. Other files are returned unchanged."""
    whole = str(hf.get("model_type"))
    if whole not in TEXT_HALVES or not isinstance(hf.get("vision_config"), Mapping):
        return dict(hf)
    kind, architecture = TEXT_HALVES[whole]
    outer = {name: value for name, value in hf.items() if name not in ("text_config", "vision_config")}
    inner = hf["text_config"] if isinstance(hf.get("text_config"), Mapping) else outer  # older files are flat
    shared = {name: hf[name] for name in ("tie_word_embeddings", "dtype", "torch_dtype") if hf.get(name) is not None}
    fields = DEFAULTS.get(whole, {}) | dict(inner) | shared
    for name in ("rope_scaling", "rope_parameters"):
        if isinstance(rope := fields.get(name), Mapping):
            fields[name] = plain_rope(rope)
    return fields | {"model_type": kind, "architectures": [architecture], "text_half_of": whole}


def plain_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary embedding of text alone: its three positions (time, height, width) are the same."""
    known = {name: value for name, value in rope.items() if not name.startswith("mrope_")}
    return {name: "default" if value == "mrope" else value for name, value in known.items()}


def text_tensors(hf: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors of the text half, under the names that it has alone."""
    if "text_half_of" not in hf:
        return dict(tensors)
    texts = {name: tensor for name, tensor in tensors.items() if not IMAGES.match(name)}
    warnings.warn(
        f"this {hf['text_half_of']} also reads images; its text half is loaded, and the {len(tensors) - len(texts)} "
        "tensors of the image half are left out",
        stacklevel=3,
    )
    return {TEXT.sub("model.", name).replace("model.lm_head.", "lm_head."): tensor for name, tensor in texts.items()}
