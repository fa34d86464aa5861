"""`clearhead embed`: embeddings of texts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import print_json, text_task, tokenizer_option

if TYPE_CHECKING:
    from clearhead.models.model import Model


@click.command("embed")
@text_task
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
def command(
    name: str,
    model: Model,
    texts: list[str],
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
    from clearhead.tasks.sentences import SentenceSettings
    from clearhead.tasks.texts import embed
    from clearhead.tokenize import Tokenizer

    given = None if tokenizer is None else Tokenizer.load(tokenizer)
    found = embed(model, texts, pool=pool, normalize=normalize, truncate=truncate, tokenizer=given)
    vectors = [vector.tolist() for vector in found]
    pool = pool or SentenceSettings.of(model.origin).pool
    if as_json:
        rows = [{"text": text, "vector": vector} for text, vector in zip(texts, vectors, strict=True)]
        print_json({"model": name, "pool": pool, "embeddings": rows})
        return
    for vector in vectors:
        for row in vector if pool == "none" else [vector]:
            click.echo(" ".join(f"{number:.6g}" for number in row))
