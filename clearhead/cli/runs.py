"""`clearhead runs`: what has been trained here."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from .options import console, json_option, print_json

if TYPE_CHECKING:
    from clearhead.training.run import Run


@click.command("runs")
@click.argument("folder", default="runs")
@json_option
def command(folder: str, as_json: bool) -> None:
    """List the runs under FOLDER with how far they have come and their best validation loss.

    \b
    clearhead runs
    clearhead runs elsewhere/ --json
    """
    from pathlib import Path

    from clearhead.training.run import Run

    if not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}; `clearhead train` makes its runs in runs/")
    found = []
    for path in sorted(Path(folder).glob("**/recipe.json")):
        try:
            found.append(told(Run(path.parent)))
        except ValueError as error:  # one that cannot be read keeps nobody from seeing the others
            click.echo(f"clearhead: {error}", err=True)
    if as_json:
        print_json(found)
        return
    if not found:
        raise ValueError(f"there are no runs under {folder}; `clearhead train` makes one")
    for line in found:
        state = "finished" if line["finished"] else "unfinished"
        best = "·" if line["best"] is None else f"{line['best']:.4f}"
        console().print(f"{line['run']:<30} {line['step']:>7}/{line['steps']:<7} {state:<10} best val {best}")


def told(run: Run) -> dict[str, Any]:
    lines = run.history()
    return {
        "run": str(run.folder),
        "step": lines[-1]["step"] if lines else 0,
        "steps": run.recipe().steps,
        "finished": run.trained,
        "best": min((line["val/loss"] for line in lines if "val/loss" in line), default=None),
    }
