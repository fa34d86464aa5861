"""Checkpoints that survive a kill at any moment: written beside, checked by a digest, then renamed."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clearhead.files import apply_umask, file_digest, flush_to_disk
from clearhead.typed_json import read_json

from .distributed import World, in_parts

KEPT = 2  # a run keeps the last two, so that one may be damaged
STATE, TENSORS = "state.json", "state.safetensors"


@dataclass
class State:
    """The contents of `state.json`."""

    step: int
    facts: dict[str, Any]
    digests: dict[str, str]


class ResumeError(ValueError):
    """A run that cannot be gone on with: the message says why and the way out."""


def write(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    world: World,
    keep: Callable[[], list[Path]] = list,
) -> Path:
    """A new folder `step-N` under `folder`, whole or not at all; older ones than the last two go, if not to be kept.

    `tensors` is all that a run remembers, by name. The batch and the random numbers of a step are functions of the
    seed and the step, so the data's place is the step. What the processes hold in parts is written in parts.
    """
    final, part = folder / f"step-{step:08d}", folder / ".part"
    try:
        if world.first:
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir(parents=True)
        world.wait()
        write_tensors(part, tensors, world)
        world.wait()
        if world.first:
            digests = {path.name: file_digest(path) for path in sorted(part.glob("*.safetensors"))}
            state = {"step": step, "facts": facts, "digests": digests}
            (part / STATE).write_text(json.dumps(state, indent=2))
            for path in part.iterdir():
                flush_to_disk(path)
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            flush_to_disk(folder)
            for old in set(listed(folder)[:-KEPT]) - set(keep()):
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ResumeError(f"the checkpoint of step {step} could not be written: {error}") from None
    world.wait()
    return final


def write_tensors(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    if any(map(in_parts, tensors.values())):
        from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        except CheckpointException as error:  # no Exception, and tells of every process
            raise OSError("; ".join(str(failure) for failure, _ in error.failures.values())) from None
    elif world.first:
        save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, folder / TENSORS)
        apply_umask(folder / TENSORS)


def listed(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find_last(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint that is whole, and a sentence for each newer one that is not."""
    complaints: list[str] = []
    for path in reversed(listed(folder)):
        damage = damage_of(path)
        if not damage:
            return path, complaints
        complaints.append(f"{path} is damaged ({damage})")
    return None, complaints


def damage_of(path: Path) -> str:
    """What is wrong with a checkpoint; nothing where it is whole."""
    try:
        digests = read_json(path / STATE, State).digests
        changed = [name for name, expected in digests.items() if file_digest(path / name) != expected]
    except (OSError, ValueError) as error:
        return str(error)
    return f"{changed[0]} is not what was written" if changed else ""


@torch.no_grad()
def read(path: Path, into: dict[str, Tensor]) -> tuple[int, dict[str, Any]]:
    """Write a checkpoint's tensors into those given; its step, and its facts. However many processes wrote it."""
    state = read_json(path / STATE, State)
    if (path / TENSORS).exists() and not any(map(in_parts, into.values())):
        found = load_file(path / TENSORS)
        for name, tensor in into.items():
            tensor.copy_(found[name])
    else:
        from torch.distributed.checkpoint import HuggingFaceStorageReader, load

        with warnings.catch_warnings():  # one process alone may read what several have written
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(into, storage_reader=HuggingFaceStorageReader(str(path)))
    return state.step, state.facts
