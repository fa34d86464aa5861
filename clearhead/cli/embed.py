"""`clearhead embed`: embeddings of texts."""

from __future__ import annotations

from typing import Any

import click

from .options import device_option, gather_texts, json_option, load_model, print_json, require_texts, text_inputs


@click.command("embed")
@click.argument("model")
@text_inputs
@click.option(
    "--pool",
    type=click.Choice(["mean", "first", "pooler", "none"]),
    default="mean",
    show_default=True,
    help="Mean over the tokens, the first token, the model's own pooler, or one vector per token.",
)
@device_option
@json_option
def command(model: str, texts: tuple[str, ...], files: tuple[str, ...], lines: bool, pool: Any, as_json: bool) -> None:
    """Print the embedding of each of TEXTS: a line of numbers, or JSON.

    \b
    clearhead embed path/to/bert "A sentence." "Another one." --json
    clearhead embed path/to/bert --file sentences.txt --lines --pool first
    """
    wanted = require_texts(gather_texts(texts, files, lines))
    loaded = load_model(model)
    from clearhead.tasks.texts import embed

    vectors = [vector.tolist() for vector in embed(loaded, wanted, pool=pool)]
    if as_json:
        rows = [{"text": text, "vector": vector} for text, vector in zip(wanted, vectors, strict=True)]
        print_json({"model": model, "pool": pool, "embeddings": rows})
        return
    for vector in vectors:
        for row in vector if pool == "none" else [vector]:
            click.echo(" ".join(f"{number:.6g}" for number in row))
