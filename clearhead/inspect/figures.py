"""Maps as pictures: every head small, a few heads with their words, or what a query reads laid over its image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .draw import DIVERGING, SEQUENTIAL, figure, headline, heat, label, save

if TYPE_CHECKING:
    from .look import Inspection
    from .maps import Map

WORDED = 12  # the most heads that are drawn with their words


def draw_maps(inspection: Inspection, path: str | Path, theme: str = "light") -> None:
    """One square for each head: row = the token that reads, column = the token that is read."""
    heads = [(map, head) for map in inspection.maps for head in map.heads]
    if not heads:
        raise ValueError(f"there is no map to draw: {'; '.join(inspection.unseen) or 'no layer was looked at'}")
    if inspection.subject.image is not None:
        draw_over_image(inspection, path, theme)
    elif len(heads) <= WORDED:
        draw_words(inspection, heads, path, theme)
    else:
        draw_thumbnails(inspection, path, theme)


def draw_words(inspection: Inspection, heads: list[tuple[Map, int]], path: str | Path, theme: str) -> None:
    columns = min(len(heads), 4)
    lines = -(-len(heads) // columns)
    size = min(max(len(inspection.subject.labels) * 0.15, 2.4), 6)
    with figure((size + 0.9) * columns + 0.9, (size + 1.2) * lines + 0.5, theme) as picture:
        axes = picture.subplots(lines, columns, squeeze=False).ravel()
        grids = [inspection.map(map.layer, head, map.place) for map, head in heads]
        cells = sum(grid.values.size for grid in grids)
        scale = scale_of([grid.values for grid in grids], signed=any(grid.signed for grid in grids))
        for axis in axes[len(grids) :]:
            axis.set_axis_off()
        for axis, grid in zip(axes, grids, strict=False):
            image = heat(axis, grid.values, *scale, cells=cells)
            label(axis, grid.rows, grid.columns)
            axis.set_title(grid.title, fontsize=8)
            axis.set_ylabel("reads", fontsize=8)
            axis.set_xlabel("is read", fontsize=8)
        finish(picture, inspection, image, axes[: len(grids)])
        save(picture, path)


def draw_thumbnails(inspection: Inspection, path: str | Path, theme: str) -> None:
    """Layers from top to bottom, heads from left to right."""
    maps, all_rows = inspection.maps, inspection.rows is None
    shown = [map.thumbnails if all_rows else map.weights(rows=inspection.rows_of(map)) for map in maps]
    tags = {head.name: head.tag for head in inspection.heads} if all_rows else {}
    low, high, cmap = scale_of(shown, signed=not all(map.shares for map in maps))
    columns = max(len(map.heads) for map in maps)
    with figure(0.95 * columns + 1.6, 1.05 * len(maps) + 1.0, theme) as picture:
        axes = picture.subplots(len(maps), columns, squeeze=False)
        for line, map, squares in zip(axes, maps, shown, strict=True):
            for axis in line:
                axis.set_axis_off()
            for axis, small, head in zip(line, squares, map.heads, strict=False):
                axis.set_axis_on()
                image = axis.imshow(small, cmap=cmap, vmin=low, vmax=high, interpolation="nearest", aspect="auto")
                axis.set(xticks=[], yticks=[])
                tag = tags.get(f"{map.place} layer {map.layer} head {head}", "")
                axis.set_title(f"{head} {tag}".strip(), fontsize=5.5, pad=2)
            line[0].set_ylabel(f"{map.place}\nlayer {map.layer}", fontsize=6)
        finish(picture, inspection, image, axes)
        save(picture, path)


def scale_of(values: Sequence[np.ndarray], *, signed: bool) -> tuple[float, float, str]:
    """Between which weights the colours of a figure run, and which they are: from 0 to 1, or both ways from 0."""
    if not signed:
        return 0.0, 1.0, SEQUENTIAL
    most = max(float(abs(each).max(initial=0)) for each in values) or 1.0
    return -most, most, DIVERGING


def draw_over_image(inspection: Inspection, path: str | Path, theme: str) -> None:
    """What a query, the class token unless one is chosen, reads of the image, in every head."""
    subject, maps = inspection.subject, inspection.maps
    assert subject.image is not None, "draw_maps comes here with an image"
    row = 0 if inspection.rows is None else inspection.rows[0]
    columns = max(len(map.heads) for map in maps)
    extent = (0, subject.image.shape[1], subject.image.shape[0], 0)
    with figure(1.5 * (columns + 1) + 1.2, 1.75 * len(maps) + 0.9, theme) as picture:
        axes = picture.subplots(len(maps), columns + 1, squeeze=False)
        for line, map in zip(axes, maps, strict=True):
            for axis in line:
                axis.set_axis_off()
            line[0].imshow(subject.image, extent=extent)
            line[0].set_title("the image", fontsize=7)
            assert map.grid is not None, "maps of an image know its patches"
            for axis, head, weights in zip(line[1:], map.heads, map.weights(rows=[row])[:, 0], strict=False):
                patches = weights[1:].reshape(map.grid, map.grid)
                top = float(abs(patches).max()) or 1.0
                low, cmap = (0, SEQUENTIAL) if map.shares else (-1, DIVERGING)
                axis.imshow(subject.image.mean(-1), extent=extent, cmap="gray", vmin=0, vmax=255)
                image = axis.imshow(patches / top, extent=extent, cmap=cmap, alpha=0.7, vmin=low, vmax=1)
                axis.set_title(f"layer {map.layer} head {head}\nmost {top:.2f}", fontsize=6.5)
        title = f"what {subject.labels[row]!r} of {subject.name} reads of the image"
        headline(picture, title)
        picture.colorbar(image, ax=list(axes.ravel()), label="weight / the head's largest", shrink=0.7)
        save(picture, path)


def finish(picture: Any, inspection: Inspection, image: Any, axes: np.ndarray) -> None:
    subject = inspection.subject
    between = "" if subject.tokenizer is not None else " "
    read = shortened(between.join(subject.source_labels or subject.labels))
    said = "" if subject.source_labels is None else f", says “{shortened(between.join(subject.labels))}”"
    headline(picture, f"{subject.name} reads “{read}”{said}")
    picture.colorbar(image, ax=list(axes.ravel()), label="weight", shrink=0.8)


def shortened(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else text[: most - 3] + "…")[1:-1].replace("$", r"\$")
