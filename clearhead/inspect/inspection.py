"""`model.inspect(…)`: one forward pass that records attention, and the questions you can ask afterwards."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from clearhead.configs import PatchEmbeddingConfig
from clearhead.files import check_target, stage_file
from clearhead.models.model import Model
from clearhead.nn.attention_view import AttentionView
from clearhead.nn.tap import Taps

from .grid import TABLES, Grid
from .interventions import PatchPart, ablate, patch
from .lens import lens, next_tokens, norms
from .maps import HeadSummary, Map, combine_global, join_numbers, resolve_indices, rollout
from .model_input import ModelInput, make_model_input
from .plotting import check_file
from .replay import OUTSIDE, Replay, stream_taps

if TYPE_CHECKING:
    from clearhead.tokenize import Tokenizer

CELLS = 20_000_000  # limit on the weights in one table
NOTEBOOK_BYTES = 6_000_000


@dataclass(frozen=True, repr=False)
class Inspection:
    """One recorded pass. Maps, thumbnails and tags are computed on first use."""

    model_input: ModelInput
    maps: list[Map]
    layers_without_maps: list[str]  # one sentence per layer without an attention map
    logits: Tensor  # the model's output in the recorded pass
    values: dict[str, Tensor]  # the residual stream and what is outside the blocks, by tap
    rows: list[int] | None = None  # queries to show; None: all

    def map(self, layer: int, head: int, place: str | None = None) -> Grid:
        """One head's map: rows are queries, columns are keys."""
        found = self.at(layer, place)
        queries, keys = self.names(found)
        rows = self.rows_of(found)
        values = found.weights(head, rows)[0]
        all_rows = self.rows is None  # a tag describes the whole map
        tags = {each.head: each.tag for each in found.head_summaries} if all_rows else {}
        return Grid(
            title=", ".join(filter(None, (f"{found.place} layer {found.layer}", f"head {head}", tags.get(head)))),
            values=values,
            rows=[queries[i] for i in rows],
            columns=keys,
            row_axis="query",
            column_axis="key",
            unit="weight",
            signed=not found.normalized,
        )

    @property
    def replay(self) -> Replay:
        """Runs single blocks of the recorded pass again."""
        return Replay(self.model_input, self.values)

    @property
    def heads(self) -> list[HeadSummary]:
        """Summary of every inspected head."""
        return [head for map in self.maps for head in map.head_summaries]

    def rollout(self, place: str | None = None) -> Grid:
        """How much each input token contributes to each output position if only attention moved information."""
        place = place or next(iter(self.model_input.stacks()))
        maps = [map for map in self.maps if map.place == place]
        blocks = self.model_input.stacks().get(place, ())
        layers = len(blocks)
        if len(maps) < layers or not maps:
            missing = "; ".join(self.layers_without_maps) or "some layers were not inspected"
            raise ValueError(f"rollout needs the maps of all {layers} layers of {place!r}, but {missing}")
        if other := [map.layer for map in maps if not (map.is_self_attention and map.normalized)]:
            raise ValueError(
                f"rollout needs self-attention weights that sum to 1, which layer {other[0]} does not have"
            )
        (queries, keys), rows = self.names(maps[0]), self.rows_of(maps[0])
        chosen = any(len(map.heads) < getattr(blocks[map.layer].mixer, "heads", 0) for map in maps)
        return Grid(
            title=f"rollout through {layers} layers",
            values=rollout(maps)[rows],
            rows=[queries[i] for i in rows],
            columns=keys,
            row_axis="output position",
            column_axis="input",
            unit="share",
            note=f"only heads {' or '.join(dict.fromkeys(join_numbers(map.heads) for map in maps))}" * chosen,
        )

    def lens(self, rows: Sequence[int] | None = None) -> Grid:
        """The most likely token by layer and position (logit lens)."""
        return lens(self.model_input, self.values, self.rows if rows is None else rows)

    def norms(self) -> Grid:
        """‖x‖ of the residual stream by layer and position."""
        return norms(self.model_input, self.values, self.rows)

    def next(self, row: int = -1, top: int = 10) -> list[tuple[str, int, float]]:
        """The most likely next tokens (or masked tokens, or classes) at `row`: text, id, probability."""
        return next_tokens(self.model_input, self.logits, row, top)

    def ablate(self, token: str | int | None = None, row: int = -1) -> Grid:
        """Change in log p(token) at `row` when one head's output is set to zero, by layer and head."""
        return ablate(self.replay, self.maps, self.logits, token, row)

    def patch(self, other: Any, token: str | int | None = None, row: int = -1, part: PatchPart = "residual") -> Grid:
        """Copy values of this run into a run of `other`, a prompt (or source) with the same number of tokens."""
        mine = self.model_input
        target = None if mine.source is None else mine.inputs
        second = make_model_input(mine.model, other, target, tokenizer=mine.tokenizer, name=mine.name)
        return patch(mine, second, self.maps, token, row, part)

    def rows_of(self, map: Map) -> list[int]:
        """The queries of a map to show. `rows` selects target positions; an encoder map shows all."""
        return list(range(map.shape[0])) if self.rows is None or map.place == "encoder" else self.rows

    def at(self, layer: int, place: str | None = None) -> Map:
        """The map of a layer."""
        found = [map for map in self.maps if map.layer == layer and place in (None, map.place)]
        if not found:
            seen = ", ".join(dict.fromkeys(f"{map.place} {map.layer}" for map in self.maps)) or "none"
            raise ValueError(f"layer {layer} was not inspected; inspected layers: {seen}")
        return found[0]

    def names(self, map: Map) -> tuple[list[str], list[str]]:
        """Labels of a map's queries and keys."""
        mine, source = self.model_input.labels, self.model_input.source_labels or []
        queries = source if map.place == "encoder" else mine
        if map.place == "cross":
            return queries, source
        return queries, queries if map.is_self_attention else [f"mixture {n}" for n in range(map.shape[1])]

    def save(self, path: str | Path, theme: str = "light", *, force: bool = False, **options: Any) -> None:
        """All maps as a picture (.png, .svg, .pdf), a table (.csv, .npz) or a page (.html).

        `force` replaces a file that exists.
        """
        from .map_figures import draw_maps
        from .page import write_page

        path, suffix = Path(path), Path(path).suffix.lower()
        check_file(path, (*TABLES, ".html"))
        check_target(path, force)
        if suffix == ".html":
            write_page(self, path, **options)
        elif suffix in TABLES:
            self.write_table(path)
        else:
            draw_maps(self, path, theme)

    def write_table(self, path: Path) -> None:
        """Write every selected attention weight."""
        cells = sum(len(m.heads) * m.shape[1] * len(self.rows_of(m)) for m in self.maps)
        if cells > CELLS:
            raise ValueError(
                f"the maps hold {cells:,} weights, but a table holds at most {CELLS:,}: select layers, heads or rows"
            )
        if path.suffix.lower() == ".npz":
            arrays = {f"{m.place}.{m.layer}": m.weights(rows=self.rows_of(m)) for m in self.maps}
            heads = {f"{m.place}.{m.layer}.heads": np.array(m.heads) for m in self.maps}
            labels = {"tokens": np.array(self.model_input.labels)}
            if self.model_input.source_labels is not None:
                labels["source"] = np.array(self.model_input.source_labels)
            with stage_file(path) as part, part.open("wb") as file:
                np.savez_compressed(file, allow_pickle=False, **arrays, **heads, **labels)
            return
        with stage_file(path) as part, part.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file)
            out.writerow(("place", "layer", "head", "query", "query token", "key", "key token", "weight"))
            for map in self.maps:
                queries, keys = self.names(map)
                rows = self.rows_of(map)
                for head in map.heads:
                    weights = map.weights(head, rows)[0]
                    for r, j in np.argwhere(weights != 0).tolist():
                        i = rows[r]
                        named = (map.place, map.layer, head, i, queries[i], j, keys[j])
                        out.writerow((*named, repr(float(weights[r, j]))))

    def html(self, limit: int = 25_000_000) -> str:
        """The page that `save("page.html")` writes, at most `limit` bytes."""
        from .page import page

        return page(self, limit)

    def _repr_html_(self) -> str:
        """The page in an iframe, for notebooks."""
        from html import escape

        inside = escape(self.html(NOTEBOOK_BYTES), quote=True)
        return f'<iframe title="attention" srcdoc="{inside}" style="width:100%;height:760px;border:0"></iframe>'

    def __str__(self) -> str:
        from .terminal import to_text

        return to_text(self)

    __repr__ = __str__


