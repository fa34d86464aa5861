"""`clearhead cost`: parameters, FLOPs and memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .options import (
    bytes_text,
    console,
    find_config,
    flops_text,
    input_options,
    json_option,
    model_argument,
    print_json,
)

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

    out = console()
    parameters, flops, memory = bill.parameters, bill.flops, bill.memory
    active = "" if parameters.active == parameters.total else f", of which {parameters.active:,} are active per token"
    out.print(Text(f"{model}: {parameters.total:,} parameters{active}", "bold"))
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading in ("part", "parameters", "share", "FLOPs", "share", "grows as"):
        table.add_column(heading, justify="left" if heading in ("part", "grows as") else "right", no_wrap=True)
    for part, count in parameters.by_part.items():
        work = flops.by_part[part]
        table.add_row(
            part,
            f"{count:,}",
            f"{count / max(parameters.total, 1):.1%}",
            flops_text(work),
            f"{work / max(flops.forward, 1):.1%}",
            bill.complexity[part],
        )
    out.print(table)
    rows = {
        f"forward, {bill.batch} × {bill.length} tokens": f"{flops.forward:,} FLOPs",
        "  the last block alone": f"{flops.block:,} FLOPs",
        f"weights in {bill.dtype}": bytes_text(memory.weights),
    }
    if memory.kv_cache:
        rows |= {
            "decoding one token": f"{flops.decode:,} FLOPs",
            f"KV cache, {bill.batch} × {bill.length} tokens": bytes_text(memory.kv_cache),
        }
    if train:
        rows |= {
            "training step": f"{flops.train:,} FLOPs",
            "activations kept for the backward pass": bytes_text(memory.activations),
            "gradients": bytes_text(memory.gradients),
            "AdamW's moments": bytes_text(memory.optimizer),
            "training, total": bytes_text(memory.training),
        }
    table = Table(box=None, padding=(0, 2), show_header=False, pad_edge=False)
    for name, value in rows.items():
        table.add_row(name, value)
    out.print()
    out.print(table)
