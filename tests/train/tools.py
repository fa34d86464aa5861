"""A small recipe, and what the tests of runs do with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file

from clearhead.configs.train import RecipeConfig
from clearhead.training.recipes import chars

TEXT = "the quick brown fox jumps over the lazy dog. " * 300


def small(dropout: float = 0.1, **changes: object) -> RecipeConfig:
    """The characters recipe at a size that takes a second; with dropout, so that random numbers matter."""
    config = chars()
    sizes = {
        "batch": 4, "task.context": 16, "steps": 12, "evaluate_every": 6, "evaluate_targets": 256, "save_every": 4,
        "model.stack.dim": 32,
    }  # fmt: skip
    for i in range(len(config.model.stack.pattern)):
        sizes |= {f"model.stack.pattern.{i}.ffn.hidden": 64, f"model.stack.pattern.{i}.dropout": dropout}
    for path, value in (sizes | changes).items():
        config = config.with_value(path, value)
    return config


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def same(a: Path, b: Path) -> bool:
    mine, other = weights(a), weights(b)
    return mine.keys() == other.keys() and all(torch.equal(mine[k], other[k]) for k in mine)


COMMAND = "import sys; from clearhead.cli.main import main; sys.argv[0] = 'clearhead'; main()"


def start(recipe_file: Path, corpus: Path, out: Path, *more: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-c",
        COMMAND,
        "train",
        str(recipe_file),
        "--data",
        str(corpus),
        "--out",
        str(out),
        *more,
    ]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True)


def stop_at(step: int, numbers: dict) -> None:
    if numbers["step"] == step:
        raise KeyboardInterrupt
