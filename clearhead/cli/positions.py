"""`clearhead positions`: plots of position encodings."""

from __future__ import annotations

from pathlib import Path

import click

from .options import PICTURES, check_free, force_option, json_option, print_json, theme_option

NAMES = ("curves", "table", "products", "rotation", "rotary", "alibi")
DEFAULT = "positions"


@click.command("positions")
@click.argument("figures", nargs=-1, type=click.Choice(NAMES), metavar="[FIGURE]...")
@click.option(
    "--out",
    type=PICTURES,
    default=DEFAULT,
    show_default=True,
    metavar="PATH",
    help="A folder, or a file for one FIGURE.",
)
@click.option("form", "--format", type=click.Choice(["png", "svg", "pdf"]), default="png", show_default=True)
@theme_option
@click.option("--length", type=int, default=100, show_default=True, help="Positions shown.")
@click.option("--dim", type=int, default=64, show_default=True, help="Width of the encoding and of a rotary head.")
@click.option("--base", type=float, default=10000.0, show_default=True, help="Base of the sinusoids; θ of rotary.")
@click.option("--step", type=int, default=5, show_default=True, help="The k of the rotation from pos to pos + k.")
@click.option("--heads", type=int, default=8, show_default=True, help="Heads of ALiBi.")
@click.option("--factor", type=float, default=8.0, show_default=True, help="Scaling factor of rotary.")
@click.option("--trained", type=int, default=4096, show_default=True, help="Context the model was trained with.")
@force_option
@json_option
def command(figures: tuple[str, ...], out: str, form: str, as_json: bool, **sizes: float | str) -> None:
    """Plot position encodings, or print them as numbers with --json. Without FIGURE, plot all of them.

    \b
    curves    the first 8 dimensions of the sinusoids
    table     their heat map, position by dimension
    products  PE(a)·PE(b) against the distance b − a
    rotation  the matrix that turns PE(pos) into PE(pos + k)
    rotary    RoPE's wavelengths, plain and with four kinds of scaling
    alibi     the penalty of each head by distance

    \b
    clearhead positions
    clearhead positions rotary --factor 32 --out rotary.svg
    clearhead positions rotation --dim 16 --step 3 --theme dark
    """
    from clearhead.inspect.positions import Positions, draw_positions, numbers

    asked = Positions(**sizes)  # type: ignore[arg-type]
    if as_json:
        parts = {name if name in ("rotary", "alibi") else "sinusoidal" for name in figures or NAMES}
        print_json({part: values for part, values in numbers(asked).items() if part in parts})
        return
    if Path(out).suffix and len(figures) != 1:
        raise click.UsageError(f"{out} is one file, but there are {len(figures or NAMES)} figures; name a folder")
    paths = {name: Path(out) if Path(out).suffix else Path(out, f"{name}.{form}") for name in figures or NAMES}
    if out != DEFAULT:
        for path in paths.values():
            check_free(path)
    for name, path in paths.items():
        draw_positions(name, path, asked)
        click.echo(path)
