"""`model.inspect(…)`: one pass with somebody looking, and everything that can be asked of it afterwards."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from clearhead.configs import PatchEmbeddingConfig
from clearhead.files import stage_file
from clearhead.models.assemble import Model
from clearhead.nn.attention_view import AttentionView
from clearhead.nn.tap import Taps

from .draw import check_file
from .effects import Part, ablate, patch
from .grid import TABLES, Grid
from .lens import following, lens, norms
from .maps import Head, Map, checked, listed, rollout, with_global
from .subject import Subject, make_subject

if TYPE_CHECKING:
    from clearhead.tokenize import Tokenizer

CELLS = 20_000_000  # the most weights that a table of maps may hold
NOTEBOOK_BYTES = 6_000_000


@dataclass(frozen=True)
class Inspection:
    """What was seen. Maps, thumbnails and tags are computed when they are asked for; the rest takes a new pass."""

    subject: Subject
    maps: list[Map]
    unseen: list[str]  # layers that keep no attention map
    answer: Tensor  # what the model said in the very pass that was looked at
    rows: list[int] | None = None  # the queries that are shown; None: all

    def map(self, layer: int, head: int, place: str | None = None) -> Grid:
        """One head's map: the row is the token that reads, the column the one that is read."""
        found = self.at(layer, place)
        queries, keys = self.names(found)
        rows = self.rows_of(found)
        values = found.weights(head, rows)[0]
        tags = {each.head: each.tag for each in found.described} if self.rows is None else {}  # a tag is of all rows
        return Grid(
            title=", ".join(filter(None, (f"{found.place} layer {found.layer}", f"head {head}", tags.get(head)))),
            values=values,
            rows=[queries[i] for i in rows],
            columns=keys,
            row_axis="reads",
            column_axis="is read",
            unit="weight",
            signed=not found.shares,
        )

    @property
    def heads(self) -> list[Head]:
        """What every head that was looked at does."""
        return [head for map in self.maps for head in map.described]

    def rollout(self, place: str | None = None) -> Grid:
        """How much of each input token is left in each last position, if attention were all that moves information."""
        place = place or next(iter(self.subject.stacks()))
        maps = [map for map in self.maps if map.place == place]
        blocks = self.subject.stacks().get(place, ())
        layers = len(blocks)
        if len(maps) < layers or not maps:
            missing = "; ".join(self.unseen) or "not all layers were looked at"
            raise ValueError(f"a rollout goes through the maps of all {layers} layers of {place!r}, but {missing}")
        if other := [map.layer for map in maps if not (map.selfish and map.shares)]:
            raise ValueError(f"a rollout is of shares of the positions themselves, and layer {other[0]} has none")
        (queries, keys), rows = self.names(maps[0]), self.rows_of(maps[0])
        chosen = any(len(map.heads) < getattr(blocks[map.layer].mixer, "heads", 0) for map in maps)
        return Grid(
            title=f"rollout through {layers} layers",
            values=rollout(maps)[rows],
            rows=[queries[i] for i in rows],
            columns=keys,
            row_axis="last position",
            column_axis="input",
            unit="share",
            note=f"through heads {' or '.join(dict.fromkeys(listed(map.heads) for map in maps))} alone" * chosen,
        )

    def lens(self, rows: Sequence[int] | None = None) -> Grid:
        """The likeliest token by layer and position (`lens.lens`)."""
        return lens(self.subject, self.rows if rows is None else rows)

    def norms(self) -> Grid:
        """‖x‖ of the residual stream by layer and position."""
        return norms(self.subject, self.rows)

    def next(self, row: int = -1, top: int = 10) -> list[tuple[str, int, float]]:
        """The likeliest tokens after a position (of a masked language model, at it) or classes: text, id, share."""
        return following(self.subject, self.answer, row, top)

    def ablate(self, token: str | int | None = None, row: int = -1) -> Grid:
        """The change in log p(token) after position `row` when a head is set to zero, by layer and head."""
        return ablate(self.subject, self.maps, token, row)

    def patch(self, other: Any, token: str | int | None = None, row: int = -1, part: Part = "residual") -> Grid:
        """`other` is a prompt of as many tokens, or another source, into whose run this one's values are put."""
        mine = self.subject
        target = None if mine.source is None else mine.inputs
        second = make_subject(mine.model, other, target, tokenizer=mine.tokenizer, name=mine.name)
        return patch(mine, second, self.maps, token, row, part)

    def rows_of(self, map: Map) -> list[int]:
        """The queries of a map that are shown. What is chosen is the target's: of a source all are."""
        return list(range(map.shape[0])) if self.rows is None or map.place == "encoder" else self.rows

    def at(self, layer: int, place: str | None = None) -> Map:
        """The map of a layer."""
        found = [map for map in self.maps if map.layer == layer and place in (None, map.place)]
        if not found:
            seen = ", ".join(dict.fromkeys(f"{map.place} {map.layer}" for map in self.maps)) or "none"
            raise ValueError(f"layer {layer} was not looked at; there are {seen}")
        return found[0]

    def names(self, map: Map) -> tuple[list[str], list[str]]:
        """What the queries and the keys of a map are called."""
        mine, source = self.subject.labels, self.subject.source_labels or []
        queries = source if map.place == "encoder" else mine
        if map.place == "cross":
            return queries, source
        return queries, queries if map.selfish else [f"mixture {n}" for n in range(map.shape[1])]

    def save(self, path: str | Path, theme: str = "light", **options: Any) -> None:
        """All maps as a picture (.png, .svg, .pdf), a table (.csv, .npz) or a page (.html)."""
        from .figures import draw_maps
        from .page import write_page

        path, suffix = Path(path), Path(path).suffix.lower()
        check_file(path, (*TABLES, ".html"))
        if suffix == ".html":
            write_page(self, path, **options)
        elif suffix in TABLES:
            self.write_table(path)
        else:
            draw_maps(self, path, theme)

    def write_table(self, path: Path) -> None:
        """Every weight of what was chosen, in the model's numbers."""
        cells = sum(len(m.heads) * m.shape[1] * len(self.rows_of(m)) for m in self.maps)
        if cells > CELLS:
            raise ValueError(
                f"the maps hold {cells:,} weights, and a table takes {CELLS:,}: choose layers, heads or rows"
            )
        if path.suffix.lower() == ".npz":
            arrays = {f"{m.place}.{m.layer}": m.weights(rows=self.rows_of(m)) for m in self.maps}
            heads = {f"{m.place}.{m.layer}.heads": np.array(m.heads) for m in self.maps}
            labels = {"tokens": np.array(self.subject.labels)}
            if self.subject.source_labels is not None:
                labels["source"] = np.array(self.subject.source_labels)
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
        """The page that `save("….html")` writes, of at most so many bytes."""
        from .page import page

        return page(self, limit)

    def _repr_html_(self) -> str:
        """The page in a frame of its own, for notebooks."""
        from html import escape

        inside = escape(self.html(NOTEBOOK_BYTES), quote=True)
        return f'<iframe title="attention" srcdoc="{inside}" style="width:100%;height:760px;border:0"></iframe>'

    def __str__(self) -> str:
        from .show import text_of

        return text_of(self)


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
) -> Inspection:
    """Look at a model while it reads one input; the model's answer is the same, bit for bit, as if nobody looked.

    inputs  a text, token ids, an image or its file; of an encoder–decoder the source, with a target
    tokenizer  where the model was not loaded from a folder that holds one
    layers, heads  what to look at; the rest costs nothing
    rows    which queries maps, pictures and tables show, of an encoder–decoder the target's; tags and pages are of all
    write   let the model go on for so many tokens, and look at those too
    """
    subject = make_subject(model, inputs, target, tokenizer=tokenizer, labels=labels, write=write, name=name)
    chosen = None if rows is None else checked(rows, len(subject.labels), "row", "queries")
    return Inspection(subject, *look(subject, layers, heads), chosen)


