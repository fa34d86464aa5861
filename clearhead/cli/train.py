"""`clearhead train`: from a recipe and a corpus to a model."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import apply_changes, find_config

if TYPE_CHECKING:
    from clearhead.configs.train import RecipeConfig
    from clearhead.training.loop import Report

QUIET_SECONDS = 10.0  # between two lines where there is no terminal
SAMPLE_TOKENS = 200
SAMPLE_WIDTH = 60  # of the line that tells of an evaluation


@click.command("train")
@click.argument("recipe", required=False)
@click.option(
    "--data",
    multiple=True,
    metavar="PATH",
    help="Files, folders, globs, .jsonl, gzip, or - for stdin; may be given again.  [default: built-in data]",
)
@click.option(
    "--validation",
    multiple=True,
    metavar="PATH",
    help="What to hold out, given as --data is.  [default: a share of the data]",
)
@click.option("--steps", type=int, default=None, help="How many steps to train.")
@click.option("--seed", type=int, default=None, help="Two runs with one seed are one run.")
@click.option("changes", "--set", multiple=True, metavar="PATH=VALUE", help="Change a field of the recipe.")
@click.option("--out", default=None, metavar="DIR", help="The run's folder.  [default: runs/RECIPE]")
@click.option("--resume", is_flag=True, help="Go on with the run in --out from its last checkpoint.")
@click.option("checkpoint", "--from", default=None, metavar="MODEL", help="Train this checkpoint further.")
@click.option("--lora", type=int, default=None, metavar="RANK", help="With --from: learn low-rank differences only.")
@click.option("--shard", is_flag=True, help="Under torchrun: each process holds a part of the model.")
@click.option("--recompute", is_flag=True, help="Less memory: compute blocks again for their gradients.")
@click.option("--compile", "compiling", is_flag=True, help="torch.compile: slow to start, then faster.")
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard's event files too, into DIR/tensorboard.")
@click.option(
    "--sample",
    default=None,
    metavar="TEXT",
    help="At the end, print how the model goes on from TEXT, or translates it.",
)
def command(
    recipe: str | None,
    data: tuple[str, ...],
    validation: tuple[str, ...],
    steps: int | None,
    seed: int | None,
    changes: tuple[str, ...],
    out: str | None,
    resume: bool,
    checkpoint: str | None,
    lora: int | None,
    shard: bool,
    recompute: bool,
    compiling: bool,
    tensorboard: bool,
    sample: str | None,
) -> None:
    """Train a model: RECIPE is a name from `clearhead recipes`, a recipe.json, or a clearhead.json to train as it is.

    The run's folder becomes a checkpoint folder that every other command takes. Ctrl-C saves and leaves; --resume goes
    on, and ends with the very weights of a run that was never stopped.

    \b
    clearhead train lm --data notes/ --out runs/notes
    clearhead train chars --data input.txt --steps 500
    clearhead train chars --data input.txt --out runs/chars --resume
    clearhead train translate --data train.en --data train.de --validation val.en --validation val.de
    clearhead train --from MODEL --lora 8 --data notes/ --out runs/tuned
    torchrun --nproc-per-node 2 -m clearhead train lm --data notes/
    """
    if recipe is None and resume and out is not None and checkpoint is None and Path(out, "recipe.json").exists():
        recipe = str(Path(out, "recipe.json"))
    recipe = recipe or ("lm" if checkpoint is None else "finetune")
    folder = Path(out or f"runs/{Path(recipe).stem}")
    from clearhead.configs.train import NextTokenConfig, PairsConfig

    wanted = find_recipe(recipe, changes, steps, seed, checkpoint, lora, bool(data))
    if sample is not None and not isinstance(wanted.task, NextTokenConfig | PairsConfig):
        raise click.UsageError(f"--sample is a text to go on from, and the task {wanted.task.kind()} writes none")
    from clearhead.training.checkpoint import listed
    from clearhead.training.distributed import FirstFailed
    from clearhead.training.loop import Interrupted, Means, TrainingError, train

    first = os.environ.get("RANK", "0") == "0"  # of several processes, the one that speaks
    means = Means(shard=shard, recompute=recompute, compile=compiling)
    with watching(wanted.steps, first) as report, events(folder if tensorboard and first else None, report):
        try:
            model = train(wanted, data, folder, validation=validation, resume=resume, report=report, means=means)
        except Interrupted as left:
            report.say(str(left))
            sys.exit(130)
        except FirstFailed:
            sys.exit(1)
        except TrainingError as error:
            kept = listed(folder / "checkpoints")
            last = f"{kept[-1]} is from before it" if kept else "there is no checkpoint yet"
            raise ValueError(f"{error}; {last}") from None
    if sample is not None and first:
        from clearhead.configs import EncoderDecoderConfig
        from clearhead.models.load import load
        from clearhead.tasks.translate import translate
        from clearhead.tokenize import Tokenizer
        from clearhead.training.text import continued

        if isinstance(wanted.model, EncoderDecoderConfig):
            ((best,),) = translate(load(folder), [sample])
            click.echo(best.text)
            return
        model = load(folder) if shard else model  # of which this process held a part
        try:
            click.echo(continued(model, Tokenizer.load(folder), sample, SAMPLE_TOKENS))
        except ValueError as error:
            raise ValueError(f"{folder} is trained, but cannot go on from --sample {sample!r}: {error}") from None


def find_recipe(
    name: str,
    changes: tuple[str, ...] = (),
    steps: int | None = None,
    seed: int | None = None,
    checkpoint: str | None = None,
    lora: int | None = None,
    data: bool = True,
) -> RecipeConfig:
    from dataclasses import replace

    from clearhead.configs import (
        ClassHeadConfig,
        EncoderDecoderConfig,
        MaskedLMHeadConfig,
        SequenceModelConfig,
        read,
    )
    from clearhead.configs.train import RecipeConfig
    from clearhead.training.recipes import bert_tiny, lm, recipe, transformer_base, vit_digits

    path = Path(name)
    config: Any
    if path.suffix == ".json":
        if not path.exists():
            raise click.UsageError(f"there is no file {name}")
        config = read(path)
        if isinstance(config, SequenceModelConfig):
            by_head: dict[type, Any] = {MaskedLMHeadConfig: bert_tiny, ClassHeadConfig: vit_digits}
            config = replace(by_head.get(type(config.head), lm)(), model=config)
        elif isinstance(config, EncoderDecoderConfig):
            config = replace(transformer_base(), model=config)
        if not isinstance(config, RecipeConfig):
            raise click.UsageError(f"{name} describes a {config.kind()}, neither a recipe nor a model")
    else:
        config = recipe(name, data)
    if checkpoint is not None:
        config = beginning_with(config, checkpoint, lora)
    elif lora is not None:
        raise click.UsageError("--lora needs a checkpoint to adapt: give it by --from")
    config = apply_changes(config, changes)
    given = {"steps": steps, "seed": seed}
    return replace(config, **{key: value for key, value in given.items() if value is not None})


def beginning_with(config: RecipeConfig, checkpoint: str, lora: int | None) -> RecipeConfig:
    """The recipe for a checkpoint's model and, of a text, its own tokenizer and no more than its length."""
    from dataclasses import replace

    from clearhead.configs import LearnedConfig, SequenceModelConfig
    from clearhead.configs.adapter import LoRAConfig
    from clearhead.configs.data import TokenizerFileConfig
    from clearhead.configs.train import ImagesConfig, MaskedTokensConfig, NextTokenConfig
    from clearhead.models.hub import find_checkpoint

    model, task = find_config(checkpoint), config.task
    if not isinstance(task, ImagesConfig):
        task = replace(task, tokenizer=TokenizerFileConfig(path=str(find_checkpoint(checkpoint))))
    if isinstance(task, NextTokenConfig | MaskedTokensConfig):
        position = model.embedding.position if isinstance(model, SequenceModelConfig) else None
        context = min(task.context, position.length) if isinstance(position, LearnedConfig) else task.context
        task = replace(task, context=context)
    adapter = None if lora is None else LoRAConfig(rank=lora, alpha=2.0 * lora)
    return replace(config, model=model, task=task, start=checkpoint, adapter=adapter)


