"""LoRA: every matrix of the blocks learns a difference of low rank, and itself stays as it was."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from clearhead.configs import dumps, loads
from clearhead.configs.adapter import LoRAConfig
from clearhead.files import digest

from .assemble import Model
from .checkpoint import json_text, load, replace_files, tensor_writer, text_writer
from .convert import CheckpointError

ADAPTER, WEIGHTS = "adapter.json", "adapter.safetensors"


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
    for name, module in list(model.named_modules()):
        weight = getattr(module, "weight", None)
        if ".blocks." in name and isinstance(weight, nn.Parameter) and weight.dim() > 1:
            parametrize.register_parametrization(module, "weight", LowRank(config, weight))


def differences(model: nn.Module) -> dict[str, LowRank]:
    """The differences by the name of the module whose weight they change."""
    mark = ".parametrizations.weight.0"
    return {name.removesuffix(mark): m for name, m in model.named_modules() if isinstance(m, LowRank)}


def merge(model: nn.Module) -> None:
    """Add each difference to its matrix, for good."""
    for name in differences(model):
        parametrize.remove_parametrizations(model.get_submodule(name), "weight")
    model.requires_grad_(True)


def save_adapter(model: nn.Module, folder: Path, base: Path, config: LoRAConfig) -> None:
    """The differences alone, and which checkpoint they belong to."""
    tensors = {f"{name}.{key}": t for name, m in differences(model).items() for key, t in m.named_parameters()}
    about = {"base": str(base.resolve()), "digest": base_digest(base), "adapter": json.loads(dumps(config))}
    replace_files(folder, {WEIGHTS: tensor_writer(tensors), ADAPTER: text_writer(json_text(about))})


def load_adapted(folder: Path) -> Model:
    """The base with its differences added."""
    about = json.loads((folder / ADAPTER).read_text(encoding="utf-8"))
    base = Path(about["base"])
    if not base.is_dir():
        raise CheckpointError(f"{folder} adapts {base}, which is not there; put it back, or change base in {ADAPTER}")
    if base_digest(base) != about["digest"]:
        raise CheckpointError(f"{folder} adapts {base}, whose weights have changed since")
    config = loads(json.dumps(about["adapter"]))
    assert isinstance(config, LoRAConfig)
    model = load(base)
    adapt(model, config)
    tensors = load_file(folder / WEIGHTS)
    wanted = {f"{name}.{key}" for name, m in differences(model).items() for key, _ in m.named_parameters()}
    if wanted != tensors.keys():
        odd = sorted(wanted ^ tensors.keys())
        raise CheckpointError(f"{folder / WEIGHTS} does not fit {base}: {odd[0]} is in one only")
    with torch.no_grad():
        for name, difference in differences(model).items():
            for key, parameter in difference.named_parameters():
                parameter.copy_(tensors[f"{name}.{key}"])
    merge(model)
    return model.eval()


def base_digest(folder: Path) -> str:
    """One digest over the weights of a checkpoint."""
    return "-".join(digest(path)[:16] for path in sorted(folder.glob("model*.safetensors")))
