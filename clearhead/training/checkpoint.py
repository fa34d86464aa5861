"""Checkpoints of a run that survive a kill at any moment: written to a temporary folder, then renamed.

state.safetensors   weights and optimizer state; several files if the processes hold parts
state.json          step, best score, and a digest of every file and of the step itself
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from clearhead.files import apply_umask, file_digest, flush_to_disk
from clearhead.typed_json import read_json

from .distributed import World, is_sharded

KEPT = 2  # the last two are kept, in case one is damaged
STATE, TENSORS = "state.json", "state.safetensors"


@dataclass
class State:
    """The contents of `state.json`."""

    step: int
    facts: dict[str, Any]
    digests: dict[str, str]
    digest: str = ""

    def compute_digest(self) -> str:
        """A digest of everything else in the file."""
        content = {"step": self.step, "facts": self.facts, "digests": self.digests}
        return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=32).hexdigest()


class ResumeError(ValueError):
    """A run that cannot be resumed: the message says why and what to do."""


def write_checkpoint(
    folder: Path,
    step: int,
    tensors: dict[str, Tensor],
    facts: dict[str, Any],
    world: World,
    keep: Callable[[], list[Path]] = list,
) -> Path:
    """Write the folder `step-N`, whole or not at all. Keep the last two checkpoints and those in `keep`.

    `tensors` is everything the run needs, by name: batches and random numbers are functions of the seed and the step.
    Sharded tensors are written by each process.
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
            state = State(step, facts, digests)
            state.digest = state.compute_digest()
            (part / STATE).write_text(json.dumps(asdict(state), indent=2))
            for path in part.iterdir():
                flush_to_disk(path)
            shutil.rmtree(final, ignore_errors=True)
            part.rename(final)
            flush_to_disk(folder)
            for old in set(list_checkpoints(folder)[:-KEPT]) - set(keep()):
                shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(part, ignore_errors=True)
        raise ResumeError(f"the checkpoint of step {step} could not be written: {error}") from None
    world.wait()
    return final


def write_tensors(folder: Path, tensors: dict[str, Tensor], world: World) -> None:
    if any(map(is_sharded, tensors.values())):
        from torch.distributed.checkpoint import HuggingFaceStorageWriter, save
        from torch.distributed.checkpoint.api import CheckpointException

        try:
            save(tensors, storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
        except CheckpointException as error:  # not an Exception; it holds the failures of all processes
            raise OSError("; ".join(str(failure) for failure, _ in error.failures.values())) from None
    elif world.first:
        save_file({name: value.detach().contiguous().clone() for name, value in tensors.items()}, folder / TENSORS)
        apply_umask(folder / TENSORS)


def list_checkpoints(folder: Path) -> list[Path]:
    """The finished checkpoints, oldest first."""
    return sorted(path for path in folder.glob("step-*") if path.is_dir())


def step_of(path: Path) -> int:
    return int(path.name.removeprefix("step-"))


def find_last_checkpoint(folder: Path) -> tuple[Path | None, list[str]]:
    """The newest undamaged checkpoint, and a sentence for each newer one that is damaged."""
    complaints: list[str] = []
    for path in reversed(list_checkpoints(folder)):
        damage = find_damage(path)
        if not damage:
            return path, complaints
        complaints.append(f"{path} is damaged ({damage})")
    return None, complaints


def find_damage(path: Path) -> str:
    """What is wrong with a checkpoint; "" if nothing is."""
    try:
        state = read_json(path / STATE, State)
        if state.digest != state.compute_digest() or state.step != step_of(path):
            return f"{STATE} was changed"
        changed = [name for name, expected in state.digests.items() if file_digest(path / name) != expected]
    except (OSError, ValueError) as error:
        return str(error)
    return f"{changed[0]} was changed" if changed else ""


@torch.no_grad()
def read_checkpoint(path: Path, into: dict[str, Tensor]) -> tuple[int, dict[str, Any]]:
    """Copy a checkpoint's tensors, written by any number of processes, into those given; its step and facts."""
    state = read_json(path / STATE, State)
    if (path / TENSORS).exists() and not any(map(is_sharded, into.values())):
        found = load_file(path / TENSORS)
        if missing := [name for name in into if name not in found]:
            raise ResumeError(f"{path} has no {missing[0]}; it was written by another version, so it cannot be resumed")
        for name, tensor in into.items():
            tensor.copy_(found[name])
    else:
        from torch.distributed.checkpoint import HuggingFaceStorageReader, load

        with warnings.catch_warnings():  # a single process may read what several have written
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            load(into, storage_reader=HuggingFaceStorageReader(str(path)))
    return state.step, state.facts
