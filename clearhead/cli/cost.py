"""`clearhead cost`: parameters, FLOPs and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import console, find_config, input_options, json_option, model_argument, print_json

if TYPE_CHECKING:
    from clearhead.measure.cost import Cost


@click.command("cost")
@model_argument
@input_options
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16", "int8"]),
    default="float32",
    show_default=True,
    help="Precision of weights, cache and activations.",
)
@click.option("--train", is_flag=True, help="Also show what a training step needs.")
@json_option
def command(
    model: str,
    changes: tuple[str, ...],
    batch: int,
    length: int | None,
    source_length: int | None,
    dtype: str,
    train: bool,
    as_json: bool,
) -> None:
    """Count the parameters, FLOPs and memory of MODEL without allocating anything.

    A multiply-add is 2 FLOPs. Only matrix products count, and masked scores count as computed.

    \b
    clearhead cost gpt3-175b
    clearhead cost llama-3-8b --length 8192 --dtype bfloat16
    clearhead cost gpt2 --length 1024 --batch 8 --train --json
    """
    from clearhead.measure.cost import cost

    bill = cost(find_config(model, changes), batch=batch, length=length, source_length=source_length, dtype=dtype)
    if as_json:
        print_json({"model": model} | bill.to_dict())
    else:
        show(model, bill, train)


def show(model: str, bill: Cost, train: bool) -> None:
    from rich.table import Table
    from rich.text import Text

    from clearhead.measure.cost import HEADINGS

    out = console()
    out.print(Text(f"{model}: {bill.title()}", "bold"))
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading in HEADINGS:
        table.add_column(heading, justify="left" if heading in ("part", "grows as") else "right", no_wrap=True)
    for row in bill.part_rows():
        table.add_row(*row)
    out.print(table)
    table = Table(box=None, padding=(0, 2), show_header=False, pad_edge=False)
    for row in bill.total_rows(train):
        table.add_row(*row)
    out.print()
    out.print(table)
