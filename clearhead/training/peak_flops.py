"""How fast this machine multiplies matrices, to say what share of that speed a run reaches."""

from __future__ import annotations

import time

import torch

SIZE = 1024
ROUNDS = 5


def matrix_peak(device: torch.device) -> float:
    """FLOP/s of the fastest of a few float32 matrix products, each some milliseconds on two cores."""
    a, b = (torch.ones(SIZE, SIZE, device=device) for _ in range(2))
    best = float("inf")
    for _ in range(ROUNDS + 1):
        start = time.perf_counter()
        (a @ b).sum().item()  # waits for the device
        best = min(best, time.perf_counter() - start)
    return 2 * SIZE**3 / best
