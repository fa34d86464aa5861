"""Which source tokens each word of a translation was written from."""

from __future__ import annotations

from clearhead.generate.complete import Completion
from clearhead.models.model import Model
from clearhead.tasks.translate import Translating
from clearhead.tokenize import Tokenizer

from .grid import Grid
from .inspection import Inspection, inspect


def inspect_translation(model: Model, text: str, one: Completion, tokenizer: Tokenizer | None = None) -> Inspection:
    """Inspect the model while it reads a source and the translation it wrote."""
    task = Translating.of(model, tokenizer)
    assert task.config.start is not None
    return inspect(model, task.read(text), [task.config.start, *one.tokens[:-1]], tokenizer=task.tokenizer)


def alignment(inspection: Inspection, one: Completion) -> Grid:
    """The mean of all cross-attention: a row for each token of the translation, a column for each source token."""
    maps = [map for map in inspection.maps if map.place == "cross"]
    weights = sum(map.weights().mean(0) for map in maps) / len(maps)
    rows, columns = inspection.names(maps[0])
    return Grid(
        title=f"{inspection.model_input.name}: attention to the source",
        values=weights,
        rows=[*rows[1:], "end" if one.reason == "end" else inspection.model_input.token_text(one.tokens[-1])],
        columns=columns,
        row_axis="translation",
        column_axis="source",
        unit="weight",
        note=f"mean over {len(maps)} layers and their heads",
    )
