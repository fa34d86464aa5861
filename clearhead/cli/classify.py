"""`clearhead classify`: classify texts or images."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from .options import echo_text, print_json, text_task, top_option

if TYPE_CHECKING:
    from clearhead.models.model import Model


@click.command("classify")
@text_task
@top_option("Number of classes to print per input.")
def command(name: str, model: Model, texts: list[str], top: int, as_json: bool) -> None:
    """Print the most likely classes of each of TEXTS. For an image model, TEXTS are image files.

    \b
    clearhead classify path/to/vit cat.png --top 3
    clearhead classify path/to/bert "What a fine day."
    """
    from clearhead.tasks.classify import classify

    found = classify(model, texts, top=top)
    if as_json:
        rows = [{"input": given, "classes": [asdict(one) for one in classes]} for given, classes in
                zip(texts, found, strict=True)]  # fmt: skip
        print_json({"model": name, "inputs": rows})
        return
    for classes in found:
        for one in classes:
            echo_text(f"{one.score:.4f}  {one.label}")
