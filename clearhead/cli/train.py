"""`clearhead train`: train a model from a recipe and your data."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clearhead.extras import install_command

from .options import apply_changes, device_option, find_config, requested_device

if TYPE_CHECKING:
    from clearhead.configs.train import RecipeConfig
    from clearhead.training.loop import Callbacks

SAMPLE_TOKENS = 200
RATE_FIELD = "optimizer.lr"


@click.command("train")
@click.argument("recipe", required=False)
@click.option(
    "--data",
    multiple=True,
    metavar="PATH",
    help="Files, folders or globs: text, .jsonl, .csv, .parquet, .gz, .zst; - for stdin.  [default: built-in data]",
)
@click.option(
    "--validation",
    multiple=True,
    metavar="PATH",
    help="Data to hold out, in the same forms as --data.  [default: a share of the data]",
)
@click.option("--steps", type=int, default=None, help="Number of training steps.")
@click.option("--lr", type=float, default=None, help="Peak learning rate; scales the rates of all parameter groups.")
@click.option("--batch", type=int, default=None, help="Rows in a batch (tokens, for translation).")
@click.option("--context", type=int, default=None, help="Tokens in a row.")
@click.option("--layers", type=int, default=None, help="Number of blocks.")
@click.option("--dim", type=int, default=None, help="Width of the model.")
@click.option("--heads", type=int, default=None, help="Attention heads.")
@click.option(
    "--mixer",
    default=None,
    metavar="NAME",
    help="Replace attention: full, window, longformer, bigbird, linear, performer, mamba, lstm.",
)
@click.option("--vocabulary", type=int, default=None, help="Size of the byte-pair vocabulary.")
@click.option("--seed", type=int, default=None, help="The same seed gives the same result.")
@click.option("changes", "--set", multiple=True, metavar="PATH=VALUE", help="Change any field of the recipe.")
@click.option("--out", default=None, metavar="DIR", help="The run's folder.  [default: runs/RECIPE]")
@click.option("--resume", is_flag=True, help="Continue the run in --out; with --steps, train it longer.")
@click.option("checkpoint", "--from", default=None, metavar="MODEL", help="Fine-tune this checkpoint.")
@click.option("--lora", type=int, default=None, metavar="RANK", help="With --from: train low-rank adapters only.")
@device_option
@click.option("--shard", is_flag=True, help="Under torchrun: each process holds a part of the model (FSDP).")
@click.option("--recompute", is_flag=True, help="Save memory: recompute activations in the backward pass.")
@click.option("--compile", "compiling", is_flag=True, help="Use torch.compile: a slow start, then faster steps.")
@click.option("--plot", is_flag=True, help="Draw the loss curve while training; without a terminal, at the end.")
@click.option("--tensorboard", is_flag=True, help="Also write TensorBoard event files to DIR/tensorboard.")
@click.option(
    "--probe-every",
    type=click.IntRange(0),
    default=0,
    metavar="N",
    help="Every N steps, write the attention heads of a text and the gradient of each block to DIR/probes.",
)
@click.option("--probe", default="", metavar="TEXT", help="The text that probes look at.  [default: held-out data]")
@click.option(
    "--sample",
    default=None,
    metavar="TEXT",
    help="When done, print the model's continuation (or translation) of TEXT.",
)
def command(
    recipe: str | None,
    data: tuple[str, ...],
    validation: tuple[str, ...],
    steps: int | None,
    lr: float | None,
    batch: int | None,
    context: int | None,
    layers: int | None,
    dim: int | None,
    heads: int | None,
    mixer: str | None,
    vocabulary: int | None,
    seed: int | None,
    changes: tuple[str, ...],
    out: str | None,
    resume: bool,
    checkpoint: str | None,
    lora: int | None,
    shard: bool,
    recompute: bool,
    compiling: bool,
    plot: bool,
    tensorboard: bool,
    probe_every: int,
    probe: str,
    sample: str | None,
) -> None:
    """Train a model. RECIPE is a name from `clearhead recipes`, a recipe.json, or a model's clearhead.json.

    The run's folder works as a model in every other command, even while the run is stopped. Ctrl-C saves and stops;
    --resume continues and ends with the same weights as a run that was never stopped.

    \b
    clearhead train lm --data notes/ --out runs/notes
    clearhead train lm --data notes/ --layers 4 --dim 128 --heads 4 --lr 0.01 --plot
    clearhead train lm --data notes/ --mixer mamba --out runs/mamba
    clearhead train --out runs/notes --data notes/ --resume --steps 2000
    clearhead train --from MODEL --lora 8 --data chats.jsonl --out runs/tuned
    clearhead train translate --data train.en --data train.de --validation val.en --validation val.de
    torchrun --nproc-per-node 2 -m clearhead train lm --data notes/
    """
    if recipe is None and resume and out is not None and checkpoint is None and Path(out, "recipe.json").exists():
        recipe = str(Path(out, "recipe.json"))
    recipe = recipe or ("lm" if checkpoint is None else "finetune")
    folder = Path(out or f"runs/{Path(recipe).stem}")
    from clearhead.configs.train import NextTokenConfig, PairsConfig
    from clearhead.training.resize import RecipeSizes

    sizes = RecipeSizes(
        lr=lr, batch=batch, context=context, layers=layers, dim=dim, heads=heads, mixer=mixer, vocabulary=vocabulary
    )
    wanted = find_recipe(recipe, changes, steps, seed, checkpoint, lora, bool(data), sizes)
    if sample is not None and not isinstance(wanted.task, NextTokenConfig | PairsConfig):
        raise click.UsageError(f"--sample needs a model that writes text, and the task {wanted.task.kind()} does not")
    from clearhead.training.checkpoint import list_checkpoints
    from clearhead.training.distributed import FirstProcessFailed
    from clearhead.training.loop import Execution, RunStopped, TrainingError, train

    from .train_display import show_progress

    first = os.environ.get("RANK", "0") == "0"  # the process that prints
    execution = Execution(
        device=requested_device(),
        shard=shard,
        recompute=recompute,
        compile=compiling,
        probe_every=probe_every,
        probe_text=probe,
    )
    tensorboard_folder = folder if tensorboard and first else None
    with show_progress(wanted.steps, first, plot) as callbacks, tensorboard_events(tensorboard_folder, callbacks):
        try:
            model = train(
                wanted, data, folder, validation=validation, resume=resume, callbacks=callbacks, execution=execution
            )
        except RunStopped as stopped:
            callbacks.message(str(stopped))
            callbacks.message(f"To continue:  {resume_command(folder, data, validation)}")
            callbacks.message(f"To try it:    {try_commands(folder, wanted)[0]}")
            sys.exit(130)
        except FirstProcessFailed:
            sys.exit(1)
        except TrainingError as error:
            kept = list_checkpoints(folder / "checkpoints")
            last = f"{kept[-1]} is from before it" if kept else "there is no checkpoint yet"
            raise ValueError(f"{error}; {last}. Try a lower --lr") from None
        if first:
            callbacks.message("Next:")
            for line in try_commands(folder, wanted):
                callbacks.message(f"  {line}")
    if sample is not None and first:
        print_sample(model, folder, wanted, sample, shard)


def print_sample(model: Any, folder: Path, recipe: RecipeConfig, sample: str, shard: bool) -> None:
    """Print how the trained model continues or translates a text."""
    from clearhead.configs import EncoderDecoderConfig
    from clearhead.models.load import load
    from clearhead.tokenize import Tokenizer
    from clearhead.training.text import continue_text

    if isinstance(recipe.model, EncoderDecoderConfig):
        from clearhead.tasks.translate import translate

        ((best,),) = translate(load(folder), [sample])
        click.echo(best.text)
        return
    model = load(folder) if shard else model  # with --shard this process holds only a part
    try:
        click.echo(continue_text(model, Tokenizer.load(folder), sample, SAMPLE_TOKENS))
    except ValueError as error:
        raise ValueError(f"{folder} is trained, but cannot continue --sample {sample!r}: {error}") from None


def resume_command(folder: Path, data: tuple[str, ...], validation: tuple[str, ...]) -> str:
    """The command that continues a stopped run."""
    given = [part for path in data for part in ("--data", path)]
    given += [part for path in validation for part in ("--validation", path)]
    return shlex.join(["clearhead", "train", "--out", str(folder), *given, "--resume"])


def try_commands(folder: Path, recipe: RecipeConfig) -> list[str]:
    """What to type next with a model of this kind."""
    path, kind = shlex.quote(str(folder)), recipe.task.kind()
    chats = any(folder.glob("**/chat_template.jinja"))
    by_task = {
        "NextToken": [
            f"clearhead chat {path}" if chats else f'clearhead generate {path} "Once" --temperature 0.8',
            f'clearhead inspect {path} "Once upon a time" --out page.html',
        ],
        "MaskedTokens": [f'clearhead fill-mask {path} "A [MASK] day"', f'clearhead embed {path} "a text"'],
        "Images": [f"clearhead classify {path} IMAGE.png", f"clearhead inspect {path} IMAGE.png --out page.html"],
        "Pairs": [f"clearhead translate {path} SENTENCES.txt"],
    }
    return [*by_task[kind], f"clearhead plot {path}"]


def find_recipe(
    name: str,
    changes: tuple[str, ...] = (),
    steps: int | None = None,
    seed: int | None = None,
    checkpoint: str | None = None,
    lora: int | None = None,
    data: bool = True,
    sizes: Any = None,
) -> RecipeConfig:
    """The recipe with this name or in this file, with the changes of the command line."""
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
    from clearhead.training.resize import RecipeSizes, resize, scale_rates

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
            raise click.UsageError(f"{name} describes a {config.kind()}, which is neither a recipe nor a model")
    else:
        config = recipe(name, data)
    if checkpoint is not None:
        config = start_from(config, checkpoint, lora)
    elif lora is not None:
        raise click.UsageError("--lora needs a checkpoint to adapt: add --from MODEL")
    config = resize(config, sizes or RecipeSizes())
    named = [change.partition("=")[0].strip() for change in changes]
    before = config.optimizer
    config = apply_changes(config, check_short_names(changes))
    if RATE_FIELD in named and not any(path.startswith("optimizer") for path in named if path != RATE_FIELD):
        config = replace(config, optimizer=scale_rates(before, config.optimizer.lr))
    given = {"steps": steps, "seed": seed}
    return replace(config, **{key: value for key, value in given.items() if value is not None})


SHORT_NAMES = {
    "lr": "--lr, or optimizer.lr",
    "context": "--context, or task.context",
    "layers": "--layers, or model.stack.repeats",
    "dim": "--dim, or model.stack.dim",
    "heads": "--heads, or model.stack.pattern.0.mixer.heads",
    "vocabulary": "--vocabulary, or task.tokenizer.vocabulary",
    "weight_decay": "optimizer.weight_decay",
    "warmup": "schedule.warmup",
}


def check_short_names(changes: tuple[str, ...]) -> tuple[str, ...]:
    """The changes; a short name such as `lr` is refused with the path that exists."""
    for change in changes:
        name = change.partition("=")[0].strip()
        if name in SHORT_NAMES:
            raise click.UsageError(f"a recipe has no field {name!r}; use {SHORT_NAMES[name]}")
    return changes


def start_from(config: RecipeConfig, checkpoint: str, lora: int | None) -> RecipeConfig:
    """The recipe for a checkpoint: its model, its tokenizer, and at most its context."""
    from dataclasses import replace

    from clearhead.configs import LearnedConfig, SequenceModelConfig
    from clearhead.configs.data import TokenizerFileConfig
    from clearhead.configs.lora import LoRAConfig
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
def tensorboard_events(folder: Path | None, callbacks: Callbacks) -> Iterator[None]:
    """Also write the metrics as TensorBoard event files to a run's folder, if one is given."""
    if folder is None:
        yield
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise click.UsageError(f"--tensorboard needs a package: {install_command('tensorboard')}") from None
    with contextlib.ExitStack() as opened:
        show, writers = callbacks.step, list[Any]()

        def write_and_show(numbers: dict[str, Any]) -> None:
            if not writers:  # after the first step, so that a run that cannot start leaves no files
                writers.append(opened.enter_context(SummaryWriter(str(folder / "tensorboard"))))
            (writer,) = writers
            for name, value in numbers.items():
                if isinstance(value, str):
                    writer.add_text(name, value, numbers["step"])
                elif name != "step":
                    writer.add_scalar(name, value, numbers["step"])
            show(numbers)

        callbacks.step = write_and_show
        yield
