"""`clearhead chat`: a conversation with a model."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .options import cache_option, decoding_options, load_writer, weights_option

if TYPE_CHECKING:
    from clearhead.configs import Cache


@click.command("chat")
@click.argument("model")
@click.option("--system", default=None, metavar="TEXT", help="What the model is told before the conversation.")
@weights_option
@cache_option
@decoding_options
def command(model: str, system: str | None, weights: str | None, cache: Cache | None, **options: Any) -> None:
    """Converse with MODEL, a checkpoint folder that has a chat template.

    Every line of standard input is a turn of yours; the answers go to standard output. Ctrl-D ends it. What was said
    is remembered and not read again.

    \b
    clearhead chat path/to/model --system "Answer in one sentence." --temperature 0.7
    """
    loaded = load_writer(model, weights, cache)
    from clearhead.generate.complete import Task
    from clearhead.generate.conversation import Conversation
    from clearhead.generate.template import ChatTemplate

    task = Task.of(loaded, **options | {"stop": options["stop"] or None})
    assert loaded.origin is not None, "what was loaded has an origin"
    if task.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json, so it reads no text")
    conversation = Conversation(task, ChatTemplate.load(loaded.origin, task.tokenizer), system)
    while (said := ask()) is not None:
        for piece in conversation.reply(said) if said else ():
            click.echo(piece, nl=False)
        click.echo(nl=bool(said))


def ask() -> str | None:
    """A line of standard input; None at its end. On a terminal it is asked for."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    line = sys.stdin.readline()
    return line.strip() if line else None
