"""Checks of arguments that both engines share: one clear sentence before any arithmetic.

NumPy broadcasts and casts silently, so a gradient of the wrong shape or a token id of 2.7 would give a plausible wrong
answer. Each function below raises instead. Torch tensors work too: only `.shape` and `.dtype` are read.

Where to check: at the public functions, once, before any arithmetic. Inner helpers trust their callers, so the formulas
stay readable. What a check costs is a few comparisons of shapes; what it saves is an hour with a debugger.

A rule of thumb for messages: name the argument, its value, and what it must be. The reader should not need the source.
"""

from typing import Any

import numpy as np


def check_gradient(d_out: Any, *shape: int) -> None:
    """`d_out` must have the shape of the output that it is the gradient of.

    A gradient of shape (D,) for an output (T, D) would broadcast, and every position would get the same gradient.
    """
    given = tuple(np.shape(d_out))
    if given != shape:
        raise ValueError(f"d_out is {given}, but the output that it is the gradient of is {shape}")


def check_same_shape(like: Any, **arrays: Any) -> None:
    """All arrays must have the shape of `like`, the function's x.

    >>> check_same_shape(np.zeros((2, 3)), step=np.zeros((2, 3)))            # equal: nothing happens
    """
    for name, array in arrays.items():
        if tuple(array.shape) != tuple(like.shape):
            raise ValueError(f"{name} is {tuple(array.shape)}, but x is {tuple(like.shape)}; they must be the same")


def check_ids(ids: Any, what: str = "token") -> None:
    """Ids must be integers. A float id is refused, because cutting 2.7 to 2 would hide a mistake.

    Booleans are refused too: a mask passed in the place of ids would read rows 0 and 1 of the table.
    """
    if str(ids.dtype).removeprefix("torch.").rstrip("0123456789") not in ("int", "uint"):
        raise TypeError(f"{what} ids are {ids.dtype}, but must be integers, such as int64")


def check_range(ids: Any, size: int, what: str, where: str) -> None:
    """Ids must be 0 … size − 1. Negative ids are refused: NumPy would count them from the end."""
    outside = ids[(ids < 0) | (ids >= size)]
    if outside.size:
        raise IndexError(f"{what} {outside.flat[0]} is outside {where} of {size}")
