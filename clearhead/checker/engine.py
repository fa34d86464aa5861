"""NumPy and PyTorch behind one interface: checks pass NumPy arrays in and get NumPy arrays back."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import numpy as np


class NumPy:
    """Pass NumPy arrays through."""

    name = "numpy"
    slack = 1.0  # multiplies the tolerance, for code that computes in float32

    def __init__(self, dtype: str = "float64") -> None:
        self.dtype = dtype

    @property
    def tolerance(self) -> float:
        return self.slack * (1e-6 if self.dtype == "float64" else 2e-4)

    def to_native(self, value: Any) -> Any:
        """Return a copy of the value for the learner's code, with floats in this engine's dtype."""
        if isinstance(value, np.ndarray):
            return value.astype(self.dtype) if value.dtype.kind == "f" else value.copy()
        if type(value) is dict:  # weights by name
            return {name: self.to_native(part) for name, part in value.items()}
        return value

    def to_numpy(self, value: Any) -> np.ndarray | None:
        """Convert a result to a NumPy array; return None if it is not an array."""
        return np.array(value) if isinstance(value, np.ndarray | np.generic) else None

    def eval_mode(self, thing: Any) -> Any:
        """Put a module into eval mode, in this engine's dtype."""
        return thing

    def no_grad(self) -> Any:
        """Return a context without autograd."""
        return nullcontext()


class Torch(NumPy):
    """Convert between NumPy arrays and tensors."""

    name = "torch"

    def to_native(self, value: Any) -> Any:
        import torch

        given = super().to_native(value)
        return torch.from_numpy(given) if isinstance(given, np.ndarray) else given

    def to_numpy(self, value: Any) -> np.ndarray | None:
        import torch

        if not isinstance(value, torch.Tensor):
            return super().to_numpy(value)
        value = value.detach()
        return (value.double() if value.is_floating_point() else value).numpy().copy()

    def eval_mode(self, thing: Any) -> Any:
        import torch

        return thing.to(getattr(torch, self.dtype)).eval() if isinstance(thing, torch.nn.Module) else thing

    def no_grad(self) -> Any:
        import torch

        return torch.no_grad()


class MetaTorch(Torch):
    """Tensors on the `meta` device, which every machine has: shapes without values."""

    def to_native(self, value: Any) -> Any:
        given = super().to_native(value)
        return given.to("meta") if hasattr(given, "to") else given

    def eval_mode(self, thing: Any) -> Any:
        return super().eval_mode(thing).to("meta")


def engine(name: str, dtype: str = "float64") -> NumPy:
    return {"numpy": NumPy, "torch": Torch}[name](dtype)


def equal(got: np.ndarray | None, expected: np.ndarray, tolerance: float = 1e-6) -> bool:
    """Return True if shapes match and values agree up to rounding. NaN equals nothing."""
    if got is None or got.shape != expected.shape:
        return False
    if got.dtype.kind == "c":
        return False
    room = tolerance * max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
    with np.errstate(invalid="ignore"):
        same = np.abs(got.astype(float) - expected) <= room
    return bool((same | (got == expected)).all())
