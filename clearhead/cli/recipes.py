"""`clearhead recipes`: training recipes by name."""

from __future__ import annotations

import click

from .options import console, json_option, print_json


@click.command("recipes")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the recipes of `clearhead train`; with NAME, print that recipe as recipe.json.

    \b
    clearhead recipes
    clearhead recipes lm > recipe.json
    """
    from clearhead.configs import dumps
    from clearhead.training.recipes import RECIPES, recipe

    if name is not None:
        click.echo(dumps(recipe(name)), nl=False)
        return
    about = {name: " ".join((make.__doc__ or "").split()) for name, make in RECIPES.items()}
    if as_json:
        print_json(about)
        return
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False, pad_edge=False)
    for row in about.items():
        table.add_row(*row)
    console().print(table)
