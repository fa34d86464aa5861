"""Keeping the memory that a step has used for the next one."""

from __future__ import annotations

import ctypes
import sys

MMAP_THRESHOLD, TRIM_THRESHOLD = -3, -1  # glibc's names for mallopt
LARGEST = 2**25  # bytes; glibc takes no more: what is larger still comes fresh from the system


def keep_memory() -> None:
    """Tell glibc to keep what is freed. By default every tensor of a step comes fresh from the system, which zeroes it
    page by page: on small models that took a third of the time. Elsewhere nothing is done."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(MMAP_THRESHOLD, LARGEST)
            mallopt(TRIM_THRESHOLD, 2**31 - 1)
