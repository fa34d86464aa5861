"""`clearhead fill-mask`: masked words, filled in."""

from __future__ import annotations

from dataclasses import asdict

import click

from .options import gather, json_option, load_model, print_json, some, text_inputs


@click.command("fill-mask")
@click.argument("model")
@text_inputs
@click.option("--top", type=int, default=5, show_default=True, help="Words for each mask.")
@json_option
def command(model: str, texts: tuple[str, ...], files: tuple[str, ...], lines: bool, top: int, as_json: bool) -> None:
    """Print the likeliest words for each mask, such as [MASK], of each of TEXTS.

    \b
    clearhead fill-mask path/to/bert "Paris is the [MASK] of France."
    """
    wanted = some(gather(texts, files, lines))
    loaded = load_model(model)
    from clearhead.tasks.fill import fill_mask

    found = fill_mask(loaded, wanted, top=top)
    if as_json:
        rows = [
            {"text": text, "masks": [[asdict(one) for one in mask] for mask in masks]}
            for text, masks in zip(wanted, found, strict=True)
        ]
        print_json({"model": model, "texts": rows})
        return
    for masks in found:
        for mask in masks:
            for one in mask:
                click.echo(f"{one.score:.4f}  {one.word}\t{one.text}")
