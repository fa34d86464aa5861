"""Choose the device that a model runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .model import Model

DEVICES = ("auto", "cpu", "cuda", "mps")


def choose_device(name: str = "auto") -> torch.device:
    """The device called `name`; "auto" is the first GPU if there is one, else the CPU."""
    if name == "auto":
        found = torch.accelerator.current_accelerator(check_available=True)
        return torch.device("cpu") if found is None else found
    kind = name.partition(":")[0]
    if kind not in DEVICES:
        raise ValueError(f"there is no device {name!r}; choose one of {', '.join(DEVICES)}")
    if problem := device_problem(kind):
        raise ValueError(f"--device {name} cannot be used here: {problem}; use --device cpu")
    return torch.device(name)


def place_model(model: Model, name: str = "auto") -> Model:
    """The model on the device called `name`. Weights that only our CPU kernels can read stay on the CPU."""
    device = choose_device(name)
    if device.type == "cpu":
        return model
    if model.precision is not None:
        if name == "auto":
            return model
        raise ValueError(f"--device {name} cannot run weights in {model.precision.kind()}; use --device cpu")
    return model.to(device)


def device_problem(kind: str) -> str | None:
    """Why a kind of device cannot be used on this machine; None if it can."""
    if kind == "cuda" and not torch.cuda.is_available():
        built = "finds no NVIDIA GPU" if torch.version.cuda else "was built without CUDA"
        return f"torch {torch.__version__} {built}"
    if kind == "mps" and not torch.backends.mps.is_available():
        return "this machine has no Apple GPU that torch can use"
    return None


def describe_device(device: torch.device) -> str:
    """A device in words: `NVIDIA A100 (cuda)`, `CPU, 2 threads`."""
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)} ({device})"
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads > 1)}"
    return str(device)
