"""`clearhead chat`: chat with a model in the terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import click

from .options import cache_option, decoding_options, device_option, load_writer, weights_option

if TYPE_CHECKING:
    from clearhead.configs import Cache


@click.command("chat")
@click.argument("model")
@click.option("--system", default=None, metavar="TEXT", help="System message: instructions before the conversation.")
@device_option
@weights_option
@cache_option
@decoding_options
def command(model: str, system: str | None, weights: str | None, cache: Cache | None, **options: Any) -> None:
    """Chat with MODEL, a checkpoint folder with a chat template.

    Every line you type is a message; the answers go to standard output. Ctrl-D ends the chat.

    \b
    clearhead chat path/to/model --system "Answer in one sentence." --temperature 0.7
    """
    loaded = load_writer(model, weights, cache)
    from clearhead.generate.complete import TextGenerator
    from clearhead.generate.conversation import Conversation
    from clearhead.generate.template import ChatTemplate

    generator = TextGenerator.of(loaded, **options | {"stop": options["stop"] or None})
    assert loaded.origin is not None, "a loaded model has an origin"
    if generator.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json, so it cannot read text")
    conversation = Conversation(generator, ChatTemplate.load(loaded.origin, generator.tokenizer), system)
    while (message := read_message()) is not None:
        for piece in conversation.reply(message) if message else ():
            click.echo(piece, nl=False)
        click.echo(nl=bool(message))


def read_message() -> str | None:
    """One line of standard input, without its ends; None at the end of the input. Prints a prompt on a terminal."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    line = sys.stdin.readline()
    return line.strip() if line else None
