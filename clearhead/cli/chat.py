"""`clearhead chat`: chat with a model in the terminal."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clearhead.files import check_target, write_atomically

from .options import cache_option, decoding_options, device_option, echo_text, load_writer, weights_option

if TYPE_CHECKING:
    from clearhead.configs import Cache
    from clearhead.generate.conversation import Conversation

HELP = "commands: /help, /reset, /system TEXT, /save FILE; Ctrl-C stops an answer, Ctrl-D ends the chat"


@click.command("chat")
@click.argument("model")
@click.option("--system", default=None, metavar="TEXT", help="System message: instructions before the conversation.")
@device_option
@weights_option
@cache_option
@decoding_options
def command(model: str, system: str | None, weights: str | None, cache: Cache | None, **options: Any) -> None:
    """Chat with MODEL, a checkpoint folder with a chat template.

    Every line you type is a message; the answers go to standard output. Ctrl-C stops an answer, Ctrl-D ends the chat.

    \b
    /help            list the commands
    /reset           forget the conversation
    /system TEXT     set the system message and forget the conversation
    /save FILE       write the conversation to a JSON file

    \b
    clearhead chat path/to/model --system "Answer in one sentence." --temperature 0.7
    clearhead chat path/to/model --temperature 0.8 --top-p 0.95 --seed 1 --max-new-tokens 200
    """
    loaded = load_writer(model, weights, cache)
    from clearhead.generate.complete import TextGenerator
    from clearhead.generate.conversation import Conversation
    from clearhead.generate.template import ChatTemplate

    generator = TextGenerator.of(loaded, **options | {"stop": options["stop"] or None})
    assert loaded.origin is not None, "a loaded model has an origin"
    if generator.tokenizer is None:
        raise ValueError(f"{model} has no tokenizer.json, so it cannot read text")
    template = ChatTemplate.load(loaded.origin, generator.tokenizer)
    conversation = Conversation(generator, template, system)
    if sys.stdin.isatty():
        click.echo(HELP, err=True)
    while (message := read_message()) is not None:
        word, _, rest = message.partition(" ")
        if word in ("/reset", "/system"):
            system = rest.strip() or None if word == "/system" else system
            conversation = Conversation(generator, template, system)
            click.echo("The conversation starts again.", err=True)
        elif word == "/save":
            save_messages(conversation.messages, rest.strip())
        elif message.startswith("/"):
            click.echo(HELP if word == "/help" else f"there is no command {word}; {HELP}", err=True)
        elif message:
            answer(conversation, message)


def answer(conversation: Conversation, message: str) -> None:
    """Print the model's answer piece by piece. Ctrl-C stops it, and the chat goes on."""
    try:
        for piece in conversation.reply(message):
            echo_text(piece, nl=False)
    except KeyboardInterrupt:
        click.echo("\n(stopped; this answer is not part of the conversation)", err=True)
    click.echo()


def save_messages(messages: Sequence[Any], file: str) -> None:
    """Write the conversation as JSON; a problem is one sentence, and the chat goes on."""
    if not file:
        click.echo("/save needs a file name: /save chat.json", err=True)
        return
    try:
        check_target(file)
        write_atomically(Path(file), json.dumps(list(messages), ensure_ascii=False, indent=2) + "\n")
    except (OSError, ValueError) as error:
        click.echo(f"cannot write {file}: {error}", err=True)
    else:
        click.echo(f"Saved {len(messages)} messages in {file}.", err=True)


def read_message() -> str | None:
    """One line of standard input, without its ends; None at the end of the input. Prints a prompt on a terminal."""
    if sys.stdin.isatty():
        click.echo("> ", nl=False, err=True)
    line = sys.stdin.readline()
    return line.strip() if line else None
