"""What `clearhead train` shows while it trains: a progress bar or lines, samples, and a loss curve."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from clearhead.training.loop import Callbacks

QUIET_SECONDS = 10.0  # between two lines without a terminal
SAMPLE_WIDTH = 160  # characters of a sample that are shown
PLOT_WIDTH, PLOT_HEIGHT = 68, 10  # columns and rows of the loss curve
PLOT_SECONDS = 0.5  # between two drawings
DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character, by row and column


@contextlib.contextmanager
def show_progress(steps: int, first: bool = True, plot: bool = False) -> Iterator[Callbacks]:
    """Callbacks that print to stderr: a live display on a terminal, else lines. Only the first process prints."""
    from clearhead.training.loop import Callbacks

    if not first:
        yield Callbacks()
    elif not sys.stderr.isatty():
        callbacks, curve = line_callbacks(steps), LossCurve()
        if plot:
            show = callbacks.step

            def collect(numbers: dict[str, Any]) -> None:
                curve.add(numbers)
                show(numbers)

            callbacks.step = collect
        try:
            yield callbacks
        finally:
            if plot and curve.training:
                click.echo(curve.draw(), err=True)
    else:
        with live_callbacks(steps, plot) as callbacks:
            yield callbacks


@contextlib.contextmanager
def live_callbacks(steps: int, plot: bool) -> Iterator[Callbacks]:
    """A progress line of at most 80 columns, with the loss curve above it if `plot`."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.text import Text

    from clearhead.training.loop import Callbacks

    console, curve, clock = Console(stderr=True, highlight=False), LossCurve(), RemainingTime(steps)
    state: dict[str, Any] = {"line": f"{'preparing':<20}", "status": "", "drawn": 0.0, "curve": ""}

    def render() -> Group:
        line = state["line"] + (f"  {state['status']}" if state["status"] else "")
        parts = [Text(state["curve"])] if state["curve"] else []
        return Group(*parts, Text(line, no_wrap=True, overflow="crop"))

    with Live(console=console, get_renderable=render, refresh_per_second=8) as live:

        def message(text: str) -> None:
            live.console.print(text, highlight=False, markup=False, soft_wrap=True)

        def status(text: str) -> None:
            state["status"] = text

        def step(numbers: dict[str, Any]) -> None:
            curve.add(numbers)
            if "val/loss" in numbers:
                state["val"] = numbers["val/loss"]
                live.console.print(evaluation_text(numbers), soft_wrap=True)
            state["line"] = progress_line(numbers, steps, state.get("val"), clock.remaining(numbers["step"]))
            now = time.monotonic()
            if plot and (now - state["drawn"] > PLOT_SECONDS or numbers["step"] == steps):
                state["curve"], state["drawn"] = curve.draw(), now

        yield Callbacks(message=message, step=step, status=status)


def evaluation_text(numbers: dict[str, Any]) -> Any:
    """The metrics of an evaluation and the sample, its prompt dimmed, for a terminal."""
    from rich.text import Text

    text = Text(f"step {numbers['step']:,}  {format_metrics(numbers)}")
    prompt, written = split_sample(numbers)
    if written:
        text.append("\n  ").append(prompt, "dim").append(written, "cyan")
    return text


def progress_line(numbers: dict[str, Any], steps: int, val: float | None, remaining: float | None) -> str:
    """`█████▌     550/1000  loss 2.134  val 2.201  12.3k tokens/s  1:23 left`, at most 80 columns."""
    step = numbers["step"]
    filled = 10 * step / steps
    bar = "█" * int(filled) + ("▌" if filled % 1 >= 0.5 else "")
    held = "" if val is None else f"  val {val:.3f}"
    left = "" if remaining is None else f"  {format_clock(remaining)} left"
    return f"{bar:<10} {step}/{steps}  loss {numbers['train/loss']:.3f}{held}  {format_speed(numbers)}{left}"


def format_speed(numbers: dict[str, Any]) -> str:
    """`12.3k tokens/s`."""
    unit = next(name.removesuffix("_per_second") for name in numbers if name.endswith("_per_second"))
    speed = numbers[f"{unit}_per_second"]
    return f"{speed / 1000:.1f}k {unit}/s" if speed >= 1000 else f"{speed:.0f} {unit}/s"


