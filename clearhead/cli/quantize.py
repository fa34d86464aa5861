"""`clearhead quantize`: store a model in fewer bits."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import click

from clearhead.units import bytes_text

from .options import cache_option, check_free_folder, force_option, read_finite_model, read_text

if TYPE_CHECKING:
    from torch import Tensor

    from clearhead.configs import Cache

ROWS, ROW = 64, 256  # calibration: at most this many rows of this many tokens


@click.command("quantize")
@click.argument("model")
@click.argument("out")
@click.option(
    "--weights",
    type=click.Choice(["float32", "bfloat16", "float16", "int8", "int4"]),
    default="int8",
    show_default=True,
    help="Precision of the weight matrices.",
)
@click.option("--group", type=int, default=32, show_default=True, help="Columns that share a scale (int8, int4).")
@cache_option
@click.option(
    "--text",
    default=None,
    metavar="FILE",
    help="Half of the text calibrates int4; the other half measures perplexity.",
)
@force_option
def command(model: str, out: str, weights: str, group: int, cache: Cache | None, text: str | None) -> None:
    """Write MODEL, a checkpoint folder, to the folder OUT with its weight matrices in fewer bits.

    With --text, print the perplexity before and after on the second half of that text. Both run on the CPU, for which
    the quantized formats are made.

    \b
    clearhead quantize runs/mine runs/int8
    clearhead quantize runs/mine runs/int4 --weights int4 --text held_out.txt
    """
    from clearhead.configs import precision
    from clearhead.configs.precision import Grouped

    force = check_free_folder(out)
    kind = precision(weights)
    kind = replace(kind, group=group) if isinstance(kind, Grouped) else kind
    kind = kind if cache is None else replace(kind, cache=cache)
    read = None if text is None else read_text(text)
    loaded = read_finite_model(model)
    from clearhead.generate.complete import check_generates
    from clearhead.generate.defaults import context_length
    from clearhead.measure.perplexity import perplexity_of
    from clearhead.models.quantize import quantize

    widest = max(weight.shape[-1] for weight in loaded.parameters() if weight.dim() > 1)
    if isinstance(kind, Grouped) and kind.group > max(widest, Grouped.group):
        raise ValueError(f"--group is {group}, but the widest matrix has {widest} columns; use at most {widest}")
    tokenizer = loaded.tokenizer
    if read is not None and tokenizer is None:
        raise ValueError(f"{model} has no tokenizer, so it cannot read --text; leave the option out")
    half = 0 if read is None else len(read) // 2
    if read is not None:
        check_generates(loaded)  # the loss is measured by next-token prediction
    length = min(ROW, context_length(loaded) or ROW)
    tokens = None if read is None or tokenizer is None else rows(tokenizer.encode(read[:half]), length)
    made = quantize(loaded, kind, tokens=tokens)
    made.save(out, tokenizer=tokenizer, force=force)
    before, after = (sum(tensor.nbytes for tensor in each.state_dict().values()) for each in (loaded, made))
    click.echo(f"{out}: {bytes_text(after)} in {weights}, {bytes_text(before)} before")
    if read is not None:
        was, now = (perplexity_of(each, read[half:]) for each in (loaded, made))
        rise = now.perplexity / was.perplexity - 1
        click.echo(f"perplexity {now.perplexity:.4g}, {was.perplexity:.4g} before: {rise:+.2%} ({now.tokens:,} tokens)")


def rows(ids: list[int], length: int) -> Tensor:
    """Tokens to calibrate with, in a few rows of that length."""
    import torch

    length = min(length, len(ids))
    count = min(ROWS, len(ids) // max(length, 1))
    if not count:
        raise ValueError("half of the text is less than one token; give a longer text")
    return torch.tensor(ids[: count * length]).view(count, length)
