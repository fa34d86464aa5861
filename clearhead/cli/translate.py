"""`clearhead translate`: translate line by line with an encoder–decoder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .options import (
    Picture,
    beam_options,
    device_option,
    force_option,
    json_option,
    load_model,
    print_json,
    read_lines,
    theme_option,
    translate_texts,
    weights_option,
)

if TYPE_CHECKING:
    from clearhead.configs import LengthPenalty
    from clearhead.generate.complete import Completion

BREAKS = str.maketrans("\n\r\t", "   ")  # a translation stays on one line


@click.command("translate")
@click.argument("model")
@click.argument("file", default="-")
@beam_options
@click.option("-n", "n", type=int, default=1, show_default=True, help="Translations per line, best first.")
@click.option(
    "--max-new-tokens",
    "-m",
    type=int,
    default=None,
    help="Most tokens to write.  [default: 32 plus three times the source]",
)
@click.option(
    "--attention",
    type=Picture(also=(".html", ".csv", ".npz")),
    default=None,
    metavar="FILE",
    help="Draw the attention of the first translation to its source: .html, .png, .svg, .pdf, .csv or .npz.",
)
@force_option
@theme_option
@device_option
@weights_option
@json_option
def command(
    model: str,
    file: str,
    beams: int,
    length_penalty: LengthPenalty,
    n: int,
    batch: int,
    max_new_tokens: int | None,
    attention: str | None,
    theme: str,
    weights: str | None,
    as_json: bool,
) -> None:
    """Translate each line of FILE, or of standard input.

    MODEL is the checkpoint folder of an encoder–decoder: a run of `clearhead train translate`, or a Marian model.
    An empty line stays empty. With -n, an output line has the line number, the score and the text, split by tabs.

    \b
    clearhead translate runs/translate sentences.txt > translated.txt
    echo "A dog runs." | clearhead translate runs/translate -n 3
    echo "A dog runs." | clearhead translate runs/translate --attention alignment.png
    """
    loaded = load_model(model, weights)
    lines = read_lines(file)
    found = translate_texts(loaded, lines, beams, length_penalty, batch, n=n, max_new_tokens=max_new_tokens)
    if as_json:
        print_json(
            {"model": model, "lines": [line_to_dict(line, best) for line, best in zip(lines, found, strict=True)]}
        )
    else:
        for number, one in ((number, one) for number, best in enumerate(found, 1) for one in best):
            text = one.text.translate(BREAKS)
            click.echo(text if n == 1 else f"{number}\t{one.score or 0.0:.4f}\t{text}")
    if attention is not None:
        draw(loaded, lines, found, attention, theme)


def line_to_dict(line: str, best: list[Completion]) -> dict[str, Any]:
    translations = [{"text": one.text, "score": one.score, "reason": one.reason} for one in best]
    return {"source": line, "translations": translations}


def draw(model: Any, lines: list[str], found: list[list[Completion]], path: str, theme: str) -> None:
    """Draw the alignment of the first line that is not empty; a page holds every attention map too."""
    from clearhead.inspect.alignment import alignment, inspect_translation

    first = next((i for i, line in enumerate(lines) if line.strip()), None)
    if first is None:
        raise ValueError("there is no translation to draw: all lines are empty")
    looked = inspect_translation(model, lines[first], found[first][0])
    grid = alignment(looked, found[first][0])
    if Path(path).suffix.lower() == ".html":
        looked.save(path, grids=[grid], force=True)
    else:
        grid.save(path, theme, force=True)
    click.echo(f"drew line {first + 1} to {path}", err=True)
