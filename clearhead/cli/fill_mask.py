"""`clearhead fill-mask`: predict masked words."""

from __future__ import annotations

from dataclasses import asdict

import click

from .options import (
    device_option,
    echo_text,
    gather_texts,
    json_option,
    load_model,
    print_json,
    require_texts,
    text_inputs,
)


@click.command("fill-mask")
@click.argument("model")
@text_inputs
@click.option("--top", type=int, default=5, show_default=True, help="Number of words to print per mask.")
@device_option
@json_option
def command(model: str, texts: tuple[str, ...], files: tuple[str, ...], lines: bool, top: int, as_json: bool) -> None:
    """Print the most likely words for each mask, such as [MASK], in each of TEXTS.

    \b
    clearhead fill-mask path/to/bert "Paris is the [MASK] of France."
    clearhead fill-mask path/to/bert --file sentences.txt --lines --top 1 --json
    """
    wanted = require_texts(gather_texts(texts, files, lines))
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
                echo_text(f"{one.score:.4f}  {one.word}\t{one.text}")
