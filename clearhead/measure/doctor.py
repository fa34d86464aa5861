"""Report what this machine offers: versions, cores, memory, measured speed, and the precisions that work."""

from __future__ import annotations

import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Literal

from clearhead.extras import install_command, torch_missing
from clearhead.kernels.build import compiler, prebuilt_library

from .machine import Compile, Computer, Device, installed_version, look, look_for_compiler, meet_torch
from .precision import PRECISIONS, Probe, precision_works

CORE = (
    "clearhead",
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "jaxtyping",
    "msgspec",
    "rich",
    "click",
)
USES = (  # purpose, package, and the extra that installs it
    ("everything but the NumPy engine", "torch", "torch"),
    ("pictures", "matplotlib", "plot"),
    ("the parametric scaling law", "scipy", "scaling"),
    ("sound files other than WAV", "soundfile", "audio"),
    ("reading images", "pillow", "vision"),
    ("handwritten digits", "scikit-learn", "vision"),
    ("TensorBoard's files", "tensorboard", "tensorboard"),
    ("the built-in dates", "babel", "translate"),
    ("scores of translations", "sacrebleu", "translate"),
    ("models on the Hub", "huggingface-hub", "hub"),
    ("GGUF files", "gguf", "gguf"),
    ("ONNX files", "onnx", "onnx"),
    ("the server", "starlette", "serve"),
    ("widgets in notebooks", "anywidget", "notebook"),
    ("Parquet files", "pyarrow", "data"),
    ("structured generation", "llguidance", "grammar"),
    ("building the docs", "sphinx", "docs"),
    ("the evaluation harness", "lm_eval", "lm-eval"),
    ("comparing with transformers", "transformers", None),
    ("shapes checked in tests", "beartype", None),
    ("running the tests", "pytest", None),
)
SETTINGS = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "ONEDNN_MAX_CPU_ISA",
    "CUDA_VISIBLE_DEVICES",
    "CC",
    "CXX",
    "CLEARHEAD_KERNELS",
    "CLEARHEAD_CACHE",
    "HF_HUB_OFFLINE",
)
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The best speed of several runs. If other programs were running, the machine can do more."""

    gemm_tflops: float  # float32 matrix product, 2·n³ operations
    read_gbps: float  # 10⁹ bytes per second, one pass over more data than most caches hold


@dataclass(frozen=True, kw_only=True)
class Use:
    """An optional package, and what Clearhead uses it for."""

    purpose: str
    package: str
    extra: str | None  # Clearhead's extra; None if you install the package by its own name
    version: str | None

    @property
    def install(self) -> str:
        return f"pip install {self.package}" if self.extra is None else install_command(self.extra)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A problem and its fix, in one or two sentences."""

    level: Literal["error", "warning"]
    text: str


