"""`clearhead exercises`: starter files for every part."""

from __future__ import annotations

from pathlib import Path

import click

from .options import json_option, print_json


@click.command("exercises")
@click.option("folder", "--out", type=click.Path(file_okay=False, path_type=Path), help="Write the starters here.")
@click.option("--engine", type=click.Choice(["numpy", "torch", "both"]), default="both", show_default=True)
@click.option("--lang", type=click.Choice(["en", "zh"]), help="Language of what is said here.  [default: the locale's]")
@json_option
def command(folder: Path | None, engine: str, lang: str | None, as_json: bool) -> None:
    """List the exercises, or write their starter files to a folder, one for each part in the order of need.

    A file that is there already is left alone. `clearhead check FILE` says whether it is right and what comes next.

    \b
    clearhead exercises
    clearhead exercises --out exercises --engine numpy
    """
    from clearhead.checker.exercises import ENGINES, starters, write
    from clearhead.checker.messages import language, word

    engines = ENGINES if engine == "both" else (engine,)
    if folder is None:
        titles = {
            name: text.splitlines()[0].strip('"').split(". ", 1)[1] for name, text in starters(engines[0]).items()
        }
        if as_json:
            print_json(titles)
        for name, title in () if as_json else titles.items():
            click.echo(f"{name.removesuffix('.py'):24} {title}")
        return
    written = [path for e in engines for path in write(folder / e if engine == "both" else folder, e)]
    if as_json:
        print_json([str(path) for path in written])
        return
    first = folder / engines[0] / "01_softmax.py" if engine == "both" else folder / "01_softmax.py"
    text = word("written", language(lang)).format(count=len(written), folder=folder, first=first.name, path=first)
    click.echo(text)
