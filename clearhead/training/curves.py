"""Loss curves of one or more runs in one figure."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from clearhead.inspect.plotting import colours, figure, save

from .checkpoint import ResumeError
from .run import Run


def draw_curves(folders: Sequence[str | Path], path: str | Path, theme: str = "light") -> None:
    """Draw the smoothed training loss (thin line) and the validation loss (dots) against steps."""
    with figure(8, 4.8, theme) as picture:
        axis, palette = picture.subplots(), colours(theme)
        names = [Path(folder).name for folder in folders]
        for i, folder in enumerate(folders):
            lines = Run(folder).history()
            if not lines:
                raise ResumeError(f"{folder} has no metrics.jsonl, so there is no curve to draw")
            colour = palette[i % len(palette)]
            name = names[i] if names.count(names[i]) == 1 else str(folder)
            trained = [line for line in lines if "train/loss" in line]
            losses = smooth([line["train/loss"] for line in trained])
            label = f"{name}, training (smoothed)"
            axis.plot([line["step"] for line in trained], losses, color=colour, linewidth=1, label=label)
            measured = [(line["step"], line["val/loss"]) for line in lines if "val/loss" in line]
            if measured:
                axis.plot(*zip(*measured, strict=True), "o-", color=colour, markersize=4, label=f"{name}, validation")
        axis.set_xlabel("step")
        axis.set_ylabel("loss (nats)")
        axis.set_title("loss")
        axis.grid(alpha=0.3)
        axis.legend(frameon=False)
        save(picture, path)


def smooth(values: list[float], weight: float = 0.9) -> list[float]:
    """An exponential moving average with bias correction."""
    out, mean, total = [], 0.0, 0.0
    for value in values:
        mean, total = weight * mean + (1 - weight) * value, weight * total + 1 - weight
        out.append(mean / total)
    return out
