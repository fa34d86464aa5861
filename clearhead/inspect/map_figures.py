"""Figures of attention maps: thumbnails of all heads, a few heads with tokens, or weights over an image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from .plotting import DIVERGING, SEQUENTIAL, figure, heat, label, save, set_title

if TYPE_CHECKING:
    from .inspection import Inspection
    from .maps import Map

WORDED = 12  # draw tokens on the axes up to this many heads


def draw_maps(inspection: Inspection, path: str | Path, theme: str = "light") -> None:
    """Draw one map per head: rows are queries, columns are keys."""
    heads = [(map, head) for map in inspection.maps for head in map.heads]
    if not heads:
        raise ValueError(
            f"there is no map to draw: {'; '.join(inspection.layers_without_maps) or 'no layer was inspected'}"
        )
    if inspection.model_input.image is not None:
        draw_over_image(inspection, path, theme)
    elif len(heads) <= WORDED:
        draw_words(inspection, heads, path, theme)
    else:
        draw_thumbnails(inspection, path, theme)


def draw_words(inspection: Inspection, heads: list[tuple[Map, int]], path: str | Path, theme: str) -> None:
    columns = min(len(heads), 4)
    lines = -(-len(heads) // columns)
    size = min(max(len(inspection.model_input.labels) * 0.15, 2.4), 6)
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
            axis.set_ylabel("query", fontsize=8)
            axis.set_xlabel("key", fontsize=8)
        finish(picture, inspection, image, axes[: len(grids)])
        save(picture, path)


def draw_thumbnails(inspection: Inspection, path: str | Path, theme: str) -> None:
    """Draw all heads small: layers from top to bottom, heads from left to right."""
    maps, all_rows = inspection.maps, inspection.rows is None
    shown = [map.thumbnails if all_rows else map.weights(rows=inspection.rows_of(map)) for map in maps]
    tags = {head.name: head.tag for head in inspection.heads} if all_rows else {}
    low, high, cmap = scale_of(shown, signed=not all(map.normalized for map in maps))
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
    """Colour range and map: 0 to 1, or symmetric around 0 for signed weights."""
    if not signed:
        return 0.0, 1.0, SEQUENTIAL
    most = max(float(abs(each).max(initial=0)) for each in values) or 1.0
    return -most, most, DIVERGING


def draw_over_image(inspection: Inspection, path: str | Path, theme: str) -> None:
    """Draw each head's weights over the image for one query (default: the class token)."""
    model_input, maps = inspection.model_input, inspection.maps
    assert model_input.image is not None, "draw_maps checked that there is an image"
    row = 0 if inspection.rows is None else inspection.rows[0]
    columns = max(len(map.heads) for map in maps)
    extent = (0, model_input.image.shape[1], model_input.image.shape[0], 0)
    with figure(1.5 * (columns + 1) + 1.2, 1.75 * len(maps) + 0.9, theme) as picture:
        axes = picture.subplots(len(maps), columns + 1, squeeze=False)
        for line, map in zip(axes, maps, strict=True):
            for axis in line:
                axis.set_axis_off()
            line[0].imshow(model_input.image, extent=extent)
            line[0].set_title("the image", fontsize=7)
            assert map.grid is not None, "maps of images have a patch grid"
            for axis, head, weights in zip(line[1:], map.heads, map.weights(rows=[row])[:, 0], strict=False):
                patches = weights[1:].reshape(map.grid, map.grid)
                top = float(abs(patches).max()) or 1.0
                low, cmap = (0, SEQUENTIAL) if map.normalized else (-1, DIVERGING)
                axis.imshow(model_input.image.mean(-1), extent=extent, cmap="gray", vmin=0, vmax=255)
                image = axis.imshow(patches / top, extent=extent, cmap=cmap, alpha=0.7, vmin=low, vmax=1)
                axis.set_title(f"layer {map.layer} head {head}\nmax {top:.2f}", fontsize=6.5)
        title = f"where {model_input.labels[row]!r} of {model_input.name} attends in the image"
        set_title(picture, title)
        picture.colorbar(image, ax=list(axes.ravel()), label="weight / largest of the head", shrink=0.7)
        save(picture, path)


def finish(picture: Any, inspection: Inspection, image: Any, axes: np.ndarray) -> None:
    model_input = inspection.model_input
    between = "" if model_input.tokenizer is not None else " "
    read = shorten(between.join(model_input.source_labels or model_input.labels))
    output = "" if model_input.source_labels is None else f", output “{shorten(between.join(model_input.labels))}”"
    set_title(picture, f"{model_input.name} on “{read}”{output}")
    picture.colorbar(image, ax=list(axes.ravel()), label="weight", shrink=0.8)


def shorten(text: str, most: int = 60) -> str:
    return repr(text if len(text) <= most else text[: most - 3] + "…")[1:-1].replace("$", r"\$")