def format_clock(seconds: float) -> str:
    """`0:32`, `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_metrics(numbers: dict[str, Any]) -> str:
    """`val 2.1034  3.035 bits/byte`: the metrics of an evaluation."""
    names = {"val/loss": "val {:.4f}", "val/bpb": "{:.3f} bits/byte", "val/accuracy": "{:.1%} right"}
    names |= {"val/bleu": "BLEU {:.2f}", "val/exact": "{:.1%} exact"}
    return "  ".join(form.format(numbers[name]) for name, form in names.items() if name in numbers)


def split_sample(numbers: dict[str, Any]) -> tuple[str, str]:
    """The prompt and what the model wrote, each on one line, without control characters."""
    prompt, sample = numbers.get("prompt", ""), numbers.get("sample", "")
    written = sample.removeprefix(prompt) if sample.startswith(prompt) else f" → {sample}"
    clean = ["".join(c if c.isprintable() else " " for c in text.replace("\n", "⏎")) for text in (prompt, written)]
    return clean[0], clean[1][:SAMPLE_WIDTH]


class RemainingTime:
    """The time that the remaining steps will take, from the steps so far."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.start: tuple[float, int] | None = None  # when, and after which step

    def remaining(self, step: int) -> float | None:
        now = time.monotonic()
        if self.start is None:
            self.start = now, step
        start, done = self.start
        return (now - start) / (step - done) * (self.steps - step) if step > done else None


def line_callbacks(steps: int) -> Callbacks:
    """A line every ten seconds and at every evaluation."""
    from clearhead.training.loop import Callbacks

    clock, shown, waited = RemainingTime(steps), list[float](), [time.monotonic()]

    def step(numbers: dict[str, Any]) -> None:
        remaining = clock.remaining(numbers["step"])
        now = clock.start[0] if clock.start and not shown else time.monotonic()
        if shown and now - shown[-1] < QUIET_SECONDS and "val/loss" not in numbers:
            return
        shown.append(now)
        waited[0] = now
        left = "" if remaining is None else f"  {format_clock(remaining)} left"
        line = f"step {numbers['step']}/{steps}  loss {numbers['train/loss']:.4f}"
        click.echo(f"{line}  {format_speed(numbers)}  {numbers['peak']:.0%} of peak{left}", err=True)
        if "val/loss" in numbers:
            prompt, written = split_sample(numbers)
            sample = f"\n  [{prompt}]{written}" if written else ""
            click.echo(f"  {format_metrics(numbers)}{sample}", err=True)

    def status(text: str) -> None:
        if text and time.monotonic() - waited[0] > QUIET_SECONDS:
            waited[0] = time.monotonic()
            click.echo(text, err=True)

    return Callbacks(message=lambda text: click.echo(text, err=True), step=step, status=status)


class LossCurve:
    """The training and validation loss as a picture of characters."""

    def __init__(self) -> None:
        self.training: list[tuple[int, float]] = []
        self.validation: list[tuple[int, float]] = []

    def add(self, numbers: dict[str, Any]) -> None:
        self.training.append((numbers["step"], numbers["train/loss"]))
        if "val/loss" in numbers:
            self.validation.append((numbers["step"], numbers["val/loss"]))

    def draw(self, width: int = PLOT_WIDTH, height: int = PLOT_HEIGHT) -> str:
        """Braille dots for the training loss, `o` for the validation loss, with both axes labelled."""
        if not self.training:
            return ""
        last = self.training[-1][0]
        points = mean_by_column(self.training, 2 * width, last)
        losses = [loss for loss in points if loss is not None] + [loss for _, loss in self.validation]
        low, high = min(losses), max(losses)
        scale = (4 * height - 1) / (high - low) if high > low else 0.0
        cells = [[0] * width for _ in range(height)]
        for x, loss in enumerate(points):
            if loss is not None:
                y = round((high - loss) * scale)
                cells[y // 4][x // 2] |= DOTS[y % 4][x % 2]
        rows = [[chr(0x2800 + cell) if cell else " " for cell in row] for row in cells]
        for step, loss in self.validation:
            rows[round((high - loss) * scale) // 4][min(width - 1, (step - 1) * width // last)] = "o"
        labels = {0: f"{high:.2f}", height - 1: f"{low:.2f}"}
        lines = [f"{labels.get(i, ''):>7} ┤{''.join(row).rstrip()}" for i, row in enumerate(rows)]
        axis = f"step {last:,}"
        return "\n".join(
            [*lines, f"{'':>8}└{'─' * (width - len(axis) - 1)} {axis}   ⠒ training  o validation"[: width + 9]]
        )


def mean_by_column(points: list[tuple[int, float]], columns: int, last: int) -> list[float | None]:
    """The mean loss of the steps in each column; None where a column has no step."""
    sums = [[0.0, 0] for _ in range(columns)]
    for step, loss in points:
        if math.isfinite(loss):
            column = sums[min(columns - 1, (step - 1) * columns // last)]
            column[0] += loss
            column[1] += 1
    return [total / count if count else None for total, count in sums]
