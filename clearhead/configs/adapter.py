"""What is learned beside a finished model's weights."""

from __future__ import annotations

from dataclasses import dataclass

from .base import Config


@dataclass(frozen=True, kw_only=True)
class LoRAConfig(Config):
    """W + (alpha / rank)·B·A in place of every matrix W of the blocks; only A and B learn (Hu et al. 2022)."""

    rank: int = 8
    alpha: float = 16.0

    def check(self) -> None:
        self.require_positive("rank", "alpha")
