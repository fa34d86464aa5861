"""The files of a checkpoint folder: reading them, and writing all of them or none.

    clearhead.json     the config, exactly
    config.json        what `transformers` reads, if it has the architecture
    model.safetensors  the weights, under the names of `transformers` if it has the architecture, else under ours
    README.md          the model card

Nothing is pickled, and no code of a checkpoint is run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from clearhead.configs import ConfigError
from clearhead.files import TargetError, flush_to_disk, stage_file
from clearhead.typed_json import quote, read_json

from .convert import CheckpointError
from .convert.fields import check_hf
from .convert.multimodal import text_half

Writers = dict[str, Callable[[Path], object]]
"""Functions that write a file to a path, by the file's name."""


@dataclass
class WeightIndex:
    """`model.safetensors.index.json`: which file holds each tensor."""

    weight_map: dict[str, str]


NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The names of dtypes in safetensors files."""
ALIGNMENT = 64  # bytes; the widest vectors of a processor
SMALL = 1 << 20  # bytes of an unaligned tensor that is copied instead of mapped
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
WEIGHT_FILES = r"model(-\d{5}-of-\d{5})?\.safetensors(\.index\.json)?"
TOKENIZER = {
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "source.spm",
    "target.spm",
    "spiece.model",
    "sentencepiece.bpe.model",
}
MODULES = "modules.json"  # of sentence-transformers: what follows the model, each part in a folder of its own
COMPANIONS = {
    *TOKENIZER,
    "generation_config.json",
    "chat_template.jinja",
    "preprocessor_config.json",
    MODULES,
    "sentence_bert_config.json",
    "config_sentence_transformers.json",
}
"""Files copied along when a model is loaded from one folder and saved to another."""
OTHERS = {
    "tf_model.h5": "TensorFlow weights",
    "model.ckpt.index": "a TensorFlow checkpoint",
    "flax_model.msgpack": "Flax weights",
    "rust_model.ot": "weights for Rust",
    "model.onnx": "an ONNX graph",
}
"""Weights of other programs, which are not supported."""


@contextmanager
def prefix_errors(folder: Path) -> Iterator[None]:
    """Let error messages begin with the folder they are about."""
    try:
        yield
    except (CheckpointError, ConfigError) as error:
        raise type(error)(f"{folder}: {error}") from None


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's safetensors files, memory-mapped."""
    names = shard_names(folder)
    if missing := [name for name in names if not (folder / name).is_file()]:
        explain_missing(folder)
        listed = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise CheckpointError(f"{folder}: {listed}")
    tensors: dict[str, Tensor] = {}
    for name in names:
        tensors |= read_safetensors(folder / name)
    return tensors


def read_safetensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of a file, memory-mapped. Small ones that are not aligned are copied.

    Products of aligned and unaligned tensors may differ in the last bit. `tensor_writer` aligns what it writes, so a
    model that was saved and loaded computes the same bits.
    """
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return {
        name: tensor.clone() if tensor.data_ptr() % ALIGNMENT and tensor.nbytes <= SMALL else tensor
        for name, tensor in tensors.items()
    }


def shard_names(folder: Path) -> list[str]:
    """The names of the weight files. A single file takes precedence, as in `transformers`."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return [WEIGHTS]
    table = read_json(folder / INDEX, WeightIndex).weight_map
    for name in table.values():
        if Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{folder / INDEX}: weight_map names {quote(name)}, which is not a file there")
    return sorted(set(table.values()))


