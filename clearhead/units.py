"""Counts and sizes as people write them: `124.4M`, `8.1G`, `474.7 MiB`."""


def count_text(count: int) -> str:
    """`124.4M`, `1.6B`: a count of parameters."""
    for size, letter in ((10**15, "Q"), (10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= size:
            return f"{count / size:.1f}{letter}"
    return str(count) if count else "·"


def flops_text(count: int) -> str:
    """`8.1G`: a count of floating-point operations."""
    return count_text(count).replace("B", "G").replace("Q", "P")


def bytes_text(count: int) -> str:
    """`474.7 MiB`."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
