"""Checks of the extra exercises: FLOPs of a block, a text heat map, and the similarity of positions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from clearhead.reference import sinusoidal_positions

from ..candidate import Candidate, NotWritten
from ..diagnostic import Example
from ..engine import equal
from .common import Recorder


def flops(n: int, d: int, f: int) -> int:
    """Projections 8nd², scores and mixing 4n²d, feed-forward 4ndf; a multiply-add is 2."""
    return 8 * n * d * d + 4 * n * n * d + 4 * n * d * f


MISTAKES: dict[str, Callable[[int, int, int], float]] = {
    "flops-multiply-add": lambda n, d, f: flops(n, d, f) / 2,
    "flops-no-scores": lambda n, d, f: 8 * n * d * d + 4 * n * d * f,
    "flops-no-scores.mixing": lambda n, d, f: flops(n, d, f) - 2 * n * n * d,
    "flops-no-out": lambda n, d, f: flops(n, d, f) - 2 * n * d * d,
    "flops-no-ffn": lambda n, d, f: 8 * n * d * d + 4 * n * n * d,
    "flops-no-ffn.half": lambda n, d, f: flops(n, d, f) - 2 * n * d * f,
}


def check_flops(candidate: Candidate, recorder: Recorder) -> None:
    recorder.start("value")
    case = (3, 5, 7)
    got = candidate.thing(*case)
    if got is None:
        raise NotWritten
    if got == flops(*case):
        return
    key = next((k for k, wrong in MISTAKES.items() if wrong(*case) == got), "value").split(".")[0]
    recorder.add(key, Example({"n": 3, "d": 5, "d_ff": 7}, flops(*case), got))


LEVELS = " .:-=+*#%@"


def draw_heat_map(weights: np.ndarray) -> str:
    levels = np.minimum((weights * len(LEVELS)).astype(int), len(LEVELS) - 1)
    return "\n".join("".join(LEVELS[level] for level in row) for row in levels)


def check_heat_map(candidate: Candidate, recorder: Recorder) -> None:
    recorder.start("value")
    weights = np.array([[1.0, 0.0, 0.0], [0.25, 0.75, 0.0]])
    got = candidate.thing(candidate.engine().to_native(weights))
    if got is None:
        raise NotWritten
    rows = lambda text: [line.rstrip() for line in str(text).rstrip("\n").splitlines()]
    if rows(got) == rows(draw_heat_map(weights)):
        return
    key = "heat-map-transposed" if rows(got) == rows(draw_heat_map(weights.T)) else "value"
    recorder.add(key, Example({"weights": weights}, draw_heat_map(weights), str(got)))


def check_likeness(candidate: Candidate, recorder: Recorder) -> None:
    """Check the matrix PE(i) · PE(j)."""
    recorder.start("value")
    table = sinusoidal_positions(5, 8)
    got = candidate.thing(candidate.engine().to_native(table))
    if got is None:
        raise NotWritten
    array = candidate.engine().to_numpy(got)
    if not equal(array, table @ table.T, 1e-5):
        shorter = table[:2]
        recorder.add("value", Example({"PE": shorter}, shorter @ shorter.T, None if array is None else array[:2, :2]))
