"""LoRA: train a low-rank difference for every matrix of the blocks, and leave the matrices themselves unchanged."""

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
from clearhead.configs.lora import ADAPTER, LoRAConfig, read_adapter
from clearhead.files import file_digest

from .convert import CheckpointError
from .folder import COMPANIONS, TOKENIZER, Writers, json_text, replace_files, tensor_writer, text_writer
from .model import Model
from .origin import config_json

WEIGHTS = "adapter.safetensors"


class LowRank(nn.Module):
    """W -> W + (alpha / rank)·B·A, with B = 0 at the start. Stacked experts have one difference each."""

    def __init__(self, config: LoRAConfig, weight: Tensor) -> None:
        super().__init__()
        *stacked, rows, columns = weight.shape
        self.scale = config.alpha / config.rank
        self.a = nn.Parameter(torch.randn_like(weight.new_empty(*stacked, config.rank, columns)) / columns**0.5)
        self.b = nn.Parameter(weight.new_zeros(*stacked, rows, config.rank))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * (self.b @ self.a)


def adapt(model: nn.Module, config: LoRAConfig) -> None:
    """Freeze the model and add a trainable low-rank difference to every matrix of its blocks."""
    model.requires_grad_(False)
    most = max(min(weight.shape[-2:]) for weight in matrices(model).values())
    if config.rank > most:
        raise ConfigError(f"LoRA.rank is {config.rank}, but no matrix of this model has a rank above {most}")
    for name, weight in matrices(model).items():
        parametrize.register_parametrization(model.get_submodule(name), "weight", LowRank(config, weight))


def matrices(model: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that LoRA adapts, by the name of their module."""
    found = {name: getattr(module, "weight", None) for name, module in model.named_modules() if ".blocks." in name}
    return {name: weight for name, weight in found.items() if isinstance(weight, nn.Parameter) and weight.dim() > 1}


def differences(model: nn.Module) -> dict[str, LowRank]:
    """The low-rank differences, by the name of the module they change."""
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
    """Write the differences, the checkpoint they belong to, and the model's other files, as `save` does."""
    tensors = {f"{name}.{key}": t for name, m in differences(model).items() for key, t in m.named_parameters()}
    about = {"base": str(base.resolve()), "digest": base_digest(base), "adapter": config.to_dict()}
    texts = {ADAPTER: json_text(about), "config.json": json_text({**config_json(model.origin), **(extra or {})})}
    files: Writers = {WEIGHTS: tensor_writer(tensors)} | {name: text_writer(text) for name, text in texts.items()}
    if model.origin is not None and model.origin.resolve() != folder.resolve():
        copied = COMPANIONS if tokenizer is None else COMPANIONS - TOKENIZER
        files |= {path.name: partial(copyfile, path) for path in model.origin.iterdir() if path.name in copied}
    replace_files(folder, files)
    if tokenizer is not None:
        tokenizer.save(folder)


def merge(model: Model, folder: str | Path, *, sign: int = 1) -> None:
    """Add an adapter's differences to the matrices of a model."""
    config, file = read_adapter(Path(folder)).config, Path(folder, WEIGHTS)
    try:
        tensors = load_file(file)
    except (SafetensorError, FileNotFoundError) as error:
        raise CheckpointError(f"{file} is missing or damaged: {error}") from None
    check_shapes(file, tensors, matrices(model), config.rank)
    with torch.no_grad():
        for name, weight in matrices(model).items():
            weight.add_(tensors[f"{name}.b"] @ tensors[f"{name}.a"], alpha=sign * config.alpha / config.rank)


def check_shapes(file: Path, tensors: Mapping[str, Tensor], matrices: Mapping[str, Tensor], rank: int) -> None:
    """Raise unless the adapter has an A of [rank, in] and a B of [out, rank] for every matrix."""
    wanted: dict[str, tuple[int, ...]] = {}
    for name, weight in matrices.items():
        *stacked, rows, columns = weight.shape
        wanted |= {f"{name}.a": (*stacked, rank, columns), f"{name}.b": (*stacked, rows, rank)}
    if odd := sorted(wanted.keys() ^ tensors.keys()):
        where = "the model has no such matrix" if odd[0] in tensors else "the adapter lacks it"
        raise CheckpointError(f"{file} does not fit the model: {odd[0]}: {where}")
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            found = tuple(tensors[name].shape)
            raise CheckpointError(f"{file} does not fit the model: {name} is {found}, but must be {shape}")


def unmerge(model: Model, folder: str | Path) -> None:
    """Subtract an adapter that `merge` added. The base comes back up to rounding."""
    merge(model, folder, sign=-1)


def base_digest(folder: Path) -> str:
    """A digest of a checkpoint's weights; the checkpoint may itself be an adapter."""
    return "-".join(
        file_digest(path)[:16] for path in sorted([*folder.glob("model*.safetensors"), *folder.glob(WEIGHTS)])
    )
