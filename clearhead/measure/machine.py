"""The computer, as the operating system and torch describe it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from clearhead.memory import container_memory, physical_memory, read_system_file

# The processor's flag -> the usual name.
INSTRUCTIONS = {
    "avx2": "avx2",
    "avx512f": "avx512",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_tile": "amx",
    "asimd": "neon",
    "sve": "sve",
}


@dataclass(frozen=True, kw_only=True)
class Computer:
    """The computer as the operating system describes it to this process. Sizes are in bytes; None means unknown."""

    platform: str
    processor: str | None
    instructions: tuple[str, ...]
    cores: int  # available to this process
    quota: float | None  # a container's CPU limit, in cores
    memory_total: int | None
    memory_available: int | None
    memory_limit: int | None  # a container's memory limit
    folder: str
    disk_free: int


@dataclass(frozen=True, kw_only=True)
class Device:
    name: str
    model: str | None
    memory: int | None


@dataclass(frozen=True, kw_only=True)
class Compile:
    """What torch.compile needs on a CPU: a C++ compiler and Python's own headers."""

    compiler: str | None
    headers: bool

    @property
    def possible(self) -> bool:
        return self.compiler is not None and self.headers


def look() -> Computer:
    processor, flags = look_at_processor()
    total, available = look_at_memory()
    limit = container_memory()
    return Computer(
        platform=platform.platform(),
        processor=processor,
        instructions=tuple(name for flag, name in INSTRUCTIONS.items() if flag in flags),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quota=container_quota(),
        memory_total=total,
        memory_available=available,
        memory_limit=limit if limit is not None and (total is None or limit < total) else None,
        folder=str(Path.cwd()),
        disk_free=shutil.disk_usage(Path.cwd()).free,
    )


def look_at_processor() -> tuple[str | None, set[str]]:
    """Return the processor's name and its flags, spelled as on Linux."""
    lines = [line.partition(":") for line in read_system_file("/proc/cpuinfo").splitlines()]
    facts = {key.strip(): value.strip() for key, _, value in lines}
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    name = facts.get("model name")
    if sys.platform == "darwin":
        name = sysctl("machdep.cpu.brand_string")
        flags = {flag for flag in ("avx2", "avx512f") if sysctl(f"hw.optional.{flag}") == "1"}
    if platform.machine().lower() in ("arm64", "aarch64"):
        flags.add("asimd")  # every processor of this architecture has it
    return name or platform.processor() or None, flags


def look_at_memory() -> tuple[int | None, int | None]:
    """Return total and available memory in bytes."""
    lines = [line.split() for line in read_system_file("/proc/meminfo").splitlines()]
    facts = {words[0]: int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit()}
    return facts.get("MemTotal:") or physical_memory(), facts.get("MemAvailable:")


def container_quota() -> float | None:
    """Return a container's CPU limit in cores, from cgroup v2 or else v1."""
    v1 = "/sys/fs/cgroup/cpu/cpu.cfs_quota_us", "/sys/fs/cgroup/cpu/cpu.cfs_period_us"
    words = (read_system_file("/sys/fs/cgroup/cpu.max") or " ".join(map(read_system_file, v1))).split()
    return int(words[0]) / int(words[1]) if len(words) == 2 and all(word.isdigit() for word in words) else None


def meet_torch() -> tuple[int | None, tuple[Device, ...], str | None]:
    """Return torch's threads and devices, and the error if it cannot be imported."""
    try:
        import torch
    except (ImportError, OSError) as error:
        return None, (), str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    devices = [Device(name="cpu", model=look_at_processor()[0], memory=look_at_memory()[0])]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            card = torch.cuda.get_device_properties(index)
            devices.append(Device(name=f"cuda:{index}", model=card.name, memory=card.total_memory))
    if torch.backends.mps.is_available():
        devices.append(Device(name="mps", model=None, memory=None))
    return torch.get_num_threads(), tuple(devices), None


def look_for_compiler() -> Compile:
    wanted = (os.environ.get("CXX"), *(("cl",) if sys.platform == "win32" else ("g++", "clang++")))
    found = (shutil.which(name) for name in wanted if name)
    return Compile(
        compiler=next((path for path in found if path), None),
        headers=Path(sysconfig.get_path("include"), "Python.h").exists(),
    )


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def sysctl(name: str) -> str:
    run = subprocess.run(["sysctl", "-n", name], capture_output=True, text=True, check=False)
    return run.stdout.strip()
