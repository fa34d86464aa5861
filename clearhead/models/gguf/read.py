"""Read GGUF, the one-file format of llama.cpp, through the names of `transformers`.

Files in float32, float16 and bfloat16 keep their precision. Quantised matrices stay as they are, memory-mapped; if the
kernels do not have their type, they become float16.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clearhead.configs import Blocks, Float16, Float32, Llama3Scaling, ModelConfig
from clearhead.gguf_file import GGUFTensor, open_gguf
from clearhead.models.convert import CheckpointError, family
from clearhead.models.convert.fields import check_hf
from clearhead.models.model import Model, build_empty
from clearhead.models.quantize import assemble
from clearhead.precision.blocks import TYPES, BlockMatrix
from clearhead.precision.matrix import FloatMatrix, Packed
from clearhead.tokenize.gguf import ROLES, TOKENS, gguf_package

from .layout import (
    ARCHITECTURES,
    CLASSES,
    EXPERTS,
    INNER,
    OUTER,
    SCALING_FIELDS,
    llama3_factors,
    permute_rotary,
    shift_gain,
)

FLOATS = ("F32", "F16", "BF16")
RARE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "MXFP4", "TQ1_0", "TQ2_0")
"""Types that the package gguf expands; the kernels have no others."""


def load_gguf(path: Path) -> Model:
    """The model in a GGUF file. Opening it reads the header; the weights are read from the disk when they are used."""
    hf, tensors = read_header(path)
    with prefix_errors(path):
        kind = family(hf)
        config = kind.config(hf)
        quantised = any(tensor.kind not in FLOATS for tensor in tensors.values())
        weights = kind.ours(dict(hf_tensors(hf, tensors, quantised)), config)
    if quantised:
        model = assemble(config, Blocks(), weights, {})
    else:
        dtype = matrix_dtype(tensors.values())
        model = build_empty(config).eval()
        model.load_state_dict({name: weight.to(dtype).contiguous() for name, weight in weights.items()}, assign=True)
    model.origin = path
    return model


def gguf_config(path: Path) -> ModelConfig:
    """The config of the model in a file, without loading its weights."""
    hf, _ = read_header(path)
    with prefix_errors(path):
        return family(hf).config(hf)


def gguf_fields(path: Path) -> dict[str, Any]:
    """The `config.json` equivalent of a file, cached until the file changes."""
    return read_fields(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def read_fields(path: Path, changed: int) -> dict[str, Any]:
    return read_header(path)[0]


@contextmanager
def prefix_errors(path: Path) -> Iterator[None]:
    """Let error messages begin with the file they are about."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_header(path: Path) -> tuple[dict[str, Any], dict[str, GGUFTensor]]:
    """The `config.json` equivalent of a file, and its tensors, not yet loaded."""
    file = open_gguf(path)
    with prefix_errors(path):
        hf = hf_config(file.fields, file.tensors)
    check_hf(hf, str(path))
    return hf, file.tensors


