"""`clearhead presets`: the named architectures."""

from __future__ import annotations

import click

from clearhead.units import count_text

from .options import console, json_option, print_json


@click.command("presets")
@click.argument("name", required=False)
@json_option
def command(name: str | None, as_json: bool) -> None:
    """List the presets with their parameter counts; with NAME, print that one as clearhead.json.

    \b
    clearhead presets
    clearhead presets gpt2 > clearhead.json
    """
    from clearhead.configs import dumps
    from clearhead.models.presets import PRESETS, preset

    if name is not None:
        click.echo(dumps(preset(name)), nl=False)
        return
    from clearhead.measure.cost import cost

    totals = {name: cost(preset(name), length=None).parameters.total for name in PRESETS}
    if as_json:
        print_json(totals)
        return
    out = console()
    for name, total in totals.items():
        out.print(f"{name:<20}{total:>17,}  {count_text(total):>7}")
