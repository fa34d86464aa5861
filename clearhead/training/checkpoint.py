"""Checkpoints that survive a kill at any moment: written beside, checked by a digest, then renamed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

KEPT = 2  # a run keeps the last two, so that one may be damaged


class ResumeError(ValueError):
    """A run that cannot be gone on with: the message says why and the way out."""


@dataclass(frozen=True)
class Snapshot:
    """All that a run is at one step. The batch of a step is a function of the step, so the data's place is the step."""

    step: int
    weights: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    random: Tensor  # torch's generator
    facts: dict[str, Any]  # best validation loss, tokens seen …


def write(folder: Path, snapshot: Snapshot) -> Path:
    """A new folder `step-N` under `folder`, whole or not at all; older ones than the last two go."""
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{snapshot.step:08d}"
    part = folder / f".part-{os.getpid()}"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir()
    try:
        files = {"weights.safetensors": snapshot.weights, "optimizer.safetensors": snapshot.optimizer}
        files["random.safetensors"] = {"torch": snapshot.random}
        for name, tensors in files.items():
            save_file({key: value.detach().contiguous().clone() for key, value in tensors.items()}, part / name)
        digests = {name: digest(part / name) for name in files}
        facts = {"step": snapshot.step, "facts": snapshot.facts, "digests": digests}
        (part / "state.json").write_text(json.dumps(facts, indent=2))
        for path in part.iterdir():
            settle(path)
        shutil.rmtree(final, ignore_errors=True)
        part.rename(final)
        settle(folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ResumeError(f"the checkpoint of step {snapshot.step} could not be written: {error}") from None
    for old in listed(folder)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def listed(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def read_last(folder: Path) -> tuple[Snapshot | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each newer one that is not."""
    complaints: list[str] = []
    for path in reversed(listed(folder)):
        try:
            return read(path), complaints
        except (OSError, ValueError, KeyError) as error:
            complaints.append(f"{path} is damaged ({error}); the one before it is used")
    return None, complaints


def read(path: Path) -> Snapshot:
    state = json.loads((path / "state.json").read_text())
    for name, expected in state["digests"].items():
        if digest(path / name) != expected:
            raise ValueError(f"{name} is not what was written")
    return Snapshot(
        step=state["step"],
        weights=load_file(path / "weights.safetensors"),
        optimizer=load_file(path / "optimizer.safetensors"),
        random=load_file(path / "random.safetensors")["torch"],
        facts=state["facts"],
    )


def digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "blake2b").hexdigest()


def settle(path: Path) -> None:
    """Onto the disk, not only into its cache."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def random_state() -> Tensor:
    return torch.get_rng_state()