def look(
    subject: Subject, layers: Sequence[int] | None, heads: Sequence[int] | None
) -> tuple[list[Map], list[str], Tensor]:
    """The maps of the chosen layers, what is to be said of layers that have none, and the model's answer."""
    seen: dict[str, tuple[list[int], AttentionView]] = {}

    def keep(attending: AttentionView) -> None:
        all_heads = attending.q.shape[1]
        chosen = list(range(all_heads)) if heads is None else checked(heads, all_heads, "head", "heads")
        seen[attending.context.path] = chosen, attending.for_heads(chosen)

    wanted = {}
    for stack, blocks in subject.stacks().items():
        for i in range(len(blocks)) if layers is None else checked(layers, len(blocks), "layer", f"layers of {stack}"):
            wanted[f"{stack}.blocks.{i}.mixer"] = (stack, i, blocks[i].mixer.kind())
            if getattr(blocks[i], "cross", None) is not None:
                wanted[f"{stack}.blocks.{i}.cross"] = ("cross", i, "Attention")
    places = (*wanted, *(f"{path}.global" for path in wanted))
    answer = subject.run(Taps(on_attention=dict.fromkeys(places, keep)))
    maps, unseen = [], []
    for path, (place, i, kind) in wanted.items():
        if path not in seen:
            unseen.append(f"{place} layer {i} ({kind}) keeps no attention map")
            continue
        chosen, attending = seen[path]
        if f"{path}.global" in seen:
            attending = with_global(attending, seen[f"{path}.global"][1])
        ids = subject.source if place == "encoder" else subject.inputs
        patches = subject.model.config.embedding if subject.image is not None else None  # type: ignore[union-attr]
        side = patches.image // patches.patch if isinstance(patches, PatchEmbeddingConfig) else None
        tokens = None if side is not None or ids is None else ids[0].numpy()
        maps.append(Map(place, i, tuple(chosen), attending, tokens, side))
    order = {"stack": 0, "encoder": 0, "decoder": 1, "cross": 2}
    return sorted(maps, key=lambda map: (order[map.place], map.layer)), unseen, answer