def explain_missing(folder: Path) -> None:
    """Raise if a folder's weights are pickles or those of another program."""
    if pickled := sorted(path.name for path in folder.glob("pytorch_model*.bin*")):
        raise CheckpointError(
            f"{folder} has its weights only as pickles ({pickled[0]}); convert them: clearhead convert {folder} OUT "
            "(in Python: load(…, convert=True))"
        )
    if others := [f"{text} ({name})" for name, text in OTHERS.items() if (folder / name).exists()]:
        raise CheckpointError(
            f"{folder} has only {others[0]}, which are not supported; load them in transformers "
            "(from_pretrained with from_tf=True or from_flax=True), and save that with save_pretrained"
        )


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a `config.json` or a `generation_config.json`; those used here have their right types.

    For a model that also reads images, these are the fields of its text half.
    """
    if not path.exists():
        raise CheckpointError(f"{path} is missing, so {path.parent} is not a checkpoint folder")
    data = read_json(path)
    check_hf(data, str(path))
    half = text_half(data)
    check_hf(half, str(path))
    return half


def split(tensors: Mapping[str, Tensor], most: int) -> dict[str, dict[str, Tensor]]:
    """Distribute tensors over files, in order, with at most `most` bytes per file unless one tensor is larger."""
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if parts[-1] and size + tensor.nbytes > most:
            parts.append({})
            size = 0
        parts[-1][name] = tensor
        size += tensor.nbytes
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{i:05}-of-{len(parts):05}.safetensors": part for i, part in enumerate(parts, 1)}


def companion_files(origin: Path, names: set[str]) -> dict[str, Path]:
    """The files of a folder that are copied along: those with these names, and the parts of sentence-transformers."""
    found = {path.name: path for path in origin.iterdir() if path.name in names and path.is_file()}
    if MODULES in found:
        for module in read_json(origin / MODULES, list[dict[str, Any]]):
            part = Path(str(module.get("path", "")))
            if len(part.parts) == 1 and (origin / part).is_dir():
                found |= {f"{part}/{path.name}": path for path in (origin / part).iterdir() if path.is_file()}
    return found


def index_text(shards: Mapping[str, Mapping[str, Tensor]]) -> str:
    total = sum(tensor.nbytes for part in shards.values() for tensor in part.values())
    table = {name: file for file, part in shards.items() for name in part}
    return json_text({"metadata": {"total_size": total}, "weight_map": table})


def json_text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def text_writer(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def tensor_writer(tensors: Mapping[str, Tensor]) -> Callable[[Path], object]:
    return lambda path: write_safetensors(tensors, path)


def write_safetensors(tensors: Mapping[str, Tensor], path: Path) -> None:
    """Write a safetensors file in which every tensor begins at a multiple of 64 bytes, if it can.

    The header is padded, and tensors that are not a multiple of 64 bytes are at the end.
    """
    order = sorted(tensors, key=lambda name: tensors[name].nbytes % ALIGNMENT != 0)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        tensor = tensors[name]
        place = [end, end := end + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": place}
    text = json.dumps(header, ensure_ascii=False).encode()
    text += b" " * (-(len(text) + 8) % ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in order:
            flat = tensors[name].detach().cpu().contiguous().flatten()
            file.write(flat.view(torch.uint8).numpy().data)


def refuse_model(folder: Path, names: set[str]) -> None:
    """Raise if the folder holds one of the files that a save would write, or weights that it would remove."""
    for path in sorted(folder.iterdir()):
        if path.name in names or re.fullmatch(WEIGHT_FILES, path.name):
            raise TargetError(
                f"{folder} holds {path.name}; add --force (in Python: force=True) to replace the model there, "
                "or choose another folder"
            )


def replace_files(folder: Path, files: Writers) -> None:
    """Write all files under temporary names, flush them to the disk, then rename each."""
    with ExitStack() as staged:
        for name, write in reversed(files.items()):  # they are renamed in the opposite order: the weights first
            part = staged.enter_context(stage_file(folder / name))
            write(part)
            flush_to_disk(part)
    flush_to_disk(folder)


def remove_stale(folder: Path, keep: set[str]) -> None:
    """Remove weights of an earlier save that this one does not replace, and files that a killed save left."""
    unfinished = re.compile(rf"\.({WEIGHT_FILES}|config\.json|clearhead\.json|README\.md|tokenizer.*)\.\w{{8}}\.part")
    for path in folder.iterdir():
        if path.name not in keep and (re.fullmatch(WEIGHT_FILES, path.name) or unfinished.fullmatch(path.name)):
            path.unlink()
