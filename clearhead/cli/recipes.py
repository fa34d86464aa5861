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
    about = {name: (make.__doc__ or "").strip() for name, make in RECIPES.items()}
    if as_json:
        print_json(about)
        return
    width = max(map(len, about))
    for name, text in about.items():
        console().print(f"{name:<{width}} {text}")
