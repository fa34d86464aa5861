"""The two libraries that learners write in, behind one face: arrays go in and come out as NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np


class NumPy:
    """Arrays are what they are."""

    name = "numpy"
    slack = 1.0  # how much more rounding the learner's code may have

    def __init__(self, dtype: str = "float64") -> None:
        self.dtype = dtype

    @property
    def tolerance(self) -> float:
        return self.slack * (1e-6 if self.dtype == "float64" else 2e-4)

    def give(self, value: Any) -> Any:
        """A copy that the learner's code may keep; real numbers in this engine's precision."""
        if isinstance(value, np.ndarray):
            return value.astype(self.dtype) if value.dtype.kind == "f" else value.copy()
        if type(value) is dict:  # weights by name
            return {name: self.give(part) for name, part in value.items()}
        return value

    def take(self, value: Any) -> np.ndarray | None:
        """What came out as an array, or None if it is no array."""
        return np.array(value) if isinstance(value, np.ndarray | np.generic) else None

    def quiet(self, thing: Any) -> Any:
        """As it is used after training."""
        return thing


class Torch(NumPy):
    """Tensors outside, arrays inside."""

    name = "torch"

    def give(self, value: Any) -> Any:
        import torch

        given = super().give(value)
        return torch.from_numpy(given) if isinstance(given, np.ndarray) else given

    def take(self, value: Any) -> np.ndarray | None:
        import torch

        if not isinstance(value, torch.Tensor):
            return super().take(value)
        value = value.detach()
        return (value.double() if value.is_floating_point() else value).numpy().copy()

    def quiet(self, thing: Any) -> Any:
        import torch

        return thing.to(getattr(torch, self.dtype)).eval() if isinstance(thing, torch.nn.Module) else thing


class Elsewhere(Torch):
    """Another device than the CPU. `meta` is on every machine: it has shapes and no numbers."""

    def give(self, value: Any) -> Any:
        given = super().give(value)
        return given.to("meta") if hasattr(given, "to") else given

    def quiet(self, thing: Any) -> Any:
        return super().quiet(thing).to("meta")


def engine(name: str, dtype: str = "float64") -> NumPy:
    return {"numpy": NumPy, "torch": Torch}[name](dtype)


def equal(got: np.ndarray | None, expected: np.ndarray, tolerance: float = 1e-6) -> bool:
    """The same shape and, up to rounding, the same numbers; a NaN equals nothing."""
    if got is None or got.shape != expected.shape:
        return False
    if got.dtype.kind == "c":
        return False
    room = tolerance * max(1.0, float(np.abs(expected[np.isfinite(expected)]).max(initial=0)))
    with np.errstate(invalid="ignore"):
        same = np.abs(got.astype(float) - expected) <= room
    return bool((same | (got == expected)).all())
