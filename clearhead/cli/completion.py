"""`clearhead completion`: completion scripts for shells."""

from __future__ import annotations

import click


@click.command("completion")
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def command(shell: str) -> None:
    """Print the completion script for SHELL.

    \b
    source <(clearhead completion bash)
    clearhead completion fish > ~/.config/fish/completions/clearhead.fish
    """
    from click.shell_completion import get_completion_class

    from .main import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click knows the shells of the choice"
    # not kind.source(): for bash it starts bash to ask its version
    maker = kind(cli, {}, "clearhead", "_CLEARHEAD_COMPLETE")
    click.echo(maker.source_template % maker.source_vars())