def inspect(
    model: Model,
    inputs: Any,
    target: Any = None,
    *,
    tokenizer: Tokenizer | None = None,
    labels: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    rows: Sequence[int] | None = None,
    write: int = 0,
    name: str | None = None,
) -> Any:
    """Run a model on one input and record its attention in an `Inspection`; a list of texts gives a list of them.

    The output is bit-equal to an unrecorded pass.

    inputs     a text, token ids, an image or its file; for an encoder–decoder the source
    tokenizer  needed only if the model was not loaded from a folder with one
    layers, heads  what to record; the rest costs nothing
    rows       queries that maps, figures and tables show; tags and pages use all of them
    write      first generate this many tokens, and record them too

    Example: `model.inspect("Once upon a time").map(layer=0, head=1)` is one head's map, with its labels.
    """
    if isinstance(inputs, list) and inputs and all(isinstance(text, str) for text in inputs):
        options: dict[str, Any] = {
            "tokenizer": tokenizer, "labels": labels, "layers": layers, "heads": heads, "rows": rows, "write": write,
            "name": name,
        }  # fmt: skip
        return [inspect(model, text, target, **options) for text in inputs]
    model_input = make_model_input(model, inputs, target, tokenizer=tokenizer, labels=labels, write=write, name=name)
    chosen = None if rows is None else resolve_indices(rows, len(model_input.labels), "row", "queries")
    return Inspection(model_input, *record(model_input, layers, heads), chosen)