@dataclass(frozen=True, kw_only=True)
class DoctorReport:
    """The doctor's full report. Without probes, `precisions` is empty and `speed` is None."""

    python: str
    versions: Mapping[str, str | None]
    machine: Computer
    settings: Mapping[str, str]
    threads: int | None
    devices: tuple[Device, ...]
    precisions: tuple[Probe, ...]
    speed: Speed | None
    compile: Compile
    kernels: str | None  # where they come from: the wheel, or the C compiler that builds them
    uses: tuple[Use, ...]
    findings: tuple[Finding, ...] = ()

    @property
    def ok(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        data = {"ok": self.ok, **asdict(self)}
        data["precisions"] = {probe.dtype: {"works": probe.works, **asdict(probe)} for probe in self.precisions}
        data["compile"]["possible"] = self.compile.possible
        data["uses"] = [{**asdict(use), "install": use.install} for use in self.uses]
        return data


def examine(*, probe: bool = True, progress: Callable[[str], object] = lambda stage: None) -> DoctorReport:
    """Examine this machine. With `probe`, also try every precision and measure speed (about ten seconds)."""
    machine = look()
    progress("importing torch")
    threads, devices, broken = meet_torch()
    precisions: tuple[Probe, ...] = ()
    speed = None
    if probe and broken is None:
        progress("trying each precision in a process of its own")
        with ThreadPoolExecutor(max(1, min(len(PRECISIONS), machine.cores))) as pool:
            precisions = tuple(pool.map(precision_works, PRECISIONS))
        if precisions[0].works:
            progress("measuring matrix products and memory")
            speed = Speed(gemm_tflops=measure_gemm(), read_gbps=measure_read(machine))
    report = DoctorReport(
        python=platform.python_version(),
        versions={name: installed_version(name) for name in CORE},
        machine=machine,
        settings={name: os.environ[name] for name in SETTINGS if name in os.environ},
        threads=threads,
        devices=devices,
        precisions=precisions,
        speed=speed,
        compile=look_for_compiler(),
        kernels=kernel_source(),
        uses=tuple(
            Use(purpose=what, package=name, extra=extra, version=installed_version(name)) for what, name, extra in USES
        ),
    )
    return replace(report, findings=diagnose(report, broken))


def kernel_source() -> str | None:
    """Return where the decoding kernels come from, or None if there is neither a prebuilt library nor a compiler."""
    if (library := prebuilt_library()) is not None:
        return f"prebuilt for {library.stem}"
    try:
        found = shutil.which(compiler()[0])
    except OSError:
        return None
    return None if found is None else f"can be compiled by {found}"


def best(action: Callable[[], object], seconds: float) -> float:
    """Run `action` at least three times, for about `seconds` in all, and return the shortest time."""
    times: list[float] = []
    while len(times) < 3 or sum(times) < seconds:
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    return min(times)


def measure_gemm() -> float:
    """Measure float32 TFLOP/s of an n × n product; n grows until one product takes 20 ms."""
    import torch

    def product(n: int) -> Callable[[], object]:
        return partial(torch.mm, torch.rand(n, n), torch.rand(n, n), out=torch.empty(n, n))

    n = 512
    while n < 8192 and best(product(n), 0.0) < 0.02:
        n *= 2
    return 2 * n**3 / best(product(n), 0.6) / 1e12


def measure_read(machine: Computer) -> float:
    """Measure GB/s of summing an array of 512 MiB, more than most caches hold.

    If less than 4 GiB of memory is free, the array takes an eighth of it.
    """
    import torch

    free = min(size for size in (4 * GIB, machine.memory_available, machine.memory_limit) if size is not None)
    data = torch.ones(max(free // 8, 2**20) // 8, dtype=torch.int64)
    return data.nbytes / best(data.sum, 0.6) / 1e9


def diagnose(report: DoctorReport, broken: str | None) -> tuple[Finding, ...]:
    """List the problems and their fixes. It is an error if torch or float32 does not work; the rest are warnings."""
    machine, found = report.machine, []

    def warn(text: str) -> None:
        found.append(Finding(level="warning", text=text))

    if report.versions["torch"] is None:
        found.append(Finding(level="error", text=torch_missing("Everything but the NumPy engine")))
    elif broken is not None:
        text = f"torch is installed but cannot be imported ({broken}): pip install --force-reinstall torch."
        found.append(Finding(level="error", text=text))
    for probe in report.precisions:
        if probe.works:
            continue
        name, text = probe.dtype, str(probe)
        if probe.remedy is not None:
            way_out = f"set {probe.remedy} before torch is imported."
            text = f"{replace(probe, remedy=None)} here"
        elif name == "float32":
            way_out = "nothing can run here; try another build of torch (pip install --force-reinstall torch)."
        else:
            way_out = "use float32."
        level: Literal["error", "warning"] = "error" if name == "float32" else "warning"
        found.append(Finding(level=level, text=f"{name} {text}: {way_out}"))
    allowed = max(1, int(min(machine.cores, machine.quota or machine.cores)))
    if report.threads is not None and report.threads > allowed:
        warn(
            f"torch uses {report.threads} threads, more than the {allowed} usable cores: set OMP_NUM_THREADS={allowed}."
        )
    if report.compile.compiler is None:
        warn("torch.compile cannot work without a C++ compiler: install g++ or clang++.")
    elif not report.compile.headers:
        warn("torch.compile cannot work without Python.h: install python3-dev (Debian) or python3-devel (Fedora).")
    if report.kernels is None:
        warn("the kernels for decoding need a C compiler: install gcc or clang. Without one, decoding is slower.")
    if machine.memory_available is not None and machine.memory_available < GIB:
        warn(f"only {machine.memory_available / GIB:.1f} GiB of memory is free: choose a small preset.")
    if machine.disk_free < GIB:
        warn(
            f"only {machine.disk_free / GIB:.1f} GiB is free on the disk of {machine.folder}: checkpoints may not fit."
        )
    return tuple(found)
