"""Timing in turns, so that whatever else the machine does falls on all alike."""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from .results import add_times


def take_turns(contestants: Mapping[str, Callable[[], object]], rounds: int = 9) -> dict[str, float]:
    """Median seconds of each, after one warm-up; in every round each runs once."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for run in contestants.values():
        run()
    for _ in range(rounds):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(taken) for name, taken in times.items()}


def peak() -> int:
    """Bytes that this process has had at most; resource.ru_maxrss would count its parent's."""
    return 1024 * int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])  # type: ignore[index]


def report(title: str, seconds: Mapping[str, float], ours: str) -> None:
    """Print the times, and add the best peer's to the table at the end."""
    add_times(title, seconds, ours)
    print_times(title, seconds, ours)


def print_times(title: str, seconds: Mapping[str, float], ours: str) -> None:
    """A line for each contestant: its time, and how many times as long as ours it takes."""
    print(title)
    for name, taken in seconds.items():
        print(f"  {name:<36} {taken * 1e3:9.2f} ms   {taken / seconds[ours]:5.2f}×")