def record(
    model_input: ModelInput, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[list[Map], list[str], Tensor, dict[str, Tensor]]:
    """Run once. Return the maps of the chosen layers, a sentence per layer without one, the output and kept values."""
    seen: dict[str, tuple[list[int], AttentionView]] = {}

    def keep(attending: AttentionView) -> None:
        all_heads = attending.q.shape[1]
        chosen = list(range(all_heads)) if heads is None else resolve_indices(heads, all_heads, "head", "heads")
        seen[attending.context.path] = chosen, attending.for_heads(chosen)

    wanted = {}
    for stack, blocks in model_input.stacks().items():
        for i in (
            range(len(blocks))
            if layers is None
            else resolve_indices(layers, len(blocks), "layer", f"layers of {stack}")
        ):
            wanted[f"{stack}.blocks.{i}.mixer"] = (stack, i, blocks[i].mixer.kind())
            if getattr(blocks[i], "cross", None) is not None:
                wanted[f"{stack}.blocks.{i}.cross"] = ("cross", i, "Attention")
    places = (*wanted, *(f"{path}.global" for path in wanted))
    taps = Taps(read=(*OUTSIDE, *stream_taps(model_input)), on_attention=dict.fromkeys(places, keep), strict=False)
    logits = model_input.run(taps)
    maps, layers_without_maps = [], []
    for path, (place, i, kind) in wanted.items():
        if path not in seen:
            layers_without_maps.append(f"{place} layer {i} ({kind}) has no attention map")
            continue
        chosen, attending = seen[path]
        if f"{path}.global" in seen:
            attending = combine_global(attending, seen[f"{path}.global"][1])
        ids = model_input.source if place == "encoder" else model_input.inputs
        patches = model_input.model.config.embedding if model_input.image is not None else None  # type: ignore[union-attr]
        side = patches.image // patches.patch if isinstance(patches, PatchEmbeddingConfig) else None
        tokens = None if ids is None or ids.is_floating_point() else ids[0].numpy()
        maps.append(Map(place, i, tuple(chosen), attending, tokens, side))
    order = {"stack": 0, "encoder": 0, "decoder": 1, "cross": 2}
    return sorted(maps, key=lambda map: (order[map.place], map.layer)), layers_without_maps, logits, taps.values
