"""`clearhead compare`: how the time and memory of mixers and models grow with length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clearhead.units import bytes_text, count_text, flops_text

from .options import (
    PICTURE,
    WHOLES,
    console,
    device_option,
    find_config,
    force_option,
    json_option,
    print_json,
    progress,
    requested_device,
    theme_option,
)

if TYPE_CHECKING:
    from rich.table import Table

    from clearhead.measure.growth import Comparison, Contestant, Growth, ModelSize
    from clearhead.training.text import NextToken

ONE_OR_MORE = click.IntRange(min=1)


@click.command("compare")
@click.argument("names", nargs=-1, required=True, metavar="NAME...")
@click.option(
    "--lengths",
    type=WHOLES,
    default="256,512,1024,2048",
    show_default=True,
    help="Lengths, separated by commas.",
)
@click.option("--batch", "-b", type=ONE_OR_MORE, default=1, show_default=True, help="Rows in the batch.")
@click.option("--dim", type=ONE_OR_MORE, default=256, show_default=True, help="Width of models built from a mixer.")
@click.option("--layers", type=ONE_OR_MORE, default=2, show_default=True, help="Blocks of models built from a mixer.")
@click.option("--heads", type=ONE_OR_MORE, default=4, show_default=True, help="Heads of models built from a mixer.")
@click.option("--both-ways", is_flag=True, help="Let mixers read later tokens too. Decoding is then not measured.")
@click.option(
    "--equal",
    type=click.Choice(["parameters", "compute", "no"]),
    default="parameters",
    show_default=True,
    help="What models built from mixers must have in common with the first.",
)
@device_option
@click.option("--rounds", type=ONE_OR_MORE, default=3, show_default=True, help="Measurements; the median is printed.")
@click.option("--out", type=PICTURE, metavar="FILE", help="Plot the curves: .png, .svg or .pdf.")
@theme_option
@force_option
@click.option("--train", "data", multiple=True, metavar="PATH", help="Train each model on this text; print its loss.")
@click.option("--steps", type=ONE_OR_MORE, default=200, show_default=True, help="With --train: steps per model.")
@click.option("--context", type=ONE_OR_MORE, default=128, show_default=True, help="With --train: tokens per row.")
@json_option
def command(
    names: tuple[str, ...],
    lengths: tuple[int, ...],
    batch: int,
    dim: int,
    layers: int,
    heads: int,
    both_ways: bool,
    equal: str,
    rounds: int,
    out: str | None,
    theme: str,
    data: tuple[str, ...],
    steps: int,
    context: int,
    as_json: bool,
) -> None:
    """Measure how time and memory of forward, backward and decoding grow with length, and fit exponents.

    NAME is a mixer (full, flash, window, longformer, bigbird, linformer, linear, performer, mamba, lstm), a .json with
    the config of a mixer, or a model as in other commands. Each mixer is put into a model of the same width. `full`
    computes the whole score matrix; `flash` is the same attention with the fused kernel.

    \b
    clearhead compare full flash window --lengths 512,1024,2048 --out growth.svg
    clearhead compare flash lstm --equal compute --train notes/ --steps 500
    clearhead compare tiny-gpt tiny-llama --lengths 16,32,64 --json
    """
    from clearhead.measure.growth import ModelSize, compare

    size = ModelSize(dim=dim, layers=layers, heads=heads, causal=not both_ways)
    contestants = [contestant(name, size) for name in names]
    common = None if equal == "no" else equal
    say = progress()
    with tasks(contestants, data, steps, context, common) as planned:
        found = compare(
            contestants, lengths, batch=batch, rounds=rounds, equal=common, device=requested_device(), say=say
        )
        if not as_json:
            show(found)
        rows = [result.to_dict() for result in found]
        for one, task in zip(rows, planned, strict=bool(data)):
            say(f"{one['name']}, {steps} steps")
            one["training"] = None if task is None else train_model(task)
    if as_json:
        print_json({"batch": batch, "equal": common, "models": rows})
    elif data:
        show_losses(rows)
    if out is not None:
        from clearhead.inspect.growth_figure import draw_growth

        draw_growth(rows, out, theme)
        if not as_json:
            click.echo(out)


def contestant(name: str, size: ModelSize) -> Contestant:
    """A model built from a mixer (by name or config), or a whole model."""
    from clearhead.configs import ConfigError, PatchEmbeddingConfig, SequenceModelConfig, read
    from clearhead.configs.base import nearest
    from clearhead.measure.growth import Contestant, mixers, of_mixer
    from clearhead.models.presets import PRESETS

    known = mixers(size)
    if name in known:
        return of_mixer(name, known[name], size, fused=name != "full")
    path = Path(name)
    if path.suffix == ".json" and path.is_file() and '"model_type"' not in path.read_text(encoding="utf-8"):
        config: Any = read(path)
        if hasattr(config, "mask"):
            return of_mixer(path.stem, lambda length: config, size)
    if not path.exists() and path.suffix != ".json" and "/" not in name and name not in PRESETS:
        raise ConfigError(f"there is no mixer or model {name!r}{nearest(name, [*known, *PRESETS])}")
    model = find_config(name)
    if not isinstance(model, SequenceModelConfig):
        raise click.UsageError(f"{name} is an encoder–decoder with two lengths; compare takes models with one")
    if isinstance(model.embedding, PatchEmbeddingConfig):
        raise click.UsageError(f"{name} reads images of one size; compare takes models that read tokens")
    return Contestant(name, lambda length: model, fixed=True)


@contextmanager
def tasks(
    contestants: list[Contestant], data: tuple[str, ...], steps: int, context: int, equal: str | None
) -> Iterator[list[NextToken | None]]:
    """A training task on the same text for each model; None for a model that reads later tokens. The text is prepared
    first, so that bad data is reported before anything is measured."""
    import tempfile

    from clearhead.configs.data import CharactersConfig
    from clearhead.configs.train import AdamWConfig, CosineConfig, NextTokenConfig, RecipeConfig
    from clearhead.measure.growth import configs
    from clearhead.training.run import Run
    from clearhead.training.text import NextToken, prepare_tokens

    if not data:
        yield []
        return
    models = configs(contestants, context, equal)
    planned = [
        RecipeConfig(
            model=model,
            task=NextTokenConfig(tokenizer=CharactersConfig(), context=context),
            optimizer=AdamWConfig(lr=2e-3),
            schedule=CosineConfig(warmup=min(20, steps // 2), floor=0.1),
            batch=16,
            steps=steps,
            evaluate_every=steps,
            save_every=steps,
        )
        for model in models
    ]
    with tempfile.TemporaryDirectory() as folder:
        corpus = prepare_tokens(planned[0], data, (), Run(folder), lambda text: click.echo(text, err=True))
        both = zip(models, planned, strict=True)
        yield [NextToken(recipe, *corpus) if model.stack.causal else None for model, recipe in both]


def train_model(task: NextToken) -> dict[str, float]:
    """Train a model and return its validation loss."""
    import tempfile
    import time

    from clearhead.training.loop import Execution, RunStopped, train
    from clearhead.training.run import Run

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        try:
            train(task.recipe, out=folder, task=task, execution=Execution(device=requested_device()))
        except RunStopped:  # the temporary folder and its checkpoint are deleted
            raise click.Abort from None
        taken, last = time.perf_counter() - start, Run(folder).history()[-1]
    return {"loss": last["val/loss"], "bits_per_byte": last["val/bpb"], "seconds": taken}


def show(found: list[Comparison]) -> None:
    """Print cost, time and memory as three tables, since one would be wider than a screen."""
    from rich.text import Text

    from clearhead.measure.growth import PASSES

    lengths = [m.length for m in found[0].measured]
    out = console()
    out.print(Text(f"at {max(lengths):,} tokens, and how it grows from {min(lengths):,}", "bold"))
    costs, times, peaks = [], [], []
    for result in found:
        last = result.measured[-1]
        errors = [(m.length, m.error) for m in result.measured if m.error is not None]
        error = f"{errors[-1][1]:.3f} at {errors[-1][0]:,}" if errors else "–"
        costs.append((result.name, count_text(last.parameters), flops_text(last.flops), error))
        seconds, peak = (
            [value_and_growth(text, result.growth(what, p)) for p, text in zip(PASSES, texts, strict=True)]
            for what, texts in (
                ("seconds", [milliseconds(last.seconds[p]) for p in PASSES]),
                ("peak", [bytes_or_none(last.peak[p]) for p in PASSES]),
            )
        )
        times.append((result.name, *(cell for pair in seconds for cell in pair)))
        peaks.append((result.name, *(cell for pair in peak for cell in pair)))
    passes = [heading for p in PASSES for heading in (p, "")]
    for headings, rows in (
        (("", "parameters", "FLOPs", "error"), costs),
        (("time", *passes), times),
        (("memory", *passes), peaks),
    ):
        out.print()
        out.print(table_of(headings, rows))


def table_of(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def value_and_growth(value: str | None, growth: Growth | None) -> tuple[str, str]:
    """`12.3 ms` and `n^1.02±.05`."""
    if value is None or growth is None:
        return value or "–", ""
    margin = "" if growth.margin is None else f"±{growth.margin:.2f}".replace("±0.", "±.")[:4]
    return value, f"n^{growth.exponent:.2f}{margin}"


def milliseconds(seconds: float | None) -> str | None:
    return None if seconds is None else f"{seconds * 1e3:.1f} ms"


def bytes_or_none(count: int | None) -> str | None:
    return None if count is None else bytes_text(count)


def show_losses(models: list[dict[str, Any]]) -> None:
    rows = []
    for one in models:
        loss = one["training"]
        numbers = ("–",) * 3
        if loss is not None:
            numbers = (f"{loss['loss']:.4f}", f"{loss['bits_per_byte']:.4f}", f"{loss['seconds']:.1f}")
        rows.append((one["name"], *numbers))
    out = console()
    out.print()
    out.print(table_of(("model", "validation loss", "bits per byte", "seconds"), rows))
