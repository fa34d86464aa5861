"""`clearhead lab`: experiments."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    FLOATS,
    PICTURES,
    WHOLES,
    check_free,
    console,
    force_option,
    json_option,
    print_json,
    progress,
    theme_option,
)

if TYPE_CHECKING:
    from clearhead.lab.result import Result


class FullHelpGroup(click.Group):
    """A group whose list of commands is not cut to the width of a line."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Experiments"):
            formatter.write_dl([(name, first_line(each)) for name, each in sorted(self.commands.items())])


def first_line(each: click.Command) -> str:
    return (each.help or "").strip().splitlines()[0]


@click.group("lab", cls=FullHelpGroup)
def command() -> None:
    """Run experiments that test claims about Transformers. Each prints a table, draws a figure, and compares the claim
    with what it found. All run on the CPU of a laptop, in seconds or a few minutes.

    \b
    clearhead lab scores
    clearhead lab dictionary --keys 64 --out dictionary.svg
    clearhead lab permutation --json
    """


def experiment(*options: Any) -> Callable[[Callable[..., None]], click.Command]:
    """A command that runs the experiment named like the function; the docstring becomes its help."""

    def make(function: Callable[..., None]) -> click.Command:
        name = function.__name__

        def run(out: str | None, form: str, theme: str, as_json: bool, **sizes: Any) -> None:
            path = Path(out or "lab")
            path = path if path.suffix else path / f"{name}.{form}"
            if out is not None:
                check_free(path)
            measure = getattr(import_module(f"clearhead.lab.{name}"), name)
            if "progress" in signature(measure).parameters:  # it takes long enough to show how far it is
                sizes["progress"] = progress()
            result = measure(**sizes)
            if "progress" in sizes:
                sizes["progress"]("")
            if as_json:
                print_json(result.to_dict())
            else:
                show(result)
            if out is not None or not as_json:
                result.save(path, theme, force=True)
                click.echo(path, err=as_json)

        run.__doc__ = f"{function.__doc__}\n\n\b\nclearhead lab {name}\nclearhead lab {name} --seed 1 --out {name}.svg"
        both: Any = run
        for option in (*reversed(options), *COMMON):
            both = option(both)
        return command.command(name)(both)

    return make


COMMON = (
    json_option,
    force_option,
    theme_option,
    click.option("form", "--format", type=click.Choice(["png", "svg", "pdf"]), default="png", show_default=True),
    click.option("--out", type=PICTURES, metavar="PATH", help="A folder, or a file.  [default: the folder lab]"),
    click.option("--seed", type=int, default=0, show_default=True, help="The same seed gives the same result."),
)


def number_option(name: str, default: int | float, text: str) -> Any:
    """An option that is a number."""
    return click.option(name, type=type(default), default=default, show_default=True, help=text)


def list_option(name: str, default: str, text: str) -> Any:
    """An option that is several numbers."""
    kind = FLOATS if "." in default else WHOLES
    return click.option(name, type=kind, default=default, show_default=True, help=f"{text}, separated by commas.")


def show(result: Result) -> None:
    """Print the table, the claim and the finding."""
    from rich.table import Table
    from rich.text import Text

    from clearhead.lab.result import format_value

    table = Table(box=None, padding=(0, 1), pad_edge=False)
    for at, heading in enumerate(result.columns):
        words = any(isinstance(row[at], str) for row in result.rows)
        widest = max(len(format_value(row[at])) for row in result.rows)
        table.add_column(heading, justify="left" if words else "right", min_width=widest)
    for row in result.rows:
        table.add_row(*map(format_value, row))
    out = console()
    out.print(table)
    out.print()
    out.print(Text("Claim  ", "bold") + Text(result.claim, "not bold"))
    out.print(Text("Found  ", "bold") + Text(result.found, "not bold"))


@experiment(
    list_option("--widths", "4,16,64,256,1024", "Widths d_k"),
    number_option("--keys", 64, "Keys that softmax goes over."),
    number_option("--draws", 4096, "Queries drawn."),
)
def scores() -> None:
    """Why scores are divided by √d_k: their variance, and the gradient that softmax lets through."""


@experiment(
    list_option("--temperatures", "1.0,0.3,0.1,0.03,0.01,0.003,0.001", "Temperatures"),
    number_option("--keys", 16, "Entries of the dictionary."),
    number_option("--width", 32, "Width of keys and values."),
    number_option("--draws", 512, "Lookups."),
)
def dictionary() -> None:
    """Attention as a dictionary: as the temperature falls, the output becomes the value of one key."""


@experiment(
    number_option("--length", 24, "Tokens."),
    number_option("--dim", 32, "Width."),
    number_option("--heads", 4, "Heads."),
    number_option("--layers", 2, "Blocks."),
    number_option("--draws", 8, "Orders tried."),
)
def permutation() -> None:
    """Attention without positions does not see the order of its input; with positions it does."""


