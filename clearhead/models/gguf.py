"""GGUF, the one-file format of llama.cpp: read by the names of `transformers`, and written from them.

Files in float32, float16 and bfloat16 keep their precision; quantised ones become float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from clearhead.configs import Llama3Scaling, ModelConfig, RotaryConfig, YarnScaling
from clearhead.files import check_target, stage_file
from clearhead.tokenize import Tokenizer
from clearhead.tokenize.gguf import NONE, ROLES, TOKENS, gguf_package, metadata, open_gguf, write_tokenizer

from .assemble import Model, bare
from .convert import CheckpointError, family
from .convert.rules import rotary

if TYPE_CHECKING:
    import gguf

CLASSES = {"llama": "Llama", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3", "gemma": "Gemma"}
WRITTEN = {
    "llama": "llama",
    "mistral": "llama",
    "mixtral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma": "gemma",
}
"""The architecture of llama.cpp that each model_type is."""
PRECISIONS = ("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1")
READ = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q6_K")

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
SCALED = tuple(f"rope.scaling.{name}" for name in ("type", "factor", "original_context_length", "finetuned"))
EXPERTS = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}


def load_gguf(path: Path) -> Model:
    """The model in a GGUF file."""
    with told_of(path):
        hf, tensors = described(path)
        kind = family(hf)
        config = kind.config(hf)
        weights = kind.ours(dict(theirs(hf, tensors)), config)
    dtype = precision(tensors.values())
    model = bare(config)
    model.load_state_dict({name: weight.to(dtype).contiguous() for name, weight in weights.items()}, assign=True)
    model.origin = path
    return model.eval()


def gguf_config(path: Path) -> ModelConfig:
    """What the file says of the model, without its weights."""
    with told_of(path):
        hf, _ = described(path)
        return family(hf).config(hf)


def gguf_fields(path: Path) -> dict[str, Any]:
    """The `config.json` that the file amounts to; read once, and again when the file has changed."""
    return read_fields(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=4)
def read_fields(path: Path, changed: int) -> dict[str, Any]:
    with told_of(path):
        return described(path)[0]


@contextmanager
def told_of(path: Path) -> Iterator[None]:
    """What is wrong with a file names it."""
    try:
        yield
    except KeyError as error:
        raise CheckpointError(f"{path} lacks {error}") from None
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def described(path: Path) -> tuple[dict[str, Any], dict[str, gguf.ReaderTensor]]:
    """The `config.json` that the file amounts to, and its tensors, not yet read."""
    reader = open_gguf(path)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return hf_config(metadata(reader), tensors), tensors


def hf_config(said: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` that the metadata amounts to."""
    arch = said["general.architecture"]
    if arch not in WRITTEN.values():
        raise CheckpointError(
            f"the architecture {arch!r} is not known; known: {', '.join(sorted({*WRITTEN.values()}))}"
        )

    def field(name: str, *otherwise: Any) -> Any:
        return said.get(f"{arch}.{name}", *otherwise) if otherwise else said[f"{arch}.{name}"]

    unknown = {name for name in said if name.startswith(f"{arch}.rope.scaling.")} - {
        f"{arch}.{name}" for name in SCALED
    }
    if unknown:
        raise CheckpointError(f"it stretches positions by {min(unknown)}, which is not read")
    heads, dim, experts = field("attention.head_count"), field("embedding_length"), field("expert_count", 0)
    kind, width = "mixtral" if experts else arch, field("attention.key_length", dim // heads)
    if field("rope.dimension_count", width) != width:
        turned = field("rope.dimension_count")
        raise CheckpointError(f"only {turned} of a head's {width} dimensions tell positions, which is not read")
    ids = {f"{key}_id": said.get(f"{TOKENS}{role}_token_id") for role, key in ROLES.items()}
    return {
        "model_type": kind,
        "architectures": [f"{CLASSES[kind]}ForCausalLM"],
        "vocab_size": int(tensors["token_embd.weight"].shape[-1]),
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
    """How positions turn. LLaMA 3 leaves only its factors, so its usual numbers are tried on them."""
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
        raise CheckpointError("its rope_freqs are not LLaMA 3's, and no others are read")
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    return {"rope_type": kind, "rope_theta": theta, "factor": field("rope.scaling.factor")} | (
        {"original_max_position_embeddings": length} if length else {}
    )


def llama3_factors(theta: float, scaling: Llama3Scaling, pairs: int) -> np.ndarray:
    """What each frequency is divided by."""
    plain, scaled = (RotaryConfig(theta=theta, scaling=s).frequencies(2 * pairs) for s in (None, scaling))
    return np.asarray(plain) / np.asarray(scaled)


def theirs(hf: Mapping[str, Any], tensors: Mapping[str, gguf.ReaderTensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors under the names of `transformers`, turned back into their layout."""
    for name, tensor in tensors.items():
        if name == "rope_freqs.weight":
            continue
        array = values(tensor)
        part, _, suffix = name.rpartition(".")
        if part in OUTER:
            yield f"{OUTER[part]}.{suffix}", shifted(array, part, hf, -1)
            continue
        found = re.fullmatch(r"blk\.(\d+)\.(\w+)", part)
        if found and found[2] in EXPERTS:
            for e, expert in enumerate(array):
                yield f"layers.{found[1]}.block_sparse_moe.experts.{e}.{EXPERTS[found[2]]}.{suffix}", expert
        elif found and found[2] in INNER:
            array = turned(array, found[2], hf, back=True)
            yield f"layers.{found[1]}.{INNER[found[2]]}.{suffix}", shifted(array, found[2], hf, -1)
        else:
            yield name, array  # unknown, which the family will say


def values(tensor: gguf.ReaderTensor) -> Tensor:
    """As floats: mapped where they lie so in the file, else unpacked."""
    kind = tensor.tensor_type.name
    if kind not in READ:
        raise CheckpointError(f"{tensor.name} is {kind}, which is not read; {', '.join(READ)} are")
    if kind in ("F32", "F16"):
        return torch.from_numpy(np.asarray(tensor.data))
    return torch.from_numpy(gguf_package().quants.dequantize(tensor.data, tensor.tensor_type))


def precision(tensors: Any) -> torch.dtype:
    """Of the matrices; vectors are always stored in float32."""
    kinds = {tensor.tensor_type.name for tensor in tensors if len(tensor.shape) > 1}
    return (
        {"F16": torch.float16, "BF16": torch.bfloat16}.get(kinds.pop(), torch.float32)
        if len(kinds) == 1
        else torch.float32
    )


def turned(array: Tensor, part: str, hf: Mapping[str, Any], back: bool) -> Tensor:
    """llama.cpp turns neighbouring rows of LLaMA's queries and keys; `transformers` turns one half with the other."""
    heads = {"attn_q": hf["num_attention_heads"], "attn_k": hf["num_key_value_heads"]}.get(part)
    if heads is None or WRITTEN[hf["model_type"]] != "llama":
        return array
    halves = (heads, -1, 2) if back else (heads, 2, array.shape[0] // heads // 2)
    return array.unflatten(0, halves).transpose(1, 2).flatten(0, 2)


def shifted(array: Tensor, part: str, hf: Mapping[str, Any], by: int) -> Tensor:
    """llama.cpp stores Gemma's gains whole, not as their distance from one."""
    return array + by if hf["model_type"] == "gemma" and part.endswith("norm") else array


# ---- writing


def save_gguf(
    model: Model, path: Path, tokenizer: Tokenizer | None, precision: str = "f32", force: bool = False
) -> None:
    """Write the file that llama.cpp runs; matrices in `precision`, vectors in float32. `force` replaces a file."""
    from .load import as_theirs, kept_fields, named_weights

    check_target(path, force)
    if precision not in PRECISIONS:
        raise ValueError(f"the precision {precision!r} cannot be written to GGUF; {', '.join(PRECISIONS)} can")
    package = gguf_package()
    hf, tensors = as_theirs(model.config, named_weights(model), kept_fields(model.origin))
    if hf["model_type"] not in WRITTEN or hf["architectures"][0].endswith(("Model", "Classification")):
        raise CheckpointError(
            f"a {hf['architectures'][0]} ({hf['model_type']}) has no place in GGUF here; "
            f"{', '.join(sorted(WRITTEN))} with a language-model head have"
        )
    if hf.get("sliding_window") or hf.get("mlp_bias"):
        raise CheckpointError("llama.cpp's llama has neither windows nor biases in its feed-forward layers")
    check_turning(rotary(hf))
    with stage_file(path) as part:  # the weights may still be read from the old file
        writer = package.GGUFWriter(str(part), WRITTEN[hf["model_type"]])
        write_metadata(writer, hf)
        if tokenizer is None:
            writer.add_tokenizer_model(NONE)
        else:
            write_tokenizer(writer, tokenizer, hf["vocab_size"])
        kind = package.GGMLQuantizationType[precision.upper()]
        for name, array in ours(hf, tensors):
            small = array.ndim == 1 or "ffn_gate_inp" in name
            chosen = package.GGMLQuantizationType.F32 if small else fitting(package, kind, array)
            writer.add_tensor(name, package.quants.quantize(array, chosen), raw_dtype=chosen)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def check_turning(turning: RotaryConfig) -> None:
    """llama.cpp takes YaRN as the paper has it."""
    scaling = turning.scaling
    if not isinstance(scaling, YarnScaling):
        return
    papers = RotaryConfig(scaling=YarnScaling(factor=scaling.factor, length=scaling.length)).magnitude
    if scaling != YarnScaling(factor=scaling.factor, length=scaling.length, rotation=papers):
        raise CheckpointError("GGUF keeps of YaRN only the factor and the length, and the rest is not the paper's")


def fitting(package: Any, kind: Any, array: np.ndarray) -> Any:
    """Rows that do not fall into whole blocks stay in float16."""
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


def ours(hf: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, np.ndarray]]:
    """llama.cpp's names and layouts, one tensor at a time."""
    outer, inner = ({their: name for name, their in table.items()} for table in (OUTER, INNER))
    letters = {letter: name for name, letter in EXPERTS.items()}
    experts: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        part, _, suffix = name.removeprefix("model.").rpartition(".")
        found = re.fullmatch(r"layers\.(\d+)\.(.+)", part)
        if not found:
            yield f"{outer[part]}.{suffix}", plain(shifted(tensor, outer[part], hf, 1))
        elif expert := re.fullmatch(r"block_sparse_moe\.experts\.(\d+)\.(w\d)", found[2]):
            key = f"blk.{found[1]}.{letters[expert[2]]}.{suffix}"
            experts.setdefault(key, []).append(tensor)
            if len(experts[key]) == hf["num_local_experts"]:
                yield key, plain(torch.stack(experts.pop(key)))
        else:
            mine = inner[found[2]]
            tensor = shifted(turned(tensor, mine, hf, back=False), mine, hf, 1)
            yield f"blk.{found[1]}.{mine}.{suffix}", plain(tensor)
    turning = rotary(hf)
    if isinstance(turning.scaling, Llama3Scaling):
        yield (
            "rope_freqs.weight",
            llama3_factors(turning.theta, turning.scaling, hf["head_dim"] // 2).astype(np.float32),
        )


def plain(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().contiguous().numpy()