@contextlib.contextmanager
def events(folder: Path | None, report: Report) -> Iterator[None]:
    """The numbers as TensorBoard's event files too, in a run's folder, where they are asked for."""
    if folder is None:
        yield
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise click.UsageError("--tensorboard needs its package: pip install 'clearhead[tensorboard]'") from None
    with contextlib.ExitStack() as opened:
        show, writers = report.show, list[Any]()

        def both(numbers: dict[str, Any]) -> None:
            if not writers:  # the first step is done, so there is a run
                writers.append(opened.enter_context(SummaryWriter(str(folder / "tensorboard"))))
            (writer,) = writers
            for name, value in numbers.items():
                if isinstance(value, str):
                    writer.add_text(name, value, numbers["step"])
                elif name != "step":
                    writer.add_scalar(name, value, numbers["step"])
            show(numbers)

        report.show = both
        yield


def told(numbers: dict[str, Any]) -> str:
    """How a step went: speed and share of what the machine can do."""
    unit = next(name.removesuffix("_per_second") for name in numbers if name.endswith("_per_second"))
    return f"{numbers[f'{unit}_per_second']:,.0f} {unit}/s  {numbers['peak']:.0%} of peak"


@contextlib.contextmanager
def watching(steps: int, first: bool = True) -> Iterator[Report]:
    """A bar on a terminal; elsewhere a line now and then. All of it on stderr, and by the first process alone."""
    from clearhead.training.loop import Report

    if not first:
        yield Report()
        return
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

        def say(text: str) -> None:
            bar.console.print(text, highlight=False, markup=False)

        def show(numbers: dict[str, Any]) -> None:
            if "val/loss" in numbers:
                bar.update(task, val=f"{numbers['val/loss']:.3f}")
                say(f"step {numbers['step']}  {measured(numbers)}")
            bar.update(task, completed=numbers["step"], loss=f"{numbers['train/loss']:.3f}", speed=told(numbers))

        yield Report(say=say, show=show)


