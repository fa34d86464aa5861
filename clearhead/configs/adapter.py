"""What is learned beside a finished model's weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

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


def read_adapter(folder: Path) -> Adapter:
    """That of a folder; every complaint names the file."""
    path = folder / ADAPTER
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        base, digest, config = (about[name] for name in ("base", "digest", "adapter"))
        config = parse(config, "adapter")
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"{path} is damaged, or says nothing of an adapter: {error}") from None
    if not (isinstance(base, str) and isinstance(digest, str) and isinstance(config, LoRAConfig)):
        raise ConfigError(f"{path} is damaged: it must name a base, its digest, and a LoRA as the adapter")
    return Adapter(base, digest, config)
