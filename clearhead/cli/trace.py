"""`clearhead trace`: every step with its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import console, count_text, find_config, input_options, json_option, model_argument, print_json

if TYPE_CHECKING:
    from clearhead.measure.trace import Trace


@click.command("trace")
@model_argument
@input_options
@json_option
def command(
    model: str, changes: tuple[str, ...], batch: int, length: int | None, source_length: int | None, as_json: bool
) -> None:
    """Show every step of MODEL with its symbolic and actual shape, its parameters and its FLOPs.

    MODEL is a preset, a clearhead.json, a config.json, or a folder with one of them. No weight is allocated.

    \b
    clearhead trace gpt2 --batch 32 --length 20
    clearhead trace transformer-base --batch 32 --length 20 --source-length 24
    """
    from clearhead.measure.trace import trace

    traced = trace(find_config(model, changes), batch=batch, length=length, source_length=source_length)
    if as_json:
        print_json(traced.to_dict())
    else:
        show(traced)


def show(traced: Trace) -> None:
    from rich.table import Table
    from rich.text import Text

    from clearhead.measure.trace import shape_text
    from clearhead.shapes import NAMES

    out = console()
    used: dict[str, None] = {}
    for title, steps in traced.sections():
        table = Table(box=None, padding=(0, 1), show_header=False, pad_edge=False)
        for width, justify in ((22, "left"), (None, "left"), (7, "right"), (7, "right")):
            table.add_column(width=width, justify=justify, no_wrap=True)  # type: ignore[arg-type]
        for step in steps:
            used |= dict.fromkeys(letter for letter in step.letters if letter in NAMES)
            name = Text(f"  {step.name}")
            table.add_row(name, Text(shape_text(step), "cyan"), count_text(step.parameters), count_text(step.flops))
        out.print(Text(title, "bold"), "" if out.width < 60 else Text("parameters, FLOPs", "dim"))
        out.print(table)
    total, flops = sum(s.parameters for s in traced.steps), sum(s.flops for s in traced.steps)
    out.print(Text(f"total: {total:,} parameters, {flops:,} FLOPs", "bold"))
    out.print(Text("  ".join(f"{letter} {NAMES[letter]}" for letter in used), "dim"))
