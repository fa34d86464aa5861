"""The loss of language models and classifiers."""

from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from clearhead.reference.softmax import narrow, softmax, widen


def cross_entropy(
    logits: Float[np.ndarray, "... V"],
    targets: Int[np.ndarray, "..."],
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> Float[np.ndarray, ""]:
    """The mean of −Σ_V y log softmax(logits) over the targets that are not ignored; 0 if all are.

    y is one-hot at the target, or (Szegedy et al. 2016, "Rethinking the Inception Architecture", section 7) that
    smoothed: (1 − ε) · one-hot + ε / V.
    """
    check_targets(logits, targets, label_smoothing, ignore_index)
    wide, counted, aim = _rows(logits, targets, ignore_index)
    top = wide.max(-1, keepdims=True, initial=-np.inf)
    log_p = wide - top - np.log(np.exp(wide - top).sum(-1, keepdims=True))
    loss = -(1 - label_smoothing) * np.take_along_axis(log_p, aim[:, None], -1)[:, 0]
    if label_smoothing > 0:  # not 0 · Σ: a logit of −∞ off the target would make that NaN
        loss = loss - label_smoothing * log_p.mean(-1)
    return np.asarray(loss.sum() / max(counted.sum(), 1), wide.dtype)


def cross_entropy_backward(
    d_out: Any,
    logits: Float[np.ndarray, "... V"],
    targets: Int[np.ndarray, "..."],
    *,
    label_smoothing: float = 0.0,
    ignore_index: int | None = None,
) -> Float[np.ndarray, "... V"]:
    """d_logits = d_out · (softmax(logits) − y) / count, and zero where the target is ignored."""
    wide, counted, aim = _rows(logits, targets, ignore_index)
    difference = softmax(wide) - label_smoothing / logits.shape[-1]
    difference[np.arange(len(aim)), aim] -= 1 - label_smoothing
    d_logits = np.zeros((targets.size, logits.shape[-1]), wide.dtype)
    d_logits[counted] = d_out * difference / max(counted.sum(), 1)
    return narrow(d_logits.reshape(logits.shape), logits)


def _rows(
    logits: Float[np.ndarray, "... V"], targets: Int[np.ndarray, "..."], ignore_index: int | None
) -> tuple[Float[np.ndarray, "counted V"], Bool[np.ndarray, "rows"], Int[np.ndarray, "counted"]]:
    """The counted rows of the logits, which of all rows they are, and their targets."""
    flat = targets.reshape(-1)
    counted = np.full(flat.shape, True) if ignore_index is None else flat != ignore_index
    return widen(logits.reshape(-1, logits.shape[-1])[counted]), counted, flat[counted]


def check_targets(logits: Any, targets: Any, label_smoothing: float, ignore_index: int | None) -> None:
    """One clear sentence for arguments that do not fit, in either engine."""
    if tuple(logits.shape[:-1]) != tuple(targets.shape):
        raise ValueError(
            f"targets {tuple(targets.shape)} do not name one class for each of logits {tuple(logits.shape)}"
        )
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is a share in [0, 1], not {label_smoothing}")
    outside = (targets < 0) | (targets >= logits.shape[-1])
    if ignore_index is not None:
        outside = outside & (targets != ignore_index)
    if outside.any():
        raise ValueError(f"target {int(targets[outside][0])} is not one of {logits.shape[-1]} classes")
