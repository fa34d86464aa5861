"""`kernels.c`, compiled when it is first needed and kept in the user's cache; None where there is no compiler.

CC                 the compiler; else cc, gcc or clang
CLEARHEAD_CACHE    where the compiled file is kept; else clearhead/ in XDG_CACHE_HOME or ~/.cache
CLEARHEAD_KERNELS  off: never compile, compute in plain PyTorch
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
FLAGS = ("-std=gnu11", "-O2", "-march=native", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", "-fPIC")


class Matrix(ctypes.Structure):
    """`matrix` of kernels.c."""

    _fields_ = [(name, c_int64) for name in ("kind", "shift", "rows", "columns", "padded")] + [
        (name, c_void_p) for name in ("values", "scales", "table")
    ]


class Step(ctypes.Structure):
    """`step` of kernels.c."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "length", "heads", "groups", "key", "value", "size", "filled")),
        *((name, c_int64) for name in ("pairs", "interleaved", "kind", "shared", "row", "stride")),
        *((name, c_int64) for name in ("angle_stride", "slot_stride", "allowed_stride")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("qkv", "cos", "sin", "slots", "allowed", "owners", "keys", "values", "out")),
    ]


class Layer(ctypes.Structure):
    """`layer` of kernels.c."""

    _fields_ = [
        *((name, ctypes.POINTER(Matrix)) for name in ("qkv", "out", "gate", "up", "down")),
        *((name, c_void_p) for name in ("qkv_bias", "out_bias", "first_norm", "second_norm")),
        *((name, c_float) for name in ("first_eps", "second_eps")),
        *((name, c_void_p) for name in ("x", "y", "normed", "middle", "hidden")),
        ("attention", Step),
    ]


class Space(ctypes.Structure):
    """`space` of kernels.c."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "inner", "states", "reach", "stride", "selected")),
        *((name, c_void_p) for name in ("input", "filter", "filter_bias", "step", "write", "read", "decay", "skip")),
        *((name, c_void_p) for name in ("recent", "memory", "conv", "out")),
    ]


@cache
def kernels() -> ctypes.CDLL | None:
    """The compiled functions; None, said once, where they cannot be had."""
    if os.environ.get("CLEARHEAD_KERNELS") == "off":
        return None
    try:
        library = ctypes.CDLL(str(compiled()))
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"no compiled kernels, so writing is slower, in plain PyTorch: {error}",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    matrix, pointer, whole = ctypes.POINTER(Matrix), c_void_p, c_int64
    for name, arguments in {
        "linear": [matrix, pointer, pointer, whole, pointer, whole, c_int],
        "gated": [matrix, matrix, pointer, whole, pointer, whole, c_int],
        "rms_norm": [pointer, pointer, c_float, pointer, whole, whole, c_int],
        "silu_product": [pointer, pointer, whole, c_int],
        "relu": [pointer, pointer, whole, whole, c_int],
        "add_norm": [pointer, pointer, pointer, pointer, c_float, pointer, whole, whole, c_int],
        "expand": [matrix, pointer, c_int],
        "attend": [ctypes.POINTER(Step), c_int],
        "keep_new": [ctypes.POINTER(Step), c_int],
        "block": [ctypes.POINTER(Layer), c_int],
        "filter": [ctypes.POINTER(Space)],
        "scan": [ctypes.POINTER(Space), c_int],
        "peaks": [pointer, whole, whole, whole, pointer, pointer, c_int],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def compiled() -> Path:
    """The shared library for this source, compiler and processor, made if there is none yet."""
    command = compiler()
    key = hashlib.sha256("\0".join((SOURCE.read_text(), *command, *FLAGS, processor())).encode()).hexdigest()[:16]
    folder = cache_folder()
    path = folder / f"kernels-{key}.so"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as aside:
            make(command, Path(aside), path)
    return path


def make(command: list[str], aside: Path, path: Path) -> None:
    """Compile, link and only then give the file its name, so that nobody loads half of it.

    OpenMP is compiled for but not linked: torch has brought its own into the process; two would fight for the cores.
    """
    made = (aside / "kernels.o", aside / "kernels.so")
    for step in ([*FLAGS, "-c", str(SOURCE), "-o", str(made[0])], ["-shared", str(made[0]), "-lm", "-o", str(made[1])]):
        done = subprocess.run([*command, *step], capture_output=True, text=True, timeout=120)
        if done.returncode:
            said = done.stderr.strip().splitlines() or ["no reason given"]
            raise OSError(f"{command[0]} could not compile {SOURCE.name}: {said[0]}")
    made[1].replace(path)


def compiler() -> list[str]:
    if given := shlex.split(os.environ.get("CC", "")):
        return given
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise OSError("there is no C compiler (cc, gcc or clang); install one, or name it in CC")


def processor() -> str:
    """What `-march=native` depends on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    about = {line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join((platform.machine(), platform.processor(), *sorted(about)))


def cache_folder() -> Path:
    if given := os.environ.get("CLEARHEAD_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "clearhead"
