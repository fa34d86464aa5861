"""Weights that are pickles (`pytorch_model.bin`): read as tensors only, by a child process with limits.

`torch.load(weights_only=True)` builds tensors and plain containers and refuses everything else, so no code of the file
runs. The child writes what it read as safetensors to a temporary folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from clearhead.typed_json import read_json

from .convert import CheckpointError
from .folder import WeightIndex, read_safetensors, write_safetensors

PICKLE, PICKLE_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
SECONDS = 600  # CPU time for one file
SPARE_BYTES = 8 << 30  # address space besides three times the file, mostly for torch's libraries
NESTED = ("state_dict", "model", "module")  # keys under which training scripts store the weights


def pickle_names(folder: Path) -> list[str]:
    """The names of a folder's pickles; empty if it has none."""
    if (folder / PICKLE).is_file() or not (folder / PICKLE_INDEX).is_file():
        return [PICKLE] if (folder / PICKLE).is_file() else []
    names = sorted(set(read_json(folder / PICKLE_INDEX, WeightIndex).weight_map.values()))
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise CheckpointError(f"{folder / PICKLE_INDEX} names {name!r}, which is not a file there")
    return names


def read_pickles(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's pickles, memory-mapped from a temporary copy that is already unlinked."""
    tensors: dict[str, Tensor] = {}
    for name in pickle_names(folder):
        with TemporaryDirectory(prefix="clearhead-") as aside:
            copy = Path(aside, "model.safetensors")
            convert_in_child(folder / name, copy)
            tensors |= read_safetensors(copy)
    return tensors


def convert_in_child(source: Path, target: Path) -> None:
    """Convert one file; raise one sentence if it holds more than tensors, is damaged, or exceeds the limits."""
    command = [sys.executable, "-m", "clearhead.models.pickles", str(source), str(target)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode == 0:
        return
    said = done.stdout.strip().splitlines()
    reason = said[-1] if said else f"the process that read it ended with code {done.returncode}"
    raise CheckpointError(f"cannot convert {source}: {reason}")


def set_limits(size: int) -> None:
    """Limit the CPU time and the memory of this process; write no core files."""
    try:
        import resource
    except ImportError:  # Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_AS, (3 * size + SPARE_BYTES, 3 * size + SPARE_BYTES))


def read_weights(source: Path) -> dict[str, Tensor]:
    """The tensors of a pickle by name."""
    try:
        data = torch.load(source, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError):  # the format before torch 1.6 cannot be mapped
        data = torch.load(source, map_location="cpu", weights_only=True)
    while isinstance(data, Mapping) and (inner := next((data[key] for key in NESTED if nested(data, key)), None)):
        data = inner
    if not isinstance(data, Mapping):
        raise CheckpointError(f"it holds a {type(data).__name__}, not tensors by name")
    return {str(name): value.clone() for name, value in data.items() if isinstance(value, Tensor)}


def nested(data: Mapping[Any, Any], key: str) -> bool:
    return isinstance(data.get(key), Mapping)


def main() -> None:
    """Convert the file that the first argument names, and say in one sentence what is wrong with it."""
    source, target = map(Path, sys.argv[1:])
    set_limits(source.stat().st_size)
    try:
        weights = read_weights(source)
        if not weights:
            raise CheckpointError("it holds no tensors")
        write_safetensors(weights, target)
    except UnpicklingError as error:
        lines = [line for line in str(error).splitlines() if "GLOBAL" in line] or [str(error).splitlines()[0]]
        print(f"it holds more than tensors, and opening it could run code ({lines[0].strip()[:160]})")
        sys.exit(1)
    except MemoryError:
        print("it needs more memory than three times its size")
        sys.exit(1)
    except Exception as error:  # a damaged pickle can raise anything
        print(str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__)
        sys.exit(1)


if __name__ == "__main__":
    main()
