"""LoRA: the settings of a low-rank adapter, and the `adapter.json` that a saved one has."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clearhead.typed_json import read_json

from .base import Config, ConfigError, parse

ADAPTER = "adapter.json"


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Config):
    """W + (alpha / rank)·B·A in place of every matrix W of the blocks; only A and B learn (Hu et al. 2022)."""

    rank: int = 8
    alpha: float = 16.0

    def check(self) -> None:
        self.require_positive("rank", "alpha")


@dataclass(frozen=True)
class Adapter:
    """What an `adapter.json` says: the checkpoint that is adapted, a digest of its weights, and how."""

    base: str
    digest: str
    config: LoRAConfig


@dataclass(frozen=True)
class AdapterFile:
    """The contents of `adapter.json` as JSON."""

    base: str
    digest: str
    adapter: dict[str, Any]


def read_adapter(folder: Path) -> Adapter:
    """Read the `adapter.json` of a folder. Every error names the file."""
    path = folder / ADAPTER
    about = read_json(path, AdapterFile)
    config = parse(about.adapter, f"{path}: adapter")
    if not isinstance(config, LoRAConfig):
        raise ConfigError(f"{path}: adapter describes a {config.kind()}, but must be a LoRA")
    return Adapter(about.base, about.digest, config)
