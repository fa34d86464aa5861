"""What a model would say if it stopped at a layer, what it says at the end, and how long its vectors are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from clearhead.nn.tap import Taps

from .grid import Grid
from .maps import checked
from .subject import Subject

SHOWN = 48  # positions that a lens shows unless it is told which


def streams(subject: Subject) -> dict[str, Tensor]:
    """The residual stream after the embedding and after each block, `T D` each."""
    named = dict(subject.streams())
    taps = Taps(read=list(named.values()))
    subject.run(taps)
    return {name: taps.values[path][0] for name, path in named.items()}


def lens(subject: Subject, rows: Sequence[int] | None = None) -> Grid:
    """The likeliest token by layer and position: each layer's stream through the final norm and the head.

    nostalgebraist (2020), "interpreting GPT: the logit lens".
    """
    found = streams(subject)
    length = len(next(iter(found.values())))
    at = list(range(max(0, length - SHOWN), length)) if rows is None else checked(rows, length, "row", "positions")
    at = at if subject.speaks else [0]
    sure, said = [], []
    for x in found.values():
        logits = subject.head(x[None, at] if subject.speaks else x[None]).cpu()
        best = logits.float().softmax(-1).reshape(-1, logits.shape[-1]).max(-1)
        sure.append(best.values.numpy())
        said.append([subject.word(id) for id in best.indices.tolist()])
    return Grid(
        title=f"logit lens: the likeliest {subject.answers} if {subject.name} stopped at a layer",
        values=np.stack(sure)[::-1],
        rows=list(found)[::-1],
        columns=[subject.labels[i] for i in at]
        if subject.speaks
        else ["image" if subject.image is not None else "text"],
        row_axis="after",
        column_axis="position",
        unit="probability",
        texts=said[::-1],
        note="" if len(at) in (1, length) else f"positions {at[0]} to {at[-1]} of {length}",
    )


def norms(subject: Subject, rows: Sequence[int] | None = None) -> Grid:
    """‖x‖ of the residual stream by layer and position."""
    found = streams(subject)
    at = list(range(len(subject.labels))) if rows is None else rows
    return Grid(
        title="length of the residual stream, ‖x‖",
        values=np.stack([x[at].float().norm(dim=-1).cpu().numpy() for x in found.values()])[::-1],
        rows=list(found)[::-1],
        columns=[subject.labels[i] for i in at],
        row_axis="after",
        column_axis="position",
        unit="‖x‖",
    )


def following(subject: Subject, logits: Tensor, row: int = -1, top: int = 10) -> list[tuple[str, int, float]]:
    """The likeliest tokens after a position, or at it, or classes: text, id and probability."""
    sure = said_at(subject, logits, row)[0].softmax(-1)
    chance, id = sure.topk(min(top, len(sure)))
    return [(subject.word(i), i, p) for i, p in zip(id.tolist(), chance.tolist(), strict=True)]


def said_at(subject: Subject, logits: Tensor, row: int) -> Float[Tensor, "B V"]:
    """The logits after one position, or of the whole input where the model says one thing."""
    subject.check_says()
    if not subject.speaks:
        return logits.float().cpu()
    return logits[:, checked([row], logits.shape[1], "position", "positions")[0]].float().cpu()
