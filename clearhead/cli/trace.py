"""`clearhead trace`: every step with its shape."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from clearhead.units import count_text, flops_text

from .options import console, find_config, input_options, json_option, model_argument, print_json

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

    MODEL is a preset, a clearhead.json, a config.json, a folder with one of them, a GGUF file, or a name on the Hub.
    No weights are allocated. Blocks with the same config are shown once.

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
    from rich.text import Text

    from clearhead.measure.trace import shape_text
    from clearhead.shapes import NAMES

    out = console()
    sections = list(traced.sections())
    steps = [step for _, group in sections for step in group]
    names, shapes = (max(len(text) for text in column) for column in ([s.name for s in steps], map(shape_text, steps)))
    has_room = out.width >= names + shapes + 20 + max(len(step.formula) for step in steps)

    def line(name: str, shape: str, parameters: str, flops: str, formula: str, style: str = "") -> None:
        row = Text(f"{name:<{names + 2}} ", style)
        row.append(f"{shape:<{shapes}}", "cyan")
        row.append(f"{parameters:>9}{flops:>8}")
        out.print(row.append(f"  {formula}", "dim") if has_room else row, no_wrap=True, crop=False)

    line("", "shape", "weights", "FLOPs", "", "bold")
    for title, group in sections:
        out.print(Text(title, "bold"))
        for step in group:
            numbers = count_text(step.parameters), flops_text(step.flops)
            line(f"  {step.name}", shape_text(step), *numbers, step.formula)
    total = sum(step.parameters * step.copies for step in traced.folded)
    flops = sum(step.flops * step.repeats for step in traced.folded)
    out.print(Text(f"total: {total:,} parameters, {flops:,} FLOPs", "bold"))
    used = [letter for letter in NAMES if any(letter in step.letters for step in steps)]
    out.print(Text(", ".join(f"{letter} {NAMES[letter]}" for letter in used), "dim"))
