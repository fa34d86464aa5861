"""`clearhead eval`: how well a model foresees a text."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from .options import json_option, load_model, print_json, weights_option


@click.command("eval")
@click.argument("model")
@click.argument("files", nargs=-1, required=True)
@click.option("--context", type=int, default=None, help="Tokens read at once.  [default: the model's own, or 1024]")
@click.option("--stride", type=int, default=None, help="Tokens from one window to the next.  [default: half of it]")
@weights_option
@json_option
def command(
    model: str,
    files: tuple[str, ...],
    context: int | None,
    stride: int | None,
    weights: str | None,
    as_json: bool,
) -> None:
    """Print the perplexity of MODEL on the text of each of FILES, and its bits per byte.

    A long text is read in windows of the context; each token is counted once, in the first window that holds it.
    Bits per byte compares models of different tokenizers; perplexity is per token and does not.

    \b
    clearhead eval runs/mine held_out.txt --stride 128 --json
    """
    loaded = load_model(model, weights)
    from clearhead.measure.perplexity import perplexity_of

    rows = {}
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{file} is not UTF-8 text: {error.reason} at byte {error.start}") from None
        rows[file] = perplexity_of(loaded, text, context=context, stride=stride)
    if as_json:
        told = {
            file: asdict(one) | {"loss": one.loss, "perplexity": one.perplexity, "bits_per_byte": one.bits_per_byte}
            for file, one in rows.items()
        }
        print_json({"model": model, "files": told})
        return
    for file, one in rows.items():
        click.echo(
            f"{file}: perplexity {one.perplexity:.4g}, {one.bits_per_byte:.4f} bits per byte "
            f"({one.tokens:,} tokens, {one.bytes:,} bytes; context {one.context}, stride {one.stride})"
        )
