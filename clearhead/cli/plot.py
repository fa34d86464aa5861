"""`clearhead plot`: draw loss curves of runs."""

from __future__ import annotations

import click

from .options import PICTURE, force_option, theme_option


@click.command("plot")
@click.argument("runs", nargs=-1, required=True, metavar="RUN...")
@click.option("--out", type=PICTURE, metavar="FILE", help="A .png, .svg or .pdf.  [default: loss.png in the first RUN]")
@theme_option
@force_option
def command(runs: tuple[str, ...], out: str | None, theme: str) -> None:
    """Draw the loss curves of one or more RUN folders in one figure.

    \b
    clearhead plot runs/lm
    clearhead plot runs/a runs/b --out compared.svg
    """
    from pathlib import Path

    from clearhead.training.curves import draw_curves

    path = Path(out) if out else Path(runs[0]) / "loss.png"
    draw_curves(runs, path, theme)
    click.echo(path)
