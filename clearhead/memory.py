"""How much memory this process may use."""

from __future__ import annotations

import os
from pathlib import Path


def read_system_file(path: str) -> str:
    """The text of a system file; empty if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def physical_memory() -> int | None:
    """Bytes of RAM in this machine; None if unknown."""
    names = ("SC_PHYS_PAGES", "SC_PAGE_SIZE")
    if not hasattr(os, "sysconf") or not set(names) <= os.sysconf_names.keys():
        return None
    pages, size = map(os.sysconf, names)
    return pages * size


def container_memory() -> int | None:
    """The memory limit of a container in bytes (cgroup v2, then v1); None if there is none."""
    text = read_system_file("/sys/fs/cgroup/memory.max")
    text = text or read_system_file("/sys/fs/cgroup/memory/memory.limit_in_bytes")
    return int(text) if text.strip().isdigit() else None


def memory_budget() -> int | None:
    """Bytes that this process can have at most; None if unknown."""
    known = [size for size in (physical_memory(), container_memory()) if size]
    return min(known, default=None)
