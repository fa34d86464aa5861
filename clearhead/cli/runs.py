"""`clearhead runs`: what has been trained here."""

from __future__ import annotations

import click

from .options import console, json_option, print_json

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "adapter.safetensors")  # a trained model has one


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

    found = []
    for path in sorted(Path(folder).glob("**/recipe.json")):
        run = Run(path.parent)
        lines = run.history()
        losses = [line["val/loss"] for line in lines if "val/loss" in line]
        found.append(
            {
                "run": str(path.parent),
                "step": lines[-1]["step"] if lines else 0,
                "steps": run.recipe().steps,
                "finished": any((path.parent / name).exists() for name in WEIGHTS),
                "best": min(losses, default=None),
            }
        )
    if as_json:
        print_json(found)
        return
    if not found:
        raise ValueError(f"there are no runs under {folder}; `clearhead train` makes one")
    for line in found:
        state = "finished" if line["finished"] else "unfinished"
        best = "·" if line["best"] is None else f"{line['best']:.4f}"
        console().print(f"{line['run']:<30} {line['step']:>7}/{line['steps']:<7} {state:<10} best val {best}")
