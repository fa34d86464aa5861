"""`clearhead exercises`: starter files for every part."""

from __future__ import annotations

from pathlib import Path

import click

from .options import json_option, print_json


@click.command("exercises")
@click.option("folder", "--out", type=click.Path(file_okay=False, path_type=Path), help="Write the starters here.")
@click.option("--engine", type=click.Choice(["numpy", "torch", "both"]), default="both", show_default=True)
@click.option("--lang", type=click.Choice(["en", "zh"]), help="Language of the exercises.  [default: the locale's]")
@json_option
def command(folder: Path | None, engine: str, lang: str | None, as_json: bool) -> None:
    """List the exercises, or write their starter files to a folder, one for each part in the order you need them.

    Existing files are not overwritten. `clearhead check FILE` says whether a file is right and which comes next.

    \b
    clearhead exercises
    clearhead exercises --out exercises --engine numpy
    """
    from clearhead.checker.exercises import ENGINES, titles, write
    from clearhead.checker.messages import language, word

    spoken = language(lang)
    engines = ENGINES if engine == "both" else (engine,)
    if folder is None:
        found = titles(engines[0], spoken)
        if as_json:
            print_json(found)
        for name, title in () if as_json else found.items():
            click.echo(f"{name.removesuffix('.py'):24} {title}")
        return
    written = [path for e in engines for path in write(folder / e if engine == "both" else folder, e, spoken)]
    if as_json:
        print_json([str(path) for path in written])
        return
    first = folder / engines[0] / "01_softmax.py" if engine == "both" else folder / "01_softmax.py"
    click.echo(word("written", spoken).format(count=len(written), folder=folder, first=first.name, path=first))
