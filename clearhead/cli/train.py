"""`clearhead train`: from a recipe and a corpus to a model."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import changed

if TYPE_CHECKING:
    from clearhead.configs.train import RecipeConfig
    from clearhead.models.assemble import SequenceModel
    from clearhead.training.loop import Report

QUIET_SECONDS = 10.0  # between two lines where there is no terminal
SAMPLE_TOKENS = 200


@click.command("train")
@click.argument("recipe", default="lm")
@click.option(
    "--data",
    multiple=True,
    metavar="PATH",
    help="Files, folders, globs, .jsonl, gzip, or - for stdin; may be given again.  [default: Python's own library]",
)
@click.option("--steps", type=int, default=None, help="How many steps to train.")
@click.option("--seed", type=int, default=None, help="Two runs with one seed are one run.")
@click.option("changes", "--set", multiple=True, metavar="PATH=VALUE", help="Change a field of the recipe.")
@click.option("--out", default=None, metavar="DIR", help="The run's folder.  [default: runs/RECIPE]")
@click.option("--resume", is_flag=True, help="Go on with the run in --out from its last checkpoint.")
@click.option("--sample", default=None, metavar="TEXT", help="At the end, print how the model goes on from TEXT.")
def command(
    recipe: str,
    data: tuple[str, ...],
    steps: int | None,
    seed: int | None,
    changes: tuple[str, ...],
    out: str | None,
    resume: bool,
    sample: str | None,
) -> None:
    """Train a model: RECIPE is a name from `clearhead recipes`, a recipe.json, or a clearhead.json to train as it is.

    The run's folder becomes a checkpoint folder that every other command takes. Ctrl-C saves and leaves; --resume goes
    on, and ends with the very weights of a run that was never stopped.

    \b
    clearhead train lm --data notes/ --out runs/notes
    clearhead train chars --data input.txt --steps 500
    clearhead train chars --data input.txt --out runs/chars --resume
    """
    folder = Path(out or f"runs/{Path(recipe).stem}")
    wanted = find_recipe(recipe, changes, steps, seed)
    from clearhead.training.loop import Interrupted, TrainingError, train

    with watching(wanted.steps) as report:
        try:
            model = train(wanted, data, folder, resume=resume, report=report)
        except Interrupted as left:
            report.say(str(left))
            sys.exit(130)
        except TrainingError as error:
            raise ValueError(f"{error}; the last checkpoint in {folder} is good") from None
    if sample is not None:
        click.echo(continued(model, folder, sample))


def continued(model: SequenceModel, folder: Path, prompt: str) -> str:
    """How the model goes on from a text."""
    import torch

    from clearhead.generate.loop import decode, sampler
    from clearhead.tokenize import Tokenizer

    tokenizer = Tokenizer.load(folder)
    ids = tokenizer.encode(prompt or "\n")
    rng = torch.Generator().manual_seed(0)
    written = decode(model, torch.tensor([ids]), steps=SAMPLE_TOKENS, choose=sampler(0.8, rng))
    return tokenizer.decode([*ids, *(int(token) for token in written)])


def find_recipe(name: str, changes: tuple[str, ...], steps: int | None, seed: int | None) -> RecipeConfig:
    from dataclasses import replace

    from clearhead.configs import SequenceModelConfig, loads
    from clearhead.configs.train import RecipeConfig
    from clearhead.training.recipes import lm, recipe

    path = Path(name)
    config: Any
    if path.suffix == ".json":
        if not path.exists():
            raise click.UsageError(f"there is no file {name}")
        config = loads(path.read_text(encoding="utf-8"))
        if isinstance(config, SequenceModelConfig):
            config = replace(lm(), model=config)
        if not isinstance(config, RecipeConfig):
            raise click.UsageError(f"{name} describes a {config.kind()}, neither a recipe nor a model")
    else:
        config = recipe(name)
    config = changed(config, changes)
    given = {"steps": steps, "seed": seed}
    return replace(config, **{key: value for key, value in given.items() if value is not None})


@contextlib.contextmanager
def watching(steps: int) -> Iterator[Report]:
    """A bar on a terminal; elsewhere a line now and then. All of it on stderr."""
    from clearhead.training.loop import Report

    if not sys.stderr.isatty():
        yield lines(steps)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(bar_width=None),
        TextColumn("loss {task.fields[loss]}  val {task.fields[val]}  {task.fields[speed]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps, loss="·", val="·", speed="")

        def show(numbers: dict[str, Any]) -> None:
            if "val/loss" in numbers:
                bar.update(task, val=f"{numbers['val/loss']:.3f}")
            speed = f"{numbers['tokens_per_second']:,.0f} tokens/s"
            bar.update(task, completed=numbers["step"], loss=f"{numbers['train/loss']:.3f}", speed=speed)

        yield Report(say=lambda text: bar.console.print(text, highlight=False), show=show)


def lines(steps: int) -> Report:
    from clearhead.training.loop import Report

    said = [time.monotonic() - QUIET_SECONDS]

    def show(numbers: dict[str, Any]) -> None:
        now = time.monotonic()
        if now - said[0] < QUIET_SECONDS and "val/loss" not in numbers:
            return
        said[0] = now
        val = f"  val {numbers['val/loss']:.4f}  {numbers['val/bpb']:.3f} bits/byte" if "val/loss" in numbers else ""
        speed = f"{numbers['tokens_per_second']:,.0f} tokens/s"
        click.echo(f"step {numbers['step']}/{steps}  loss {numbers['train/loss']:.4f}  {speed}{val}", err=True)

    return Report(say=lambda text: click.echo(text, err=True), show=show)