def measured(numbers: dict[str, Any]) -> str:
    """What an evaluation found, and the beginning of what the model wrote."""
    names = {"val/loss": "val {:.4f}", "val/bpb": "{:.3f} bits/byte", "val/accuracy": "{:.1%} right"}
    names |= {"val/bleu": "BLEU {:.2f}", "val/exact": "{:.1%} exact"}
    found = "  ".join(form.format(numbers[name]) for name, form in names.items() if name in numbers)
    sample = " ".join(numbers.get("sample", "").split())
    return f"{found}  {sample[:SAMPLE_WIDTH]!r}" if sample else found


def lines(steps: int) -> Report:
    from clearhead.training.loop import Report

    said: list[tuple[float, int]] = []  # when, and of which step; the first is what the time that is left goes by

    def show(numbers: dict[str, Any]) -> None:
        now, step = time.monotonic(), numbers["step"]
        if said and now - said[-1][0] < QUIET_SECONDS and "val/loss" not in numbers:
            return
        said.append((now, step))
        begun, done = said[0]
        left = int((now - begun) / (step - done) * (steps - step)) if step > done else None
        clock = "" if left is None else f"  {left // 60}:{left % 60:02d} left"
        val = f"  {measured(numbers)}" if "val/loss" in numbers else ""
        click.echo(f"step {step}/{steps}  loss {numbers['train/loss']:.4f}  {told(numbers)}{clock}{val}", err=True)

    return Report(say=lambda text: click.echo(text, err=True), show=show)
