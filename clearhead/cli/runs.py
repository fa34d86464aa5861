"""`clearhead runs`: list training runs."""

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
    """List the runs under FOLDER with their progress and best validation loss.

    \b
    clearhead runs
    clearhead runs elsewhere/ --json
    """
    from pathlib import Path

    from clearhead.training.run import Run

    if not Path(folder).is_dir():
        raise ValueError(f"there is no folder {folder}; `clearhead train` writes runs to runs/")
    found = []
    for path in sorted(Path(folder).glob("**/recipe.json")):
        try:
            found.append(summarize(Run(path.parent)))
        except ValueError as error:  # list the others if one cannot be read
            click.echo(f"clearhead: {error}", err=True)
    if as_json:
        print_json(found)
        return
    if not found:
        raise ValueError(f"there are no runs under {folder}; start one with `clearhead train`")
    for line in found:
        state = "finished" if line["finished"] else "stopped"
        best = "·" if line["best"] is None else f"{line['best']:.4f}"
        console().print(f"{line['run']:<30} {line['step']:>7}/{line['steps']:<7} {state:<10} best val {best}")


def summarize(run: Run) -> dict[str, Any]:
    """What `runs` shows of one run."""
    lines = run.history()
    return {
        "run": str(run.folder),
        "step": lines[-1]["step"] if lines else 0,
        "steps": run.recipe().steps,
        "finished": run.finished,
        "best": min((line["val/loss"] for line in lines if "val/loss" in line), default=None),
    }
