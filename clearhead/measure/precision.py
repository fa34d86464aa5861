"""Which number types give right answers here, each tried in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

PRECISIONS = ("float32", "float16", "bfloat16", "float64", "int8")
REMEDY = "ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16"  # the widest instruction set of oneDNN without AMX
ILLEGAL_INSTRUCTION = ("SIGILL", "status 0xc000001d")  # elsewhere, on Windows

# Whole numbers small enough that every sum is exact in every precision here, so the answer must be equal, not close:
# |Σ| < 256 = 2⁸ for bfloat16's eight bits, and 256 · 127² < 2²⁴. The int64 product is torch's own loop, no library's.
# int8 takes its full range because kernels without VNNI saturate there.
CHILD = """
import sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
except ImportError:
    pass
import torch
import torch.nn.functional as F
dtype = getattr(torch, sys.argv[1])
reach = 127 if dtype == torch.int8 else 1
torch.manual_seed(0)
x, w, g = (torch.randint(-reach, reach + 1, (256, 256)) for _ in range(3))
a, b = x.to(dtype), w.to(dtype)
if dtype == torch.int8:
    pairs = {"product": (torch._int_mm(a, b.T), x @ w.T)}
else:
    d = g.to(dtype)  # the three products of a linear layer's step, without autograd, whose first use takes 0.5 s
    pairs = {"product": (F.linear(a, b), x @ w.T), "gradient": (d @ b, g @ w), "weight gradient": (d.T @ a, g.T @ x)}
    q, v = x.reshape(1, 4, 256, 64), w.reshape(1, 4, 256, 64)
    k = q[:, :, :1].expand(1, 4, 256, 64)  # every key alike, so every weight is 1/256 and the output the mean value
    mean = v.double().mean(2, keepdim=True).expand(1, 4, 256, 64)
    pairs["attention"] = (F.scaled_dot_product_attention(q.to(dtype), k.to(dtype), v.to(dtype)), mean)
for name, (got, exact) in pairs.items():
    error = (got.double() - exact.double()).abs().max().item()
    if not error == 0:
        sys.exit(print(f"wrong: the {name} is off by {error:.3g}"))
print("works")
"""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """How one precision fared in a child process, and the setting under which it works if it does not work bare."""

    dtype: str
    outcome: Literal["works", "wrong", "error", "killed", "timeout"]
    detail: str = ""  # the error's last line, the signal's name, how wrong
    remedy: str | None = None  # NAME=value, to be in the environment before torch is imported

    @property
    def works(self) -> bool:
        return self.outcome == "works"

    def __str__(self) -> str:
        bare = {
            "works": "works",
            "wrong": f"gives wrong results ({self.detail})",
            "error": f"is refused ({self.detail})",
            "killed": f"kills the process ({self.detail})",
            "timeout": f"does not answer ({self.detail})",
        }[self.outcome]
        return f"{bare}; works with {self.remedy}, set before torch is imported" if self.remedy else bare


@cache
def precision_works(dtype: str) -> Probe:
    """Whether matrix products and attention in `dtype` give right answers on this CPU, tried once, in a child process.

    A child, because on some virtual machines bfloat16 ends the process with SIGILL: oneDNN picks AMX, which the
    machine advertises and does not allow. The answer holds for a process that started with the present environment.
    """
    if dtype not in PRECISIONS:
        raise ValueError(f"precision {dtype!r} is not one of {', '.join(PRECISIONS)}")
    bare = try_precision(dtype)
    name, value = REMEDY.split("=")
    if bare.detail in ILLEGAL_INSTRUCTION and os.environ.get(name) != value:
        return replace(bare, remedy=REMEDY if try_precision(dtype, {name: value}).works else None)
    return bare


def try_precision(
    dtype: str, settings: Mapping[str, str] | None = None, *, code: str = CHILD, seconds: float = 60.0
) -> Probe:
    """One child, with `settings` added to its environment. -P: a torch.py in the current folder is not torch."""
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-W", "ignore", "-c", code, dtype],
            env={**os.environ, **(settings or {})},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=seconds,
        )
    except subprocess.TimeoutExpired:
        return Probe(dtype=dtype, outcome="timeout", detail=f"stopped after {seconds:g} s")
    except OSError as error:
        return Probe(dtype=dtype, outcome="error", detail=f"no child process: {error}")
    if child.returncode < 0 or child.returncode >= 0x80000000:  # Windows ends a process with an NTSTATUS
        return Probe(dtype=dtype, outcome="killed", detail=death(child.returncode))
    lines = (child.stderr if child.returncode else child.stdout).strip().splitlines()
    last = lines[-1] if lines else f"silent, exit code {child.returncode}"
    if child.returncode:
        return Probe(dtype=dtype, outcome="error", detail=last)
    if last == "works":
        return Probe(dtype=dtype, outcome="works")
    return Probe(dtype=dtype, outcome="wrong", detail=last.removeprefix("wrong: "))


def death(returncode: int) -> str:
    if returncode > 0:
        return f"status {returncode:#x}"
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"
