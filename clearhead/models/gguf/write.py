"""Write GGUF, the one-file format of llama.cpp, from the names of `transformers`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clearhead.configs import Llama3Scaling, RotaryConfig, YarnScaling
from clearhead.files import check_target, stage_file
from clearhead.models.convert import CheckpointError
from clearhead.models.convert.rules import rotary
from clearhead.models.model import Model
from clearhead.models.origin import origin_fields
from clearhead.models.quantize import dequantize
from clearhead.models.save import family_checkpoint
from clearhead.precision.blocks import TYPES
from clearhead.precision.kquants import quantise_blocks
from clearhead.tokenize import Tokenizer
from clearhead.tokenize.gguf import NONE, gguf_package, write_tokenizer

from .layout import (
    ARCHITECTURES,
    EXPERTS,
    FALLBACKS,
    INNER,
    OUTER,
    PRECISIONS,
    llama3_factors,
    mixed_type,
    permute_rotary,
    shift_gain,
)

if TYPE_CHECKING:
    import gguf


FILE_TYPES = {
    "f32": "ALL_F32",
    "f16": "MOSTLY_F16",
    "bf16": "MOSTLY_BF16",
    "q8_0": "MOSTLY_Q8_0",
    "q4_0": "MOSTLY_Q4_0",
    "q4_1": "MOSTLY_Q4_1",
    "q4_k_m": "MOSTLY_Q4_K_M",
}
"""llama.cpp's names of the precisions of a whole file."""


def save_gguf(
    model: Model, path: Path, tokenizer: Tokenizer | None, precision: str = "f32", force: bool = False
) -> None:
    """Write a file that llama.cpp runs, with matrices in `precision` and vectors in float32; `force` replaces it."""
    check_target(path, force)
    if precision not in PRECISIONS:
        raise ValueError(f"GGUF export has no precision {precision!r}; choose one of {', '.join(PRECISIONS)}")
    package = gguf_package()
    hf, tensors = family_checkpoint(dequantize(model), origin_fields(model.origin))
    if hf["model_type"] not in ARCHITECTURES or hf["architectures"][0].endswith(("Model", "Classification")):
        raise CheckpointError(
            f"cannot export a {hf['architectures'][0]} ({hf['model_type']}) to GGUF; "
            f"supported: {', '.join(sorted(ARCHITECTURES))}, with a language-model head"
        )
    if hf.get("sliding_window") or hf.get("mlp_bias"):
        raise CheckpointError("cannot export to GGUF: llama.cpp's llama has no sliding windows or feed-forward biases")
    check_yarn(rotary(hf))
    with stage_file(path) as part:  # the weights may still be mapped from this file
        writer = package.GGUFWriter(str(part), ARCHITECTURES[hf["model_type"]])
        write_metadata(writer, hf)
        if tokenizer is None:
            writer.add_tokenizer_model(NONE)
        else:
            write_tokenizer(writer, tokenizer, hf["vocab_size"])
        writer.add_file_type(package.LlamaFileType[FILE_TYPES[precision]])
        for name, array in gguf_tensors(hf, tensors):
            kind = storage_type(name, array, precision, hf)
            data = quantise(array, kind)
            writer.add_tensor(name, data, raw_dtype=package.GGMLQuantizationType[kind])
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def check_yarn(rotary: RotaryConfig) -> None:
    """Raise for YaRN settings that GGUF cannot hold: llama.cpp uses those of the paper."""
    scaling = rotary.scaling
    if not isinstance(scaling, YarnScaling):
        return
    papers = RotaryConfig(scaling=YarnScaling(factor=scaling.factor, length=scaling.length)).magnitude
    if scaling != YarnScaling(factor=scaling.factor, length=scaling.length, rotation=papers):
        raise CheckpointError(
            "cannot export to GGUF: it stores only YaRN's factor and length, and other settings differ from the paper's"
        )


def storage_type(name: str, array: np.ndarray, precision: str, hf: Mapping[str, Any]) -> str:
    """The type to store a tensor in. Rows that are not a whole number of blocks get a type with smaller blocks."""
    if array.ndim == 1 or "ffn_gate_inp" in name:
        return "F32"
    mixed = precision == "q4_k_m"
    kind = mixed_type(name, hf["num_hidden_layers"], hf["tie_word_embeddings"]) if mixed else precision.upper()
    if kind in TYPES and array.shape[-1] % TYPES[kind].columns:
        kind = FALLBACKS.get(kind, "F16")
    return "F16" if kind in TYPES and array.shape[-1] % TYPES[kind].columns else kind


def quantise(array: np.ndarray, kind: str) -> np.ndarray:
    """The bytes or floats of a tensor in this type."""
    if kind in FALLBACKS:
        rows = quantise_blocks(torch.from_numpy(array).reshape(-1, array.shape[-1]), kind)
        return rows.view(*array.shape[:-1], -1).numpy()
    package = gguf_package()
    return package.quants.quantize(array, package.GGMLQuantizationType[kind])


def write_metadata(writer: gguf.GGUFWriter, hf: Mapping[str, Any]) -> None:
    writer.add_context_length(hf["max_position_embeddings"])
    writer.add_embedding_length(hf["hidden_size"])
    writer.add_block_count(hf["num_hidden_layers"])
    writer.add_feed_forward_length(hf["intermediate_size"])
    writer.add_head_count(hf["num_attention_heads"])
    writer.add_head_count_kv(hf["num_key_value_heads"])
    writer.add_key_length(hf["head_dim"])
    writer.add_value_length(hf["head_dim"])
    writer.add_rope_dimension_count(hf["head_dim"])
    writer.add_layer_norm_rms_eps(hf["rms_norm_eps"])
    writer.add_vocab_size(hf["vocab_size"])
    if "num_local_experts" in hf:
        writer.add_expert_count(hf["num_local_experts"])
        writer.add_expert_used_count(hf["num_experts_per_tok"])
    rope = hf["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] in ("linear", "yarn"):
        package = gguf_package()
        writer.add_rope_scaling_type(package.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        if "original_max_position_embeddings" in rope:
            writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def gguf_tensors(hf: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors under llama.cpp's names and in its layout, one at a time."""
    outer, inner = ({their: name for name, their in table.items()} for table in (OUTER, INNER))
    letters = {letter: name for name, letter in EXPERTS.items()}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, suffix = name.removeprefix("model.").rpartition(".")
        found = re.fullmatch(r"layers\.(\d+)\.(.+)", part)
        if not found:
            yield f"{outer[part]}.{suffix}", to_numpy(shift_gain(tensor, outer[part], hf, 1))
        elif expert := re.fullmatch(r"block_sparse_moe\.experts\.(\d+)\.(w\d)", found[2]):
            key = f"blk.{found[1]}.{letters[expert[2]]}.{suffix}"
            experts.setdefault(key, []).append(tensor)
            if len(experts[key]) == hf["num_local_experts"]:
                yield key, to_numpy(torch.stack(experts.pop(key)))
        else:
            mine = inner[found[2]]
            tensor = shift_gain(permute_rotary(tensor, mine, hf, back=False), mine, hf, 1)
            yield f"blk.{found[1]}.{mine}.{suffix}", to_numpy(tensor)
    turning = rotary(hf)
    if isinstance(turning.scaling, Llama3Scaling):
        yield (
            "rope_freqs.weight",
            llama3_factors(turning.theta, turning.scaling, hf["head_dim"] // 2).astype(np.float32),
        )


def to_numpy(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().contiguous().numpy()
