"""A model from a folder: `config.json` and safetensors, as Hugging Face lays them out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .assemble import Model, build
from .convert import CheckpointError, family


def load(path: str | Path) -> Model:
    """The model in a Hugging Face folder of a family that `convert` knows, in the precision it was saved in."""
    folder = Path(path)
    hf = read_json(folder / "config.json")
    kind = family(hf)
    config = kind.config(hf)
    weights = kind.ours(read_tensors(folder), config)
    with torch.device("meta"):
        model = build(config)
    model.load_state_dict({name: weight.contiguous() for name, weight in weights.items()}, assign=True)
    return model.eval()


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's one or many safetensors files, memory-mapped."""
    index = folder / "model.safetensors.index.json"
    names = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for name in names:
        if not (folder / name).exists():
            raise CheckpointError(f"{folder / name} is missing")
        try:
            with safe_open(folder / name, framework="pt") as file:
                tensors |= {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise CheckpointError(f"{folder / name} is damaged: {error}") from None
    return tensors


def read_json(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise CheckpointError(f"{path} is missing, so {path.parent} is not a checkpoint folder")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{path} holds no object")
    return data
