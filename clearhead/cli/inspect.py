"""`clearhead inspect`: look into a model while it reads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    Picture,
    console,
    device_option,
    find_config,
    force_option,
    json_option,
    load_model,
    print_json,
    read_text,
    theme_option,
)

if TYPE_CHECKING:
    from clearhead.inspect.grid import Grid
    from clearhead.inspect.inspection import Inspection

VIEWS = ("maps", "rollout", "lens", "norms", "ablation", "patching")


@click.command("inspect")
@click.argument("model")
@click.argument("text", metavar="INPUT")
@click.option("--target", default=None, metavar="TEXT", help="Of an encoder–decoder: what it has written so far.")
@click.option("as_ids", "--ids", is_flag=True, help="INPUT is token ids, such as '5 3 8'.")
@click.option("--write", type=int, default=0, help="Generate this many tokens, and look at those too.")
@click.option("--layers", default=None, metavar="LIST", help="Which layers, such as 0,3-5.  [default: all]")
@click.option("--heads", default=None, metavar="LIST", help="Which heads of each layer.  [default: all]")
@click.option("--rows", default=None, metavar="LIST", help="Which queries, such as 4 or -3--1.  [default: all]")
@click.option(
    "view",
    "--show",
    type=click.Choice(VIEWS),
    default="maps",
    show_default=True,
    help="What to print, draw or write down.",
)
@click.option("--token", default=None, metavar="TEXT", help="Whose log-probability changes.  [default: the likeliest]")
@click.option("--at", "row", type=int, default=-1, show_default=True, help="At which position it is asked for.")
@click.option("--other", default=None, metavar="INPUT", help="The input into whose run values are patched.")
@click.option(
    "--part",
    type=click.Choice(["residual", "mixer", "ffn", "heads"]),
    default="residual",
    show_default=True,
    help="What is patched.",
)
@click.option(
    "--out",
    multiple=True,
    type=Picture(also=(".html", ".csv", ".npz")),
    metavar="FILE",
    help="Write a page (.html), picture (.png, .svg, .pdf) or table (.csv, .npz); may be given again.",
)
@theme_option
@device_option
@force_option
@json_option
def command(
    model: str, text: str, as_ids: bool, view: str, out: tuple[str, ...], theme: str, as_json: bool, **asked: Any
) -> None:
    """Look into MODEL while it reads INPUT: a text, an image file, @FILE for a file's text, or - for stdin.

    MODEL is a checkpoint: a folder, a GGUF file, a name on the Hub; a preset or a config file gets fresh weights. The
    answer of the model is the same, bit for bit, as if nobody looked. On a page, go from all heads to one head to one
    cell, with the numbers.

    \b
    clearhead inspect runs/mine "To be or not to be" --out page.html
    clearhead inspect runs/mine "To be or not to be" --layers 1 --heads 0,3 --out maps.svg
    clearhead inspect runs/mine "To be" --write 20 --show lens
    clearhead inspect runs/mine "ten" --show patching --other "two" --out patching.png
    """
    if view == "patching" and asked["other"] is None:
        raise click.UsageError("--show patching needs --other INPUT, into whose run values are put")
    inspection = look(model, text, as_ids, asked)
    from clearhead.generate.defaults import context_length

    context, read = (
        context_length(inspection.model_input.model),
        len(inspection.model_input.source_labels or inspection.model_input.labels),
    )
    if context is not None and read > context:
        click.echo(f"clearhead: {read:,} tokens are inspected, but the model was made to read {context:,}", err=True)
    if inspection.model_input.generated < asked["write"]:
        wrote = f"{inspection.model_input.generated:,} of {asked['write']:,} tokens"
        click.echo(f"clearhead: {wrote} were written: the model came to an end, or its context did", err=True)
    grid = None if view == "maps" else grid_of(inspection, view, as_ids, asked)
    for path in out:
        if Path(path).suffix.lower() == ".html":
            inspection.save(path, grids=[] if grid is None else [grid], force=True)
        elif grid is None:
            inspection.save(path, theme, force=True)
        else:
            grid.save(path, theme, force=True)
    if as_json:
        print_json(inspection_data(inspection, grid, asked["row"]))
    else:
        show(inspection, grid, asked["row"])
        for path in out:
            click.echo(path)


def look(model: str, text: str, as_ids: bool, asked: dict[str, Any]) -> Inspection:
    from clearhead.inspect.inspection import inspect

    loaded, name = find_model(model)
    chosen: dict[str, Any] = {key: numbers(asked[key], key) for key in ("layers", "heads", "rows")}
    target = ids_of(asked["target"]) if as_ids and asked["target"] is not None else asked["target"]
    inputs = read_input(text, as_ids, loaded)
    return inspect(loaded, inputs, target, write=asked["write"], name=name, **chosen)


def find_model(model: str) -> tuple[Any, str | None]:
    """The model, and what to call it where it has no folder: a preset or a config gets fresh weights."""
    import torch

    from clearhead.models.hub import BUNDLED
    from clearhead.models.model import build
    from clearhead.models.presets import PRESETS

    path = Path(model)
    if path.suffix != ".json" and (path.exists() or model not in PRESETS):  # a folder, a file, or a name
        return load_model(model), model if model in BUNDLED else None
    torch.manual_seed(0)
    return build(find_config(model)).eval(), f"{path.stem} with fresh weights"


def read_input(text: str, as_ids: bool, model: Any) -> Any:
    from clearhead.configs import AudioEmbeddingConfig, PatchEmbeddingConfig

    embedding = getattr(model.config, "embedding", None) or model.config.source
    if isinstance(embedding, PatchEmbeddingConfig | AudioEmbeddingConfig):
        if not Path(text).is_file():
            kind = "images" if isinstance(embedding, PatchEmbeddingConfig) else "sound"
            raise click.UsageError(f"this model reads {kind}, and there is no file {text}")
        return Path(text)
    if text == "-" or text.startswith("@"):
        text = read_text(text.removeprefix("@"))
    return ids_of(text) if as_ids else text


def ids_of(text: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdigit() for word in words):
        raise click.UsageError(f"token ids are whole numbers, such as '5 3 8', not {text!r}")
    return [int(word) for word in words]


MOST = 1 << 20  # numbers of a range


def numbers(text: str | None, what: str) -> list[int] | None:
    """`0,3-5` -> 0, 3, 4, 5; `-1` is the last."""
    if text is None:
        return None
    import re

    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:-(-?\d+))?\s*", part)
        if match is None:
            raise click.UsageError(f"--{what} takes numbers and ranges, such as 0,3-5, not {text!r}")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or first < 0 <= last:
            raise click.UsageError(f"--{what} {part} holds nothing: a range goes up from one end, as 3-5 or -3--1")
        if last - first >= MOST:
            raise click.UsageError(f"--{what} {part} is a range of more than {MOST:,}")
        found += range(first, last + 1)
    return found


def grid_of(inspection: Inspection, view: str, as_ids: bool, asked: dict[str, Any]) -> Grid:
    token, row = asked["token"], asked["row"]
    if view == "rollout":
        return inspection.rollout()
    if view == "lens":
        return inspection.lens()
    if view == "norms":
        return inspection.norms()
    if view == "ablation":
        return inspection.ablate(token, row)
    return inspection.patch(read_input(asked["other"], as_ids, inspection.model_input.model), token, row, asked["part"])


def show(inspection: Inspection, grid: Grid | None, row: int) -> None:
    from clearhead.inspect.terminal import print_grid, print_inspection, print_next_tokens

    out = console()
    if grid is not None:
        print_grid(grid, out)
        return
    following = inspection.next(row, 5) if inspection.model_input.has_predictions else []
    print_inspection(inspection, out)
    if following:
        print_next_tokens(following, inspection.model_input.describe_position(row), out)


def inspection_data(inspection: Inspection, grid: Grid | None, row: int) -> dict[str, Any]:
    model_input = inspection.model_input
    data: dict[str, Any] = {"model": model_input.name, "tokens": model_input.labels, "written": model_input.generated}
    if model_input.source_labels is not None:
        data["source"] = model_input.source_labels
    if grid is not None:
        from math import isfinite

        values = [[value if isfinite(value) else None for value in line] for line in grid.values.tolist()]
        return data | {
            "title": grid.title,
            "unit": grid.unit,
            "rows": grid.rows,
            "columns": grid.columns,
            "values": values,
            "texts": grid.texts,
            "note": grid.note,
        }
    following = inspection.next(row) if model_input.has_predictions else []
    named = [{"token": word, "id": id, "probability": share} for word, id, share in following]
    return data | {
        "heads": [vars(head) for head in inspection.heads],
        "without_maps": inspection.layers_without_maps,
        "next": named,
    }