@experiment(
    number_option("--inputs", 3, "Inputs that each output depends on: heads."),
    number_option("--length", 10, "Positions."),
    number_option("--symbols", 2, "Values that an input can have."),
    number_option("--trials", 5, "Random functions."),
    list_option("--gaps", "1.0,2.0,4.0,8.0,16.0,32.0,64.0,128.0", "Gaps between scores"),
)
def routing() -> None:
    """Weights set by hand: one block computes any function of a few chosen inputs, exactly."""


@experiment(number_option("--steps", 3000, "Steps after which a machine that does not stop is stopped."))
def turing() -> None:
    """Weights set by hand: a decoder that runs Turing machines, one step for each token."""


@experiment(
    number_option("--width", 5, "Numbers in an x."),
    number_option("--examples", 12, "Examples in a prompt, at most."),
    number_option("--noise", 0.3, "Deviation of what is added to each y."),
    number_option("--steps", 2000, "Training steps."),
    number_option("--batch", 64, "Prompts in a step."),
    number_option("--dim", 64, "Width of the models."),
    number_option("--layers", 3, "Blocks of the Transformer."),
    number_option("--descents", 5, "The k of k steps of gradient descent."),
)
def icl() -> None:
    """In-context learning of linear regression, beside gradient descent, ridge and least squares."""


@experiment(
    number_option("--alpha", 0.5, "The power: a skill k is used as k^−(1+α)."),
    number_option("--skills", 1_000_000, "Skills there are."),
    number_option("--needed", 3, "Examples after which a skill is known."),
    number_option("--largest", 2**20, "The largest N and D."),
    number_option("--tests", 200_000, "Tasks that a learner is tested on."),
)
def powerlaw() -> None:
    """Why loss could fall as a power law: a toy of Zipf-distributed skills."""


@experiment(
    list_option("--depths", "6,12,24,48", "Blocks, at the start"),
    number_option("--dim", 64, "Width."),
    number_option("--heads", 4, "Heads."),
    number_option("--length", 32, "Tokens in a row."),
    number_option("--batch", 8, "Rows in a step."),
    number_option("--train-depth", 12, "Blocks of the models that are trained."),
    number_option("--steps", 120, "Training steps, of which the first third may warm up."),
    number_option("--lr", 0.003, "Learning rate."),
)
def gradients() -> None:
    """How gradients reach the first layer: pre- and post-norm, residuals, warm-up, Adam."""


@experiment(
    number_option("--vocabulary", 32, "Different tokens."),
    number_option("--half", 16, "Tokens that come twice."),
    number_option("--dim", 64, "Width."),
    number_option("--heads", 4, "Heads in a layer."),
    number_option("--steps", 800, "Training steps."),
    number_option("--batch", 64, "Texts in a step."),
)
def induction() -> None:
    """Induction heads grow in a model of two layers: the score of its heads over training."""


@experiment(
    list_option("--ratios", "1,2,4,8", "d_ff/d"),
    list_option("--heads", "1,2,4,8,16", "Heads"),
    number_option("--dim", 96, "Width at d_ff/d = 4."),
    number_option("--layers", 2, "Blocks."),
    number_option("--steps", 150, "Training steps."),
    number_option("--batch", 16, "Rows in a step."),
    number_option("--context", 64, "Bytes in a row."),
    number_option("--runs", 2, "Runs of each, with different seeds."),
    click.option("data", "--data", multiple=True, metavar="FILE", help="Text.  [default: this package's own source]"),
)
def shape() -> None:
    """Why this shape: d_ff/d and heads, at equal parameters."""


@experiment(
    list_option("--lengths", "128,256,512,1024", "Tokens, for time and memory"),
    number_option("--dim", 64, "Width."),
    number_option("--layers", 2, "Blocks."),
    number_option("--half", 16, "The longest period of a text."),
    number_option("--steps", 600, "Training steps on recall."),
    number_option("--batch", 64, "Texts in a step."),
    number_option("--rounds", 3, "Measurements; the median is printed."),
)
def lstm() -> None:
    """Attention against recurrence: throughput, recall at a distance, cost of inference."""


def describe_experiments() -> list[dict[str, Any]]:
    """Every experiment with its options as data: name, help, kind, default and range."""
    found = []
    for name, each in command.commands.items():
        options = [described for option in each.params if (described := describe_option(option)) is not None]
        found.append({"name": name, "title": name, "help": first_line(each), "options": options})
    return found


def describe_option(option: click.Parameter) -> dict[str, Any] | None:
    """An option that sets a size; None for options of the output."""
    flag = next((text for text in option.opts if text.startswith("--")), "")
    default: Any = option.default
    if flag in ("--json", "--theme", "--format", "--out", "--force", "--data", "") or default is None:
        return None
    described = {"name": flag, "help": getattr(option, "help", ""), "default": default}
    if isinstance(default, str):
        return described | {"kind": "text"}
    high = max(4 * default, 10 if isinstance(default, int) else 1.0)
    step = 1 if isinstance(default, int) else high / 200
    return described | {"kind": "number", "low": min(1, default), "high": high, "step": step}
