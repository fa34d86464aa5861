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

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from clearhead.configs import ConfigError
from clearhead.files import TargetError, flush_to_disk, stage_file
from clearhead.typed_json import quote, read_json

from .convert import CheckpointError
from .convert.fields import check_hf

Writers = dict[str, Callable[[Path], object]]
"""Functions that write a file to a path, by the file's name."""


@dataclass
class WeightIndex:
    """`model.safetensors.index.json`: which file holds each tensor."""

    weight_map: dict[str, str]


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
}
COMPANIONS = {*TOKENIZER, "generation_config.json", "chat_template.jinja", "preprocessor_config.json"}
"""Files copied along when a model is loaded from one folder and saved to another."""
CONVERT = (
    "Convert it where you trust it: load it in transformers with from_pretrained, and write safetensors with "
    "save_pretrained"
)


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
        refuse_pickles(folder)
        pickles = f"; pickles are neither fetched nor opened. If it has only those: {CONVERT}"
        listed = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing"
        raise CheckpointError(f"{folder}: {listed}{pickles if missing == [WEIGHTS] else ''}")
    tensors: dict[str, Tensor] = {}
    for name in names:
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{folder / name} is damaged: {error}") from None
    return tensors


def shard_names(folder: Path) -> list[str]:
    """The names of the weight files. A single file takes precedence, as in `transformers`."""
    if (folder / WEIGHTS).exists() or not (folder / INDEX).exists():
        return [WEIGHTS]
    table = read_json(folder / INDEX, WeightIndex).weight_map
    for name in table.values():
        if Path(name).name != name or "\0" in name:
            raise CheckpointError(f"{folder / INDEX}: weight_map names {quote(name)}, which is not a file there")
    return sorted(set(table.values()))


def refuse_pickles(folder: Path) -> None:
    """Raise if a folder's weights are pickles. Of a Hub model only their index is downloaded."""
    if pickled := sorted(path.name for path in folder.glob("pytorch_model*.bin*")):
        raise CheckpointError(
            f"{folder} has its weights only as pickles ({pickled[0]}), which can run any code when opened. {CONVERT}"
        )


def read_config(path: Path) -> dict[str, Any]:
    """The fields of a `config.json` or a `generation_config.json`; those used here have their right types."""
    if not path.exists():
        raise CheckpointError(f"{path} is missing, so {path.parent} is not a checkpoint folder")
    data = read_json(path)
    check_hf(data, str(path))
    return data


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


def index_text(shards: Mapping[str, Mapping[str, Tensor]]) -> str:
    total = sum(tensor.nbytes for part in shards.values() for tensor in part.values())
    table = {name: file for file, part in shards.items() for name in part}
    return json_text({"metadata": {"total_size": total}, "weight_map": table})


def json_text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, indent=2, ensure_ascii=False) + "\n"


def text_writer(text: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(text, encoding="utf-8")


def tensor_writer(tensors: Mapping[str, Tensor]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        try:
            save_file({name: t.detach().cpu().contiguous() for name, t in tensors.items()}, path, {"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write the weights to {path.parent}: {error}") from None

    return write


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
