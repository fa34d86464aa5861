"""flash_attention at n = 16,384, one head, d 64: under 64 MiB beside its inputs, and equal to `attention`.

The suite takes half that length, whose whole pattern would be 256 MiB; `make proof` takes all of it.
"""

import subprocess
import sys
import tracemalloc

import numpy as np
import pytest
import torch

import clearhead.functional as functional
import clearhead.reference as reference

from .adapters import as_in_production, close

DIM, LIMIT = 64, 64 * 2**20
LENGTHS = [8192, pytest.param(16384, marks=pytest.mark.proof)]

CHILD = """
import pathlib, re, torch
from clearhead.functional import {function}
causal, masked, backward = {causal}, {masked}, {backward}
n, d = {length}, {dim}
torch.manual_seed(0)
def peak():  # not resource.ru_maxrss: Linux hands that on from the parent, whose peak would hide the child's
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
def run(n):
    q, k, v = (torch.randn(1, 1, n, d, requires_grad=backward) for _ in range(3))
    mask = torch.arange(n) % 7 > 0 if masked else None
    before = peak()
    out = {function}(q, k, v, causal=causal, mask=mask)
    if backward:
        out.sum().backward()
    return peak() - before
run(256)
print(run(n))
"""


def inputs(length: int) -> list[np.ndarray]:
    return [np.random.default_rng(seed).standard_normal((length, DIM), np.float32) for seed in range(3)]


def check(out: np.ndarray, q: np.ndarray, k: np.ndarray, v: np.ndarray, causal: bool) -> None:
    rows = np.array([0, 1, 127, 128, 5003, len(q) - 1])
    mask = np.arange(len(k)) <= rows[:, None] if causal else np.ones((1, len(k)), bool)
    close(out[rows], reference.attention(q[rows], k, v, mask=mask), 1e-5)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_numpy(causal, length):
    q, k, v = inputs(length)
    with as_in_production():
        tracemalloc.start()
        out = reference.flash_attention(q, k, v, causal=causal)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < LIMIT
    check(out, q, k, v, causal)


def test_numpy_backward():
    q, k, v = inputs(4096)
    with as_in_production():
        tracemalloc.start()
        reference.flash_attention_backward(v, q, k, v, causal=True)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 16 * 2**20  # one pattern of 4096 × 4096 would be 64 MiB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
@pytest.mark.parametrize(
    ("causal", "masked", "backward", "length"),
    [
        (False, False, False, 8192),
        (True, False, True, 8192),
        (True, True, True, 8192),  # the masks of all blocks, had they been kept, would be 128 MiB
        pytest.param(False, False, False, 16384, marks=pytest.mark.proof),
        pytest.param(True, False, True, 16384, marks=pytest.mark.proof),
        pytest.param(True, True, False, 16384, marks=pytest.mark.proof),
    ],
)
def test_torch(causal, masked, backward, length):
    assert child("flash_attention", causal, masked, backward, length) < LIMIT


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="peak memory is read from /proc")
def test_the_measure_sees_a_pattern():
    assert child("attention", False, False, False, 4096) > 4096 * 4096 * 4


def child(function: str, causal: bool, masked: bool, backward: bool, length: int) -> int:
    code = CHILD.format(function=function, causal=causal, masked=masked, backward=backward, length=length, dim=DIM)
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(found.stdout)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("causal", [False, True])
def test_torch_is_equal(causal, length):
    q, k, v = inputs(length)
    out = functional.flash_attention(*map(torch.from_numpy, (q, k, v)), causal=causal)
    check(out.numpy(), q, k, v, causal)
