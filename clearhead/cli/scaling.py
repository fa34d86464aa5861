"""`clearhead scaling`: fit scaling laws to runs, and plan budgets."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clearhead.units import count_text

from .options import (
    Picture,
    apply_changes,
    console,
    device_option,
    force_option,
    json_option,
    print_json,
    requested_device,
    theme_option,
)

if TYPE_CHECKING:
    from clearhead.scaling import Fit, Plan, Table
    from clearhead.training.loop import Callbacks

NAMES = ("parametric", "isoflop", "envelope", "size", "data")
draws_option = click.option(
    "--draws", type=click.IntRange(min=1), default=1000, show_default=True, help="Resamples for the intervals."
)
seed_option = click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Seed of the resamples."
)


@click.group("scaling")
def command() -> None:
    """Fit scaling laws to runs, plan a budget, or train the runs. Parameters N, tokens D, compute C = 6·N·D.

    \b
    clearhead scaling plan --flops 5.76e23
    clearhead scaling fit runs.csv --out isoflop.svg
    clearhead scaling sweep --data notes/ --out runs/sweep
    """


@command.command("fit")
@click.argument("table", metavar="TABLE.csv")
@click.option("--law", type=click.Choice([*NAMES, "all"]), default="parametric", show_default=True)
@draws_option
@seed_option
@click.option(
    "--out",
    type=Picture(also=(".json",)),
    multiple=True,
    metavar="FILE",
    help="Draw a figure (.png, .svg, .pdf), or write the fit for `plan --from` (.json). Can be repeated.",
)
@force_option
@theme_option
@json_option
def fit_command(table: str, law: str, draws: int, seed: int, out: tuple[str, ...], theme: str, as_json: bool) -> None:
    """Fit a law to TABLE.csv: one line for each run, with the columns loss and two of N, D and C.

    \b
    parametric  L(N, D) = E + A/N^α + B/D^β           Chinchilla's approach 3
    isoflop     N = k·C^a by parabolas at equal C     Chinchilla's approach 2
    envelope    N = k·C^a by training curves          Chinchilla's approach 1
    size, data  L(N) = (N_c/N)^α, L(D) = (D_c/D)^α    Kaplan et al.
    all         each of them, or why it cannot be fitted

    \b
    clearhead scaling fit runs.csv
    clearhead scaling fit runs.csv --law isoflop --out isoflop.svg
    clearhead scaling fit runs.csv --out fit.json
    """
    from clearhead.scaling import read_table

    runs = read_table(table)
    if law == "all":
        if out:
            raise click.UsageError("--out needs a single law: choose one with --law")
        fit_all(runs, draws, seed, as_json)
        return
    from clearhead.scaling import fit

    found = fit(runs, law, draws=draws, seed=seed)
    for path in out:
        if path.endswith(".json"):
            found.save(path, force=True)
        else:
            draw(found, runs, path, theme)
    if as_json:
        print_json(found.to_dict())
        return
    show(found)
    for path in out:
        click.echo(path)


def fit_all(runs: Table, draws: int, seed: int, as_json: bool) -> dict[str, Fit]:
    """Fit and show every law that the runs determine, and say why the others fail; returns the fits."""
    from clearhead.scaling import FitError, fit

    results: dict[str, Any] = {}
    fits: dict[str, Fit] = {}
    for law in NAMES:
        try:
            fits[law] = fit(runs, law, draws=draws, seed=seed)
        except FitError as error:
            results[law] = {"refused": str(error)}
            if not as_json:
                console().print(f"{law}: {error}", markup=False)
        else:
            results[law] = fits[law].to_dict()
            if not as_json:
                show(fits[law])
        if not as_json:
            click.echo()
    if as_json:
        print_json(results)
    return fits


def draw(found: Fit, runs: Table, path: str | Path, theme: str) -> None:
    from clearhead.scaling.figures import draw_fit

    draw_fit(found, runs, path, theme)


def show(found: Fit) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    out.print(Text(found.equation(), "bold"))
    out.print(f"{found.law.name}, fitted to {found.source}", markup=False)
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading in ("", "value", "95 % interval"):
        table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    for name, (value, interval) in found.constants().items():
        table.add_row(name, f"{value:.4g}", format_interval(interval))
    out.print(table)
    for note in found.notes:
        out.print(note, markup=False)
    for run in found.sensitive:
        moved = ", ".join(f"{name} is {value:.3f}" for name, value in run.exponents.items())
        out.print(f"without line {run.line} (N {run.n:.3g}, D {run.d:.3g}, loss {run.loss:.4g}) {moved}", markup=False)


def format_interval(interval: tuple[float, float] | None, text: Callable[[float], str] = "{:.4g}".format) -> str:
    return "–" if interval is None else f"{text(interval[0])} … {text(interval[1])}"


@command.command("plan")
@click.option("--flops", type=float, multiple=True, required=True, metavar="C", help="A budget. Repeatable.")
@click.option(
    "--from",
    "source",
    default="reanalysis",
    show_default=True,
    help="A .json of `fit --out`, a table.csv, or published constants: chinchilla, reanalysis.",
)
@click.option(
    "--law", type=click.Choice(NAMES), default=None, help="The law to fit to a table.csv.  [default: parametric]"
)
@draws_option
@seed_option
@json_option
def plan_command(flops: tuple[float, ...], source: str, law: str | None, draws: int, seed: int, as_json: bool) -> None:
    """Print the best use of a budget of C FLOPs: how many parameters N, and how many tokens D.

    \b
    clearhead scaling plan --flops 5.76e23
    clearhead scaling plan --flops 1e21 --from chinchilla
    clearhead scaling plan --flops 1e18 --flops 1e19 --from runs.csv --law isoflop
    """
    found = find_fit(source, law, draws, seed)
    plans = [found.plan(budget) for budget in flops]
    for budget in flops:
        if warning := found.beyond(budget):
            click.echo(f"clearhead: {warning}", err=True)
    if as_json:
        summary = {"law": found.law.name, "equation": found.equation(), "notes": list(found.notes)}
        print_json(summary | {"plans": [plan.to_dict() for plan in plans]})
        return
    click.echo(f"{found.equation()}  ({found.source})")
    for plan in plans:
        show_plan(plan)
    for note in found.notes:
        click.echo(note)


def find_fit(source: str, law: str | None, draws: int, seed: int) -> Fit:
    from clearhead.configs.base import nearest
    from clearhead.scaling import PUBLISHED, FitError, fit, read_fit, read_table

    path = Path(source)
    kept = path.suffix.lower() == ".json"
    if law is not None and (source in PUBLISHED or kept):
        raise click.UsageError(f"--law needs a table.csv; {source} already has its law")
    if source in PUBLISHED:
        return PUBLISHED[source]
    if not path.is_file() and not path.suffix:
        raise FitError(f"there are no constants {source!r}{nearest(source, PUBLISHED)}; or give a .json or a .csv")
    if kept:
        return read_fit(path)
    return fit(read_table(path), law or "parametric", draws=draws, seed=seed)


def show_plan(plan: Plan) -> None:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2), pad_edge=False)
    table.add_column(f"{plan.flops:.4g} FLOPs", no_wrap=True)
    for heading in ("best", "95 % interval"):
        table.add_column(heading, justify="right", no_wrap=True)
    whole, ratio = (lambda value: count_text(round(value))), (lambda value: f"{value:.4g}")
    for name, key, value, text in (
        ("parameters N", "N", plan.n, whole),
        ("tokens D", "D", plan.d, whole),
        ("tokens per parameter", "tokens_per_parameter", plan.d / plan.n, ratio),
        ("loss", "loss", plan.loss, ratio),
    ):
        if value is not None:
            table.add_row(name, text(value), format_interval(plan.intervals[key], text))
    console().print(table)


@command.command("sweep")
@click.option(
    "--data", multiple=True, metavar="PATH", help="Text, as for `clearhead train`.  [default: Python's own library]"
)
@click.option("--out", default="runs/sweep", show_default=True, metavar="DIR", help="The sweep's folder.")
@click.option("--dims", default="8,16,24,32,48,64", show_default=True, help="Widths, multiples of 8.")
@click.option("--budgets", default="3e10,6e10,1.2e11,3e11", show_default=True, help="FLOPs, 6·N·D.")
@click.option("--layers", type=int, default=2, show_default=True, help="Blocks of every model.")
@click.option("changes", "--set", multiple=True, metavar="PATH=VALUE", help="Change a field of the recipe.")
@click.option("--resume", is_flag=True, help="Continue the sweep in --out.")
@device_option
@theme_option
def sweep_command(
    data: tuple[str, ...],
    out: str,
    dims: str,
    budgets: str,
    layers: int,
    changes: tuple[str, ...],
    resume: bool,
    theme: str,
) -> None:
    """Train a small model of every width under every budget on your text, and fit every law to the results.

    The runs go to DIR, with table.csv for `clearhead scaling fit` and the figure fit.svg. Tokens are bytes; N counts
    all parameters except the embedding table. Ctrl-C saves and stops; --resume continues. The defaults take some
    minutes on two cores.

    \b
    clearhead scaling sweep --data notes/
    clearhead scaling sweep --data notes/ --budgets 1e10,3e10,1e11 --out runs/small
    """
    from clearhead.scaling import read_table
    from clearhead.scaling.sweep import Sweep, bytes_recipe, run_sweep
    from clearhead.training.loop import Execution, RunStopped

    recipe = apply_changes(bytes_recipe(), changes)
    widths, amounts = numbers("--dims", dims, int), numbers("--budgets", budgets, float)
    sweep = Sweep(dims=tuple(widths), budgets=tuple(amounts), layers=layers, recipe=recipe)
    callbacks = sweep_callbacks()
    try:
        execution = Execution(device=requested_device())
        table = run_sweep(sweep, data, out, resume=resume, callbacks=callbacks, execution=execution)
    except RunStopped as stopped:
        callbacks.message(f"{stopped} To continue, repeat the command with --resume.")
        sys.exit(130)
    runs = read_table(table)
    fits = fit_all(runs, draws=1000, seed=0, as_json=False)
    click.echo(table)
    drawn = [fits[law] for law in ("isoflop", "parametric") if law in fits]
    if drawn:
        figure = table.with_name("fit.svg")
        draw(drawn[0], runs, figure, theme)
        click.echo(figure)
    else:
        click.echo("clearhead: no figure was drawn: these runs determine neither isoflop nor parametric", err=True)


def numbers(option: str, text: str, kind: type) -> list[Any]:
    try:
        return [kind(part) for part in text.split(",")]
    except ValueError:
        what = "whole numbers" if kind is int else "numbers"
        raise click.UsageError(f"{option} takes {what} separated by commas, not {text!r}") from None


def sweep_callbacks() -> Callbacks:
    """Print a line for each finished run, and on a terminal one for the current run; all on stderr."""
    from clearhead.training.loop import Callbacks

    live = sys.stderr.isatty()
    fresh = "\r\x1b[K" if live else ""

    def show(numbers: dict[str, Any]) -> None:
        if live:
            step = f"step {numbers['step']}/{numbers['steps']}  loss {numbers['train/loss']:.3f}"
            click.echo(f"{fresh}run {numbers['run']}/{numbers['runs']}  {step} ", nl=False, err=True)

    return Callbacks(message=lambda text: click.echo(f"{fresh}{text}", err=True), step=show)
