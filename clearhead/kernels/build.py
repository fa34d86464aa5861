"""Compile and load `kernels.c`. The library is compiled once for each machine and kept in the user's cache.

CC                 the C compiler; default: cc, gcc or clang, the first that is found
CLEARHEAD_CACHE    folder for the compiled library; default: clearhead/ in XDG_CACHE_HOME or ~/.cache
CLEARHEAD_KERNELS  off: do not use compiled kernels; everything runs in PyTorch
CLEARHEAD_MARCH    instruction set, as of GCC's -march (x86-64-v3, x86-64-v4); default: native; portable: plain C
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from ctypes import c_float, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).with_name("kernels.c")
PREBUILT = Path(__file__).with_name("prebuilt")  # wheels have one library for each instruction set there
FLAGS = ("-std=gnu11", "-O2", "-ffp-contract=off", "-fno-math-errno", "-fPIC")
PATIENCE = 120  # seconds for one compiler run
RETRY = 24 * 3600  # seconds after which a compiler that failed is tried again
NEEDS = {"x86-64-v3": {"avx2", "fma", "f16c", "bmi2"}, "x86-64-v4": {"avx512f", "avx512bw", "avx512vl", "avx512dq"}}
"""Processor flags, as in /proc/cpuinfo, without which code for an instruction set would crash."""


class Matrix(ctypes.Structure):
    """`matrix` of kernels.c."""


Matrix._fields_ = [
    *((name, c_int64) for name in ("kind", "shift", "rows", "columns", "padded")),
    *((name, c_void_p) for name in ("values", "scales", "table")),
    ("parts", ctypes.POINTER(Matrix)),
]


class AttentionArguments(ctypes.Structure):
    """`attention` of kernels.c."""

    _fields_ = [
        *((name, c_int64) for name in ("tokens", "heads", "groups", "key", "value")),
        *((name, c_int64) for name in ("page", "table_stride", "mask_stride")),
        *((name, c_int64) for name in ("pairs", "interleaved", "angles", "kind", "qkv_stride", "out_stride")),
        ("scale", c_float),
        *((name, c_void_p) for name in ("qkv", "cos", "sin", "rows", "slots", "lengths", "mask", "table")),
        *((name, c_void_p) for name in ("keys", "values", "out")),
    ]


class LayerArguments(ctypes.Structure):
    """`layer` of kernels.c."""

    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "gate", "up", "down")),
        *((name, c_void_p) for name in ("qkv_bias", "out_bias", "first_norm", "second_norm")),
        *((name, c_float) for name in ("first_eps", "second_eps")),
        *((name, c_void_p) for name in ("x", "y", "normed", "middle", "hidden")),
        ("attention", AttentionArguments),
    ]


class WorkSpace(ctypes.Structure):
    """`space` of kernels.c."""

    _fields_ = [
        *((name, c_int64) for name in ("batch", "inner", "states", "reach", "stride", "selected")),
        *((name, c_void_p) for name in ("input", "filter", "filter_bias", "step", "write", "read", "decay", "skip")),
        *((name, c_void_p) for name in ("recent", "memory", "conv", "out")),
    ]


STRUCTS = (Matrix, AttentionArguments, LayerArguments, WorkSpace)


class NoKernels(OSError):
    """The compiled kernels are not available; the message says why."""


@cache
def kernels() -> ctypes.CDLL | None:
    """The compiled library; None if it is turned off or cannot be built, which is reported once."""
    if os.environ.get("CLEARHEAD_KERNELS") == "off":
        return None
    try:
        return load(library_path())
    except KnownFailure:
        return None
    except OSError as error:
        text = f"the compiled kernels are not available, so generation is slower, in plain PyTorch: {error}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
        return None


class KnownFailure(NoKernels):
    """An earlier process tried this compiler, failed, and reported it."""


def load(path: Path) -> ctypes.CDLL:
    """The library with the types of its functions, after a check that its structs are ours."""
    library = ctypes.CDLL(str(path))
    sizes = (c_int64 * 16)()
    library.describe(sizes)
    for struct, size in zip(STRUCTS, sizes, strict=False):
        if ctypes.sizeof(struct) != size:
            known = ctypes.sizeof(struct)
            raise NoKernels(f"{path} was built with a {struct.__name__} of {size} bytes, but it has {known}; delete it")
    matrix, pointer, whole = ctypes.POINTER(Matrix), c_void_p, c_int64
    for name, arguments in {
        "linear": [matrix, pointer, pointer, whole, pointer, whole, c_int],
        "gated": [matrix, matrix, pointer, whole, pointer, whole, c_int],
        "rms_norm": [pointer, pointer, c_float, pointer, whole, whole, c_int],
        "silu_product": [pointer, pointer, whole, c_int],
        "relu": [pointer, pointer, whole, whole, c_int],
        "add_norm": [pointer, pointer, pointer, pointer, c_float, pointer, whole, whole, c_int],
        "expand": [matrix, pointer, c_int],
        "attend": [ctypes.POINTER(AttentionArguments), c_int],
        "write_kv": [ctypes.POINTER(AttentionArguments), c_int],
        "block": [ctypes.POINTER(LayerArguments), c_int],
        "filter": [ctypes.POINTER(WorkSpace)],
        "scan": [ctypes.POINTER(WorkSpace), c_int],
        "int4_scales": [pointer, whole, whole, pointer, pointer, whole, pointer, c_int],
        "int4_codes": [pointer, whole, whole, pointer, pointer, pointer, c_int],
        "peaks": [pointer, whole, whole, whole, pointer, pointer, c_int],
    }.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, None
    return library


def library_path() -> Path:
    """The compiled library for this source, compiler and processor; compiled now if the cache has no whole copy.

    The file's name ends with a digest of its contents, so a damaged file is found and compiled again.
    """
    if (shipped := prebuilt_library()) is not None:
        return shipped
    command, flags = compiler(), (*FLAGS, *machine_flags())
    text = "\0".join((SOURCE.read_text(encoding="utf-8"), *command, *flags, processor()))
    name = f"kernels-{digest(text.encode())}"
    folder = private_folder(cache_folder())
    for path in sorted(folder.glob(f"{name}-*.so")):
        check_owner(path)
        if path.stem == f"{name}-{digest(path.read_bytes())}":
            return path
        path.unlink()
    failure = folder / f"{name}.failed"
    if failure.exists() and time.time() - failure.stat().st_mtime < RETRY:
        raise KnownFailure(failure.read_text(encoding="utf-8"))
    print("clearhead: compiling the kernels for this processor, once; this takes some seconds", file=sys.stderr)
    with tempfile.TemporaryDirectory(dir=folder) as aside:
        try:
            made = compile_library(command, flags, Path(aside))
        except NoKernels as error:
            failure.write_text(str(error), encoding="utf-8")
            raise
        failure.unlink(missing_ok=True)
        path = folder / f"{name}-{digest(made.read_bytes())}.so"
        made.chmod(0o700)  # whatever the umask: a library that others may write is not loaded
        with made.open("rb") as file:
            os.fsync(file.fileno())
        made.replace(path)
    return path


def prebuilt_library() -> Path | None:
    """The library that came with the wheel for this processor, if there is one; CC or CLEARHEAD_MARCH turn it off."""
    if os.environ.get("CC") or os.environ.get("CLEARHEAD_MARCH") or platform.machine() not in ("x86_64", "AMD64"):
        return None
    flags = processor_flags()
    found, needed = None, set[str]()
    for march, needs in NEEDS.items():  # each instruction set includes those before it
        needed |= needs
        if needed <= flags and (path := PREBUILT / f"{march}.so").exists():
            found = path
    return found


def compile_library(command: list[str], flags: tuple[str, ...], folder: Path) -> Path:
    """Compile into `folder`. OpenMP is not linked: the kernels use the one that torch has loaded."""
    path = folder / "kernels.so"
    try:
        done = subprocess.run(
            [*command, *flags, "-shared", str(SOURCE), "-lm", "-o", str(path)],
            capture_output=True,
            text=True,
            timeout=PATIENCE,
        )
    except subprocess.TimeoutExpired:
        raise NoKernels(f"{command[0]} took more than {PATIENCE} seconds to compile {SOURCE.name}") from None
    if done.returncode or not path.exists():
        reason = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip())
        raise NoKernels(f"{command[0]} could not compile {SOURCE.name}: {reason or 'it gave no reason'}")
    return path


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def compiler() -> list[str]:
    """The command of the C compiler, from CC or the first that is found."""
    if given := shlex.split(os.environ.get("CC", "")):
        if shutil.which(given[0]) is None:
            raise NoKernels(f"CC is {given[0]!r}, but there is no such program")
        return given
    for name in ("cc", "gcc", "clang"):
        if found := shutil.which(name):
            return [found]
    raise NoKernels("there is no C compiler (cc, gcc or clang); install one, or name it in CC")


def machine_flags() -> tuple[str, ...]:
    """The compiler's options for CLEARHEAD_MARCH."""
    march = os.environ.get("CLEARHEAD_MARCH") or "native"
    if march == "portable":
        return ("-DPORTABLE",)
    missing = sorted(NEEDS.get(march, set()) - processor_flags())
    if missing:
        raise NoKernels(f"CLEARHEAD_MARCH is {march}, but this processor has no {', '.join(missing)}")
    return (f"-march={march}",)


def processor() -> str:
    """What `-march=native` depends on."""
    lines = {line for line in cpuinfo() if line.startswith(("model name", "flags", "Features", "CPU part"))}
    return "\n".join((platform.machine(), platform.processor(), *sorted(lines)))


def processor_flags() -> set[str]:
    return {flag for line in cpuinfo() if line.startswith("flags") for flag in line.partition(":")[2].split()}


def cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8").splitlines() if path.exists() else []


def cache_folder() -> Path:
    if given := os.environ.get("CLEARHEAD_CACHE"):
        return Path(given)
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "clearhead"


def private_folder(folder: Path) -> Path:
    """Make the folder if it is missing, and check that nobody else can put a library there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    check_owner(folder)
    return folder


def check_owner(path: Path) -> None:
    """Refuse a file or folder that another user owns or may write: loading a library runs its code."""
    if os.name != "posix":
        return
    found = path.stat()
    if found.st_uid not in (os.getuid(), 0):
        raise NoKernels(f"{path} belongs to another user; set CLEARHEAD_CACHE to a folder of your own")
    if found.st_mode & 0o022:
        raise NoKernels(f"other users may write {path}; to use it: chmod go-w {path}")
