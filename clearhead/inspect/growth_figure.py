"""Plot time and memory against length on log-log axes, where a power of n is a straight line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .plotting import figure, save

PANELS = {
    "forward": ("seconds", "forward", "forward, ms", 1e3),
    "backward": ("seconds", "backward", "backward, ms", 1e3),
    "decode": ("seconds", "decode", "one token decoded, ms", 1e3),
    "memory": ("peak", "backward", "peak of a training step, MiB", 1 / 2**20),
}
MARKS = "os^Dv<>Pp*"


def draw_growth(comparisons: Sequence[dict[str, Any]], path: str | Path, theme: str = "light") -> None:
    """`comparisons` as `clearhead compare --json` gives them."""
    with figure(10, 7, theme) as picture:
        axes = picture.subplots(2, 2).flat
        for axis, (what, which, title, unit) in zip(axes, PANELS.values(), strict=True):
            for number, found in enumerate(comparisons):
                points = [(m["length"], m[what][which]) for m in found["measured"] if m[what][which]]
                if points:
                    x, y = zip(*points, strict=True)
                    line = {
                        "marker": MARKS[number % len(MARKS)],
                        "markersize": 4,
                        "linestyle": ("-", "--")[number // 7 % 2],
                    }
                    axis.plot(x, [value * unit for value in y], label=found["name"], **line)
            axis.set(title=title, xlabel="tokens", xscale="log", yscale="log")
            lengths = sorted({m["length"] for found in comparisons for m in found["measured"]})
            axis.set_xticks(lengths, [f"{length:,}" for length in lengths], minor=False)
            axis.set_xticks([], minor=True)
            axis.grid(visible=True, linewidth=0.5)
        axes = picture.axes
        axes[0].legend(fontsize=8)
        save(picture, path)
