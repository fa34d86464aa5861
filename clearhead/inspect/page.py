"""One page that needs nothing but itself: all heads small, one head, one cell with its numbers.

Thumbnails travel as bytes; q, k and v of as many heads as fit travel in 16 bits, and the page computes rows from them.
"""

from __future__ import annotations

import base64
import html
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from clearhead.files import write_atomically
from clearhead.nn.attention_view import SoftmaxView, bias_of_rows

from .grid import Grid, pooled, pooling
from .maps import THUMBNAIL, largest
from .plotting import DIVERGING, SEQUENTIAL, STOPS

if TYPE_CHECKING:
    from .inspection import Inspection
    from .maps import HeadSummary, Map

LIMIT = 25_000_000  # bytes
ZERO = 128  # the byte of a weight of 0 where weights are signed
WEB = Path(__file__).with_name("web")


def write_page(inspection: Inspection, path: Path, grids: Sequence[Grid] = (), limit: int = LIMIT) -> None:
    write_atomically(path, page(inspection, limit, grids))


def page(inspection: Inspection, limit: int = LIMIT, grids: Sequence[Grid] = ()) -> str:
    """The page's text, of at most `limit` bytes; what was left out for that is said on it."""
    frame = (WEB / "page.html").read_text(encoding="utf-8")
    style, script = ((WEB / f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    room = limit - len(frame) - len(style.encode()) - len(script.encode()) - 4096
    data = as_script(data_of(inspection, grids, room))
    parts = {
        "title": html.escape(f"{inspection.model_input.name}: attention"),
        "style": style,
        "data": data,
        "script": script,
    }
    return re.sub(r"\{\{(title|style|data|script)\}\}", lambda found: parts[found[1]], frame)  # in one pass


def as_script(data: Any) -> str:
    """JSON that can stand in a page: nothing in it ends the script it stands in."""
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def data_of(inspection: Inspection, grids: Sequence[Grid], room: int) -> dict[str, Any]:
    model_input, notes = inspection.model_input, []
    masks: list[dict[str, str]] = []
    shared: dict[bytes, int] = {}
    maps = [map_data(map, masks, shared) for map in inspection.maps]
    for made, map in zip(maps, inspection.maps, strict=True):
        if map.place != "cross" and not map.is_self_attention:
            made["keyNames"] = inspection.names(map)[1]
    data: dict[str, Any] = {
        "name": model_input.name,
        "about": about(inspection),
        "labels": model_input.labels,
        "source": model_input.source_labels,
        "spaced": model_input.tokenizer is not None,
        "written": model_input.generated,
        "row": inspection.rows[0]
        if inspection.rows
        else len(model_input.labels) - 1
        if model_input.image is None
        else 0,
        "image": image_data(inspection),
        "maps": maps,
        "masks": masks,
        "unseen": inspection.layers_without_maps,
        "grids": [grid_data(grid) for grid in (*default_grids(inspection), *grids)],
        "next": [[word, share] for word, _, share in inspection.next()] if model_input.has_predictions else [],
        "nextTitle": (title := model_input.describe_position(-1))[0].upper() + title[1:]
        if model_input.has_predictions
        else "",
        "sequential": stops(SEQUENTIAL),
        "signed": stops(DIVERGING),
    }
    notes += shrink_thumbnails(maps, room - size_of({**data, "maps": []}))
    left_out = add_details(inspection, maps, room - size_of(data))
    if left_out:
        notes.append(left_out)
    notes.append(
        "Numbers come from q, k and v in 16 bits, so they are right to about three digits. "
        "What a head reads is not yet why the model answers: take the head away (--show ablation) and see."
    )
    return data | {"notes": notes, "leftOut": left_out, "partial": bool(left_out)}


def about(inspection: Inspection) -> str:
    heads = sum(len(map.heads) for map in inspection.maps)
    return f"{len(inspection.maps)} layers, {heads} heads, {len(inspection.model_input.labels)} positions"


def size_of(data: Any) -> int:
    return len(as_script(data).encode())


def stops(name: str) -> list[list[int]]:
    return [list(bytes.fromhex(colour[1:])) for colour in STOPS[name]]


def default_grids(inspection: Inspection) -> list[Grid]:
    """What every page shows beside the maps: the lens over the last positions, and the lengths of the stream."""
    model_input = inspection.model_input
    length = len(model_input.labels)
    lens = [inspection.lens(range(max(0, length - 8), length))] if model_input.has_predictions else []
    return lens + ([inspection.norms()] if length <= 64 else [])


def grid_data(grid: Grid) -> dict[str, Any]:
    """A grid of many cells comes pooled, as thumbnails do."""
    limits, down, across = grid.limits, *(-(-n // THUMBNAIL) for n in grid.values.shape)
    if grid.texts is None and grid.values.size > THUMBNAIL**2:
        grid = replace(
            grid,
            values=pooled(grid.values, down, across),
            rows=grid.rows[::down],
            columns=grid.columns[::across],
            note="; ".join(filter(None, (pooling(down, across), grid.note))),
        )
    values = [[None if not np.isfinite(x) else float(f"{x:.5g}") for x in line] for line in grid.values.tolist()]
    named = {key: getattr(grid, key) for key in ("title", "rows", "columns", "row_axis", "column_axis", "unit", "note")}
    return named | {"values": values, "limits": limits, "signed": grid.signed, "texts": grid.texts}


def image_data(inspection: Inspection) -> dict[str, Any] | None:
    image = inspection.model_input.image
    if image is None:
        return None
    side = next((map.grid for map in inspection.maps if map.grid), 1)
    return {"width": image.shape[1], "height": image.shape[0], "side": side, "data": encoded(image)}


def map_data(map: Map, masks: list[dict[str, str]], shared: dict[bytes, int]) -> dict[str, Any]:
    """A layer without its q, k and v."""
    attending, small = map.attending, map.thumbnails
    top = 1.0 if map.normalized else float(abs(small).max(initial=0)) or 1.0
    width, scale = attending.q.shape[3], getattr(attending, "scale", None)
    return {
        "place": map.place,
        "layer": map.layer,
        "queries": map.shape[0],
        "keys": map.shape[1],
        "K": width,
        "U": attending.v.shape[3] if isinstance(attending, SoftmaxView) else 0,
        "scale": width**-0.5 if scale is None else scale,
        "mask": mask_number(map, masks, shared),
        "heads": [head_data(head) for head in map.head_summaries],
        "pool": [-(-n // max(m, 1)) for n, m in zip(map.shape, small.shape[1:], strict=True)],
        "thumbRows": small.shape[1],
        "thumbColumns": small.shape[2],
        "top": None if map.normalized else top,  # of signed weights, for which the bytes 1 to 255 stand
        "thumb": encoded(
            (np.ceil(small * 255) if map.normalized else np.rint(ZERO + 127 * small / top)).astype(np.uint8)
        ),
        "read": {},  # by group: keys and values, which several heads may share
        "detail": [None] * len(map.heads),
    }


def head_data(head: HeadSummary) -> dict[str, Any]:
    short = {name: None if share is None else round(share, 4) for name, share in head.scores.items()}
    far = None if head.distance is None else round(head.distance, 3)
    bits = None if head.entropy is None else round(head.entropy, 4)
    return {"head": head.head, "tag": head.tag, "entropy": bits, "distance": far, "scores": short}


def mask_number(map: Map, masks: list[dict[str, str]], shared: dict[bytes, int]) -> int | None:
    """Who may read whom, once for all layers that agree: for each query its runs of readable keys."""
    allowed = map.attending.allowed(slice(None))
    if allowed is None:
        return None
    edges = np.diff(np.pad(allowed[0, 0].cpu().numpy().astype(np.int8), ((0, 0), (1, 1))), axis=1)
    rows, at = np.nonzero(edges)  # a run begins, a run ends, a run begins …
    starts = np.searchsorted(rows, np.arange(map.shape[0] + 1)).astype(np.int32)
    key = at.tobytes() + starts.tobytes()
    if key not in shared:
        shared[key] = len(masks)
        masks.append({"runs": encoded(at.astype(np.int32)), "starts": encoded(starts)})
    return shared[key]


def shrink_thumbnails(maps: list[dict[str, Any]], room: int) -> list[str]:
    """Where even thumbnails are too many, each is pooled further, by the same rule."""
    side = max((max(map["thumbRows"], map["thumbColumns"]) for map in maps), default=0)
    while side > 8 and sum(len(map["thumb"]) for map in maps) > 0.6 * room:
        side //= 2
        for map in maps:
            shape = (len(map["heads"]), map["thumbRows"], map["thumbColumns"])
            small = np.frombuffer(base64.b64decode(map["thumb"]), np.uint8).reshape(shape)
            zero = 0 if map["top"] is None else ZERO
            fewer = largest(torch.from_numpy(small.astype(np.float32)) - zero, (2, 2), signed=bool(zero)) + zero
            map["pool"] = [2 * n for n in map["pool"]]
            map["thumbRows"], map["thumbColumns"] = fewer.shape[1:]
            map["thumb"] = encoded(fewer.numpy().astype(np.uint8))
    pools = sorted({tuple(map["pool"]) for map in maps} - {(1, 1)})
    each = " or ".join(f"{down} × {across}" for down, across in pools)
    return [f"A point of a thumbnail is the largest of {each} weights."] if pools else []


def add_details(inspection: Inspection, maps: list[dict[str, Any]], room: int) -> str:
    """q, k and v of as many heads as fit, the most telling first; what is said of the rest."""
    every = [(map, at, head) for map in inspection.maps for at, head in enumerate(map.head_summaries)]
    order = ranked([found for found in every if isinstance(found[0].attending, SoftmaxView)])
    number = {id(map): n for n, map in enumerate(inspection.maps)}
    whole = 0
    for map, at, _ in order:
        into = maps[number[id(map)]]
        detail, read = vectors_of(map, at)
        new = {} if detail["group"] in into["read"] else {detail["group"]: read}
        size = size_of(detail) + size_of(new)
        if size <= room:
            room -= size
            into["detail"][at] = detail
            into["read"] |= new
            whole += 1
    if whole == len(every):
        return ""
    if whole == len(order):
        return "Of layers whose rows are not one softmax over q·k only thumbnails are here."
    return (
        f"q, k and v of {len(order) - whole} of {len(order)} heads were left out to keep the page small: "
        "those with an orange dot can be opened down to a cell; choose others with --layers and --heads."
    )


def ranked(heads: list[tuple[Map, int, HeadSummary]]) -> list[tuple[Map, int, HeadSummary]]:
    """The best head of each kind, then the others from the most to the least pronounced."""

    def strength(found: tuple[Map, int, HeadSummary]) -> float:
        head = found[2]
        return max(head.scores.get(head.tag) or 0.0, 1 - (head.scores["uniform"] or 0.0))

    order = sorted(heads, key=strength, reverse=True)
    seen: set[str] = set()
    firsts: list[tuple[Map, int, HeadSummary]] = []
    others: list[tuple[Map, int, HeadSummary]] = []
    for found in order:
        (others if found[2].tag in seen | {""} else firsts).append(found)
        seen.add(found[2].tag)
    return firsts + others


def vectors_of(map: Map, at: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """A head's own queries, and the keys and values that it reads."""
    attending = map.attending
    assert isinstance(attending, SoftmaxView), "only a softmax of q·k can be computed anew in the page"
    group = at // (attending.q.shape[1] // attending.k.shape[1])
    bias = bias_of(attending, at)
    own = {"q": halves(attending.q[0, at]), "bias": bias, "group": str(group)}
    return own, {"k": halves(attending.k[0, group]), "v": halves(attending.v[0, group])}


def bias_of(attending: SoftmaxView, at: int) -> dict[str, Any] | None:
    """What is added to a head's scores: by distance alone where that is all it depends on, else all of it."""
    if attending.score_bias is None:
        return None

    def rows(these: slice) -> Float[Tensor, "R S"]:
        bias = bias_of_rows(attending.score_bias, attending, slice(at, at + 1), these, None)
        assert bias is not None, "there is a bias"
        return bias[0, 0].cpu()

    queries, keys = attending.q.shape[2], attending.k.shape[2]
    ends = rows(slice(queries - 1, queries))[0], rows(slice(0, 1))[0]  # of j − i = 1 − T …, and 0 … S − 1
    by_distance = torch.cat((ends[0][: queries - 1], ends[1])) if queries == keys else torch.zeros(0)
    parts = [slice(start, start + 64) for start in range(0, queries, 64)]
    seen = torch.arange(keys)[None] - torch.arange(queries)[:, None] + queries - 1
    if queries == keys and all(torch.equal(by_distance[seen[part]], rows(part)) for part in parts):
        return halves(by_distance)
    return halves(torch.cat([rows(part) for part in parts]))


def halves(x: Float[Tensor, "..."]) -> dict[str, Any]:
    """16-bit floats, scaled so that the largest is 1."""
    wide = x.float().cpu()
    scale = float(wide.abs().max()) if wide.numel() else 1.0
    return {"scale": scale or 1.0, "data": encoded((wide / (scale or 1.0)).half().contiguous().numpy())}


def encoded(array: np.ndarray) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
