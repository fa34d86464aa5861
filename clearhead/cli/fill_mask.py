"""`clearhead fill-mask`: predict masked words."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .options import echo_text, print_json, text_task, top_option

if TYPE_CHECKING:
    from clearhead.models.model import Model


@click.command("fill-mask")
@text_task
@top_option("Number of words to print per mask.")
def command(name: str, model: Model, texts: list[str], top: int, as_json: bool) -> None:
    """Print the most likely words for each mask, such as [MASK], in each of TEXTS.

    \b
    clearhead fill-mask path/to/bert "Paris is the [MASK] of France."
    clearhead fill-mask path/to/bert --file sentences.txt --lines --top 1 --json
    """
    from clearhead.tasks.fill import fill_mask

    found = fill_mask(model, texts, top=top)
    if as_json:
        rows = [
            {"text": text, "masks": [[asdict(one) for one in mask] for mask in masks]}
            for text, masks in zip(texts, found, strict=True)
        ]
        print_json({"model": name, "texts": rows})
        return
    for masks in found:
        for mask in masks:
            for one in mask:
                echo_text(f"{one.score:.4f}  {one.word}\t{one.text}")
