"""Train a small language model on Python's own library, and look inside it. `make demo` runs it.

It measures the machine's speed and chooses as many steps as fit, so that all of it ends within three minutes. If the
machine becomes slower, it stops early with the best model so far. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import os
import sys
import textwrap
import time
import warnings
from itertools import count
from pathlib import Path
from typing import Any

from clearhead.cli.train_display import LossCurve, split_sample
from clearhead.configs.train import RecipeConfig
from clearhead.models.load import load
from clearhead.training.curves import draw_curves
from clearhead.training.loop import Callbacks, RunStopped, train
from clearhead.training.recipes import recipe
from clearhead.training.resize import RecipeSizes, resize
from clearhead.training.run import Run
from clearhead.training.task import prepare_task
from clearhead.training.text import continue_text

SECONDS = 80  # of training, as planned
PLANNED = 140  # seconds from the start to the end of training, as planned
LIMIT = 160  # seconds from the start, if the machine becomes slower than planned
FEWEST, MOST = 24, 400  # steps
TIMED = 4  # steps that measure the speed
SAMPLES = 8  # evaluations, each with a sample
PROMPT = "def "
WRITTEN = 120  # tokens of the last sample
LINE = "def add(self, other):\n    return self.total + other"


def demo_recipe(steps: int) -> RecipeConfig:
    """`lm` at a size that two cores train in two minutes."""
    sizes = RecipeSizes(dim=160, layers=4, heads=4, context=128, batch=12, vocabulary=2048)
    every = max(steps // SAMPLES, 1)
    changes = {"steps": steps, "evaluate_every": every, "evaluate_targets": 4096, "save_every": steps}
    return resize(recipe("lm"), sizes).with_values(changes | {"task.tokenizer.learn_from": 2_000_000})


def choose_steps(out: Path, began: float) -> int:
    """As many steps as fit into the time that is left, from the speed of the first few."""
    times: list[float] = []

    def note(numbers: dict[str, Any]) -> None:
        times.append(time.perf_counter())
        if numbers["step"] > TIMED:
            raise RunStopped

    config = demo_recipe(FEWEST)
    task = prepare_task(config, (), (), Run(out), print)
    with contextlib.suppress(RunStopped):
        train(config, (), out / "speed", callbacks=Callbacks(step=note), task=task)
    seconds = (times[-1] - times[0]) / (len(times) - 1)
    left = min(SECONDS, PLANNED - (time.perf_counter() - began))
    return min(max(round(left / seconds), FEWEST), MOST)


class TimeUp(Exception):
    """LIMIT is over; the best model so far is saved."""


def show_bundled_model() -> None:
    """Something to read while the training text is prepared."""
    (found,) = load("shakespeare").generate("ROMEO:", max_new_tokens=60, temperature=0.8, seed=1)
    print("A trained model comes with the package. It has 353,000 parameters, and continues ROMEO: with\n")
    print(textwrap.indent(f"ROMEO:{found.text}", "  "), flush=True)


def main(steps: int | None = None, folder: Path = Path("runs")) -> Path:
    began = time.perf_counter()
    out = next(path for number in count(1) if not (path := folder / f"demo-{number}").exists())
    out.mkdir(parents=True)
    show_bundled_model()
    print("\nNow a model of your own learns to write Python, from Python's own library.\n", flush=True)
    steps = steps or choose_steps(out, began)
    config, curve, start = demo_recipe(steps), LossCurve(), time.perf_counter()

    def show(numbers: dict[str, Any]) -> None:
        curve.add(numbers)
        if sys.stderr.isatty():
            print(f"\r\x1b[Kstep {numbers['step']}/{steps}  loss {numbers['train/loss']:.3f} ", end="", file=sys.stderr)
        if "val/loss" in numbers:
            prompt, written = split_sample(numbers)
            print(f"\n── step {numbers['step']} of {steps}, after {time.perf_counter() - start:.0f} s ──")
            print(f"validation loss {numbers['val/loss']:.2f}\n  [{prompt}]{written}", flush=True)
            if numbers["step"] < steps and time.perf_counter() - began > LIMIT:
                raise TimeUp

    task = prepare_task(config, (), (), Run(out), lambda text: None)
    try:
        model = train(config, (), out / "model", callbacks=Callbacks(message=print, step=show), task=task)
    except TimeUp:
        with warnings.catch_warnings(action="ignore"):  # the run has not finished, as the next line reports
            model = load(out / "model")
        print("\nThis machine became slower than planned, so training stopped early, with the best model so far.")
    run, tokenizer = out / "model", model.tokenizer
    assert tokenizer is not None, "a run has a tokenizer"
    print(f"\n{curve.draw()}\n\nWhat it writes after {PROMPT!r}:\n")
    print(continue_text(model, tokenizer, PROMPT, WRITTEN))
    model.inspect(LINE, tokenizer=tokenizer, name="demo").save(run / "attention.html", force=True)
    draw_curves([run], run / "loss.png")
    page = (run / "attention.html").resolve()
    print(f"\nThe attention of every head on one line of code: {page.as_uri()}")
    print(f"Trained for {time.perf_counter() - start:.0f} s. Three commands to try:")
    print(f'  clearhead generate {run} "class "')
    print(f'  clearhead inspect {run} "for i in range(10):" --out page.html')
    print("  clearhead train lm --data YOUR_TEXT --out runs/mine --plot")
    if sys.stdout.isatty() and os.environ.get("DISPLAY"):
        import webbrowser

        webbrowser.open(page.as_uri())
    return run


if __name__ == "__main__":
    try:
        main()
    except RunStopped as stopped:
        sys.exit(str(stopped))
