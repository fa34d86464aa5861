"""LoRA: every matrix of the blocks learns a difference of low rank, and itself stays as it was."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from shutil import copyfile
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clearhead.configs import ConfigError
from clearhead.configs.adapter import ADAPTER, LoRAConfig, read_adapter
from clearhead.files import file_digest

from .assemble import Model
from .convert import CheckpointError
from .load import (
    KEPT,
    TOKENIZER,
    Writers,
    config_json,
    json_text,
    load,
    replace_files,
    tensor_writer,
    text_writer,
)

WEIGHTS = "adapter.safetensors"


class LowRank(nn.Module):
    """W -> W + (alpha / rank)·B·A, with B = 0 at first. Experts, stacked along a first axis, have one each."""

    def __init__(self, config: LoRAConfig, weight: Tensor) -> None:
        super().__init__()
        *stacked, rows, columns = weight.shape
        self.scale = config.alpha / config.rank
        self.a = nn.Parameter(torch.randn_like(weight.new_empty(*stacked, config.rank, columns)) / columns**0.5)
        self.b = nn.Parameter(weight.new_zeros(*stacked, rows, config.rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


def adapt(model: nn.Module, config: LoRAConfig) -> None:
    """Freeze the model, and put a difference that learns beside every matrix of its blocks."""
    model.requires_grad_(False)
    most = max(min(weight.shape[-2:]) for weight in matrices(model).values())
    if config.rank > most:
        raise ConfigError(f"LoRA.rank is {config.rank}, but no matrix of this model has a rank above {most}")
    for name, weight in matrices(model).items():
        parametrize.register_parametrization(model.get_submodule(name), "weight", LowRank(config, weight))


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that are adapted, by the name of their module."""
    found = {name: getattr(module, "weight", None) for name, module in model.named_modules() if ".blocks." in name}
    return {name: weight for name, weight in found.items() if isinstance(weight, nn.Parameter) and weight.dim() > 1}


def differences(model: nn.Module) -> dict[str, LowRank]:
    """The differences by the name of the module whose weight they change."""
    mark = ".parametrizations.weight.0"
    return {name.removesuffix(mark): m for name, m in model.named_modules() if isinstance(m, LowRank)}


def save_adapter(
    model: Model,
    folder: Path,
    base: Path,
    config: LoRAConfig,
    *,
    tokenizer: Any = None,
    extra: Mapping[str, Any] | None = None,
) -> None:
    """The differences alone, and which checkpoint they belong to; with them, as `checkpoint.save` has it, what belongs
    to the model beside its weights."""
    tensors = {f"{name}.{key}": t for name, m in differences(model).items() for key, t in m.named_parameters()}
    about = {"base": str(base.resolve()), "digest": base_digest(base), "adapter": config.to_dict()}
    texts = {ADAPTER: json_text(about), "config.json": json_text({**config_json(model.origin), **(extra or {})})}
    files: Writers = {WEIGHTS: tensor_writer(tensors)} | {name: text_writer(text) for name, text in texts.items()}
    if model.origin is not None and model.origin.resolve() != folder.resolve():
        kept = KEPT if tokenizer is None else KEPT - TOKENIZER
        files |= {path.name: partial(copyfile, path) for path in model.origin.iterdir() if path.name in kept}
    replace_files(folder, files)
    if tokenizer is not None:
        tokenizer.save(folder)


def load_adapted(folder: Path) -> Model:
    """The base with its differences added. What belongs to it beside its weights lies in the adapter's folder, where
    that has its own."""
    about = read_adapter(folder)
    base = Path(about.base)
    if not base.is_dir():
        raise CheckpointError(f"{folder} adapts {base}, which is not there; put it back, or change base in {ADAPTER}")
    if base_digest(base) != about.digest:
        raise CheckpointError(f"{folder} adapts {base}, whose weights have changed since")
    model = load(base)
    merge(model, folder)
    if (folder / "config.json").exists():
        model.origin = folder
    return model.eval()


def merge(model: Model, folder: str | Path, *, sign: int = 1) -> None:
    """Add an adapter's differences to the matrices of a model."""
    config, file = read_adapter(Path(folder)).config, Path(folder, WEIGHTS)
    try:
        tensors = load_file(file)
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error}") from None
    wanted = {f"{name}.{key}" for name in matrices(model) for key in ("a", "b")}
    if wanted != tensors.keys():
        odd = sorted(wanted ^ tensors.keys())
        raise CheckpointError(f"{file} does not fit the model: {odd[0]} is in one of them only")
    with torch.no_grad():
        for name, weight in matrices(model).items():
            weight.add_(tensors[f"{name}.b"] @ tensors[f"{name}.a"], alpha=sign * config.alpha / config.rank)


def unmerge(model: Model, folder: str | Path) -> None:
    """Take them away again: the base, but for the rounding of its last bits."""
    merge(model, folder, sign=-1)


def base_digest(folder: Path) -> str:
    """One digest over the weights of a checkpoint, which may itself be an adapter."""
    return "-".join(
        file_digest(path)[:16] for path in sorted([*folder.glob("model*.safetensors"), *folder.glob(WEIGHTS)])
    )
