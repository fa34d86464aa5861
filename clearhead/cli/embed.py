"""`clearhead embed`: embeddings of texts."""

from __future__ import annotations

from typing import Any

import click

from .options import (
    device_option,
    gather_texts,
    json_option,
    load_model,
    print_json,
    require_texts,
    text_inputs,
    tokenizer_option,
)


@click.command("embed")
@click.argument("model")
@text_inputs
@click.option(
    "--pool",
    type=click.Choice(["mean", "first", "max", "last", "pooler", "none"]),
    default=None,
    help="Mean or maximum over the tokens, the first or last token, the model's own pooler, or one vector per token."
    "  [default: as the folder says, or mean]",
)
@click.option(
    "--normalize/--no-normalize",
    default=None,
    help="Scale each vector to length 1.  [default: as the folder says, or not]",
)
@click.option("--truncate", is_flag=True, help="Cut texts that are longer than the model's context.")
@tokenizer_option
@device_option
@json_option
def command(
    model: str,
    texts: tuple[str, ...],
    files: tuple[str, ...],
    lines: bool,
    pool: Any,
    normalize: bool | None,
    truncate: bool,
    tokenizer: str | None,
    as_json: bool,
) -> None:
    """Print the embedding of each of TEXTS: a line of numbers, or JSON.

    A folder of sentence-transformers says how to pool and normalize (modules.json), and that is the default.

    \b
    clearhead embed path/to/bert "A sentence." "Another one." --json
    clearhead embed path/to/bert --file sentences.txt --lines --pool first
    clearhead embed path/to/bert --file long.txt --truncate --normalize
    """
    wanted = require_texts(gather_texts(texts, files, lines))
    loaded = load_model(model)
    from clearhead.tasks.sentences import SentenceSettings
    from clearhead.tasks.texts import embed
    from clearhead.tokenize import Tokenizer

    given = None if tokenizer is None else Tokenizer.load(tokenizer)
    found = embed(loaded, wanted, pool=pool, normalize=normalize, truncate=truncate, tokenizer=given)
    vectors = [vector.tolist() for vector in found]
    pool = pool or SentenceSettings.of(loaded.origin).pool
    if as_json:
        rows = [{"text": text, "vector": vector} for text, vector in zip(wanted, vectors, strict=True)]
        print_json({"model": model, "pool": pool, "embeddings": rows})
        return
    for vector in vectors:
        for row in vector if pool == "none" else [vector]:
            click.echo(" ".join(f"{number:.6g}" for number in row))
