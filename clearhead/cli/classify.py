"""`clearhead classify`: classify texts or images."""

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


@click.command("classify")
@click.argument("model")
@text_inputs
@click.option("--top", type=int, default=5, show_default=True, help="Number of classes to print per input.")
@device_option
@json_option
def command(model: str, texts: tuple[str, ...], files: tuple[str, ...], lines: bool, top: int, as_json: bool) -> None:
    """Print the most likely classes of each of TEXTS. For an image model, TEXTS are image files.

    \b
    clearhead classify path/to/vit cat.png --top 3
    clearhead classify path/to/bert "What a fine day."
    """
    wanted = require_texts(gather_texts(texts, files, lines))
    loaded = load_model(model)
    from clearhead.tasks.classify import classify

    found = classify(loaded, wanted, top=top)
    if as_json:
        rows = [{"input": given, "classes": [asdict(one) for one in classes]} for given, classes in
                zip(wanted, found, strict=True)]  # fmt: skip
        print_json({"model": model, "inputs": rows})
        return
    for classes in found:
        for one in classes:
            echo_text(f"{one.score:.4f}  {one.label}")
