"""Two engines behind one face: NumPy arrays in, NumPy arrays out, so that one suite judges both."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jaxtyping
import numpy as np
import torch
from torch import Tensor

import clearhead.functional as functional
import clearhead.reference as reference


class NumPyEngine:
    name = "numpy"

    def __call__(self, function: str, *arguments: Any, **options: Any) -> Any:
        return getattr(reference, function)(*arguments, **options)

    def gradients(self, function: str, d_out: Any, *arguments: Any, **options: Any) -> list[np.ndarray]:
        found = getattr(reference, f"{function}_backward")(d_out, *arguments, **options)
        return [d for d in (found if isinstance(found, tuple) else (found,)) if d is not None]

    def generator(self, seed: int) -> np.random.Generator:
        return np.random.default_rng(seed)


class TorchEngine:
    name = "torch"

    def __call__(self, function: str, *arguments: Any, **options: Any) -> Any:
        with default_float64():
            return to_numpy(
                getattr(functional, function)(*map(to_torch, arguments), **{k: to_torch(o) for k, o in options.items()})
            )

    def gradients(self, function: str, d_out: Any, *arguments: Any, **options: Any) -> list[np.ndarray]:
        tensors = [to_torch(argument) for argument in arguments]
        named = {key: to_torch(option) for key, option in options.items()}
        leaves = [
            x
            for x in (*tensors, named.get("bias"), named.get("sinks"))
            if isinstance(x, Tensor) and x.is_floating_point()
        ]
        for leaf in leaves:
            leaf.requires_grad_()
        with default_float64():
            out = getattr(functional, function)(*tensors, **named)
        out.backward(torch.as_tensor(d_out).to(out.dtype))
        return [to_numpy(leaf.grad) for leaf in leaves]

    def generator(self, seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)


NUMPY, TORCH = NumPyEngine(), TorchEngine()
ENGINES = (NUMPY, TORCH)


def to_torch(x: Any) -> Any:
    return torch.from_numpy(x.copy(order="K")) if isinstance(x, np.ndarray) else x


def to_numpy(x: Any) -> Any:
    if isinstance(x, tuple):
        return tuple(map(to_numpy, x))
    return x.detach().numpy() if isinstance(x, Tensor) else x


@contextmanager
def default_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextmanager
def as_in_production() -> Iterator[None]:
    """Without the annotations' checks, which outside tests nobody installs: what a user's mistake meets."""
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def close(found: Any, expected: Any, tolerance: float = 1e-9) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance, atol=tolerance, strict=False)
    assert np.shape(found) == np.shape(expected)
