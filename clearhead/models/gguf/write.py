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
from clearhead.tokenize import Tokenizer
from clearhead.tokenize.gguf import NONE, gguf_package, write_tokenizer

from .layout import ARCHITECTURES, EXPERTS, INNER, OUTER, PRECISIONS, llama3_factors, permute_rotary, shift_gain

if TYPE_CHECKING:
    import gguf


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
        kind = package.GGMLQuantizationType[precision.upper()]
        for name, array in gguf_tensors(hf, tensors):
            small = array.ndim == 1 or "ffn_gate_inp" in name
            chosen = package.GGMLQuantizationType.F32 if small else storage_type(package, kind, array)
            writer.add_tensor(name, package.quants.quantize(array, chosen), raw_dtype=chosen)
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


def storage_type(package: Any, kind: Any, array: np.ndarray) -> Any:
    """The type to store a matrix in: rows that are not a whole number of blocks stay in float16."""
    block, _ = package.GGML_QUANT_SIZES[kind]
    return kind if array.shape[-1] % block == 0 else package.GGMLQuantizationType.F16


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