def hf_config(fields: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` equivalent of a file's metadata."""
    arch = fields["general.architecture"]
    if arch not in ARCHITECTURES.values():
        raise CheckpointError(
            f"the architecture {arch!r} is not supported; supported: {', '.join(sorted({*ARCHITECTURES.values()}))}"
        )

    def field(name: str, *otherwise: Any) -> Any:
        return fields.get(f"{arch}.{name}", *otherwise) if otherwise else fields[f"{arch}.{name}"]

    unknown = {name for name in fields if name.startswith(f"{arch}.rope.scaling.")} - {
        f"{arch}.{name}" for name in SCALING_FIELDS
    }
    if unknown:
        raise CheckpointError(f"the rotary scaling {min(unknown)} is not supported")
    heads, dim, experts = field("attention.head_count"), field("embedding_length"), field("expert_count", 0)
    kind, width = "mixtral" if experts else arch, field("attention.key_length", dim // heads)
    if field("rope.dimension_count", width) != width:
        turned = field("rope.dimension_count")
        raise CheckpointError(f"rotary positions over only {turned} of a head's {width} dimensions are not supported")
    ids = {f"{key}_id": fields.get(f"{TOKENS}{role}_token_id") for role, key in ROLES.items()}
    return {
        "model_type": kind,
        "architectures": [f"{CLASSES[kind]}ForCausalLM"],
        "vocab_size": int(tensors["token_embd.weight"].shape[0]),
        "hidden_size": dim,
        "intermediate_size": field("feed_forward_length"),
        "num_hidden_layers": field("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("attention.head_count_kv", heads),
        "head_dim": width,
        "rms_norm_eps": field("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": field("context_length", 2048),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in tensors,
        "num_local_experts": experts,
        "num_experts_per_tok": field("expert_used_count", 0),
        "hidden_act": "gelu_pytorch_tanh" if arch == "gemma" else "silu",
        "rope_parameters": rope(field, tensors.get("rope_freqs.weight")),
    } | {name: id for name, id in ids.items() if id is not None}


def rope(field: Any, factors: Any) -> dict[str, Any]:
    """`rope_parameters`. LLaMA 3 files hold only its factors; find the scaling that gives them."""
    theta, kind = field("rope.freq_base", 10000.0), field("rope.scaling.type", "none")
    length = field("rope.scaling.original_context_length", None)
    if factors is not None:
        found = np.asarray(factors.data, np.float64)
        for trained in (8192, length):
            guess = Llama3Scaling(factor=float(found.max()), length=trained) if trained and found.max() > 1 else None
            if guess is not None and np.allclose(llama3_factors(theta, guess, len(found)), found, rtol=1e-4):
                return {"rope_type": "llama3", "rope_theta": theta, "factor": guess.factor} | {
                    "original_max_position_embeddings": guess.length,
                    "low_freq_factor": guess.slow,
                    "high_freq_factor": guess.fast,
                }
        raise CheckpointError("its rope_freqs are not those of LLaMA 3, and no others are supported")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": kind, "rope_theta": theta, "factor": field("rope.scaling.factor")} | (
        {"original_max_position_embeddings": length} if length else {}
    )


def hf_tensors(
    hf: Mapping[str, Any], tensors: Mapping[str, GGUFTensor], packed: bool = False
) -> Iterator[tuple[str, Tensor | Packed]]:
    """The tensors under the names and in the layout of `transformers`; `packed`: matrices as packed ones."""
    for name, tensor in tensors.items():
        if name == "rope_freqs.weight":
            continue
        array = pack_tensor(tensor) if packed and len(tensor.shape) > 1 else to_floats(tensor)
        part, _, suffix = name.rpartition(".")
        if part in OUTER:
            yield f"{OUTER[part]}.{suffix}", shift_gain(array, part, hf, -1)
            continue
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)", part)
        if found and found[2] in EXPERTS:
            for e in range(tensor.shape[0]):
                expert = array[e]
                yield f"layers.{found[1]}.block_sparse_moe.experts.{e}.{EXPERTS[found[2]]}.{suffix}", expert
        elif found and found[2] in INNER:
            array = permute_rotary(array, found[2], hf, back=True)
            yield f"layers.{found[1]}.{INNER[found[2]]}.{suffix}", shift_gain(array, found[2], hf, -1)
        else:
            yield name, array  # unknown: `Family.ours` raises


def pack_tensor(tensor: GGUFTensor) -> Packed:
    """A matrix as it is stored: its blocks, or floats. Blocks of a rare type become float16."""
    if tensor.kind in TYPES:
        return BlockMatrix(torch.from_numpy(tensor.data), tensor.kind)
    return FloatMatrix(to_floats(tensor), Float32() if tensor.kind == "F32" else Float16())


def to_floats(tensor: GGUFTensor) -> Tensor:
    """A tensor as floats: memory-mapped if the file holds floats, else expanded."""
    kind = tensor.kind
    if kind in ("F32", "F16"):
        return torch.from_numpy(tensor.data)
    if kind == "BF16":
        return torch.from_numpy(tensor.data).view(torch.bfloat16)
    if kind in TYPES:
        return BlockMatrix(torch.from_numpy(tensor.data), kind).dense()
    if kind not in RARE:
        known = ", ".join((*FLOATS, *TYPES, *RARE))
        raise CheckpointError(f"{tensor.name} is {kind}, which is not supported; supported: {known}")
    package = gguf_package()
    return torch.from_numpy(package.quants.dequantize(tensor.data, package.GGMLQuantizationType[kind]))


def matrix_dtype(tensors: Any) -> torch.dtype:
    """The dtype of the matrices; vectors are always stored in float32."""
    kinds = {tensor.kind for tensor in tensors if len(tensor.shape) > 1}
    return (
        {"F16": torch.float16, "BF16": torch.bfloat16}.get(kinds.pop(), torch.float32)
        if len(kinds) == 1
        else torch.float32
    )
