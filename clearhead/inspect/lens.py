"""Logit lens, norms of the residual stream, and next-token probabilities."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from torch import Tensor

from .grid import Grid
from .maps import resolve_indices
from .model_input import ModelInput

DEFAULT_POSITIONS = 48  # how many of the last positions a lens shows by default


def residual_stream(model_input: ModelInput, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """The kept residual stream after the embedding and after each block, each of shape `T D`."""
    return {name: values[path][0] for name, path in model_input.residual_taps()}


def lens(model_input: ModelInput, values: dict[str, Tensor], rows: Sequence[int] | None = None) -> Grid:
    """The most likely token by layer and position: each layer's stream through the final norm and the head.

    nostalgebraist (2020), "interpreting GPT: the logit lens".
    """
    found = residual_stream(model_input, values)
    length = len(next(iter(found.values())))
    at = (
        list(range(max(0, length - DEFAULT_POSITIONS), length))
        if rows is None
        else resolve_indices(rows, length, "row", "positions")
    )
    at = at if model_input.predicts_tokens else [0]
    sure, tokens = [], []
    for x in found.values():
        logits = model_input.head(x[None, at] if model_input.predicts_tokens else x[None]).cpu()
        best = logits.float().softmax(-1).reshape(-1, logits.shape[-1]).max(-1)
        sure.append(best.values.numpy())
        tokens.append([model_input.token_text(id) for id in best.indices.tolist()])
    return Grid(
        title=f"logit lens: the most likely {model_input.prediction_kind} if {model_input.name} stopped at a layer",
        values=np.stack(sure),
        rows=list(found),
        columns=[model_input.labels[i] for i in at]
        if model_input.predicts_tokens
        else ["image" if model_input.image is not None else "text"],
        row_axis="after layer",
        column_axis="position",
        unit="probability",
        texts=tokens,
        note="" if len(at) in (1, length) else f"positions {at[0]} to {at[-1]} of {length}",
    )


def norms(model_input: ModelInput, values: dict[str, Tensor], rows: Sequence[int] | None = None) -> Grid:
    """‖x‖ of the residual stream by layer and position."""
    found = residual_stream(model_input, values)
    at = list(range(len(model_input.labels))) if rows is None else rows
    return Grid(
        title="norm of the residual stream, ‖x‖",
        values=np.stack([x[at].float().norm(dim=-1).cpu().numpy() for x in found.values()]),
        rows=list(found),
        columns=[model_input.labels[i] for i in at],
        row_axis="after layer",
        column_axis="position",
        unit="‖x‖",
    )


def next_tokens(model_input: ModelInput, logits: Tensor, row: int = -1, top: int = 10) -> list[tuple[str, int, float]]:
    """The most likely next tokens, masked tokens or classes: text, id and probability."""
    sure = logits_at(model_input, logits, row)[0].softmax(-1)
    chance, id = sure.topk(min(top, len(sure)))
    return [(model_input.token_text(i), i, p) for i, p in zip(id.tolist(), chance.tolist(), strict=True)]


def logits_at(model_input: ModelInput, logits: Tensor, row: int) -> Float[Tensor, "B V"]:
    """The logits at one position, or the class logits of a classifier."""
    model_input.check_predictions()
    if not model_input.predicts_tokens:
        return logits.float().cpu()
    return logits[:, resolve_indices([row], logits.shape[1], "position", "positions")[0]].float().cpu()
