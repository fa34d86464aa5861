"""Attention step by step in NumPy, and what each step looks like when it is wrong.

A mistake replaces one step; two mistakes replace two.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from clearhead.reference import causal_mask, rotate, softmax

from ..weights import Projections

Array = np.ndarray
Change = Mapping[str, Any]  # the steps that a mistake or a variant replaces


@dataclass(frozen=True)
class HeadSizes:
    """The sizes from which a scale can be computed."""

    K: int
    U: int
    D: int
    H: int
    T: int = 1
    S: int = 1


def inverse_root(sizes: HeadSizes) -> float:
    return sizes.K**-0.5


def query_key_scores(q: Array, k: Array, v: Array) -> Array:
    return q @ k.swapaxes(-1, -2)


def hide(scores: Array, allowed: Array) -> Array:
    return np.where(allowed, scores, -np.inf)


def weigh(scores: Array, allowed: Array, sizes: HeadSizes) -> Array:
    return softmax(scores)


def mix(weights: Array, v: Array, k: Array) -> Array:
    return weights @ v


def split(x: Array, heads: int) -> Array:
    """[B, T, H·K] -> [B, H, T, K]."""
    return x.reshape(*x.shape[:2], heads, -1).transpose(0, 2, 1, 3)


def merge(x: Array) -> Array:
    """[B, H, T, K] -> [B, T, H·K]."""
    return x.transpose(0, 2, 1, 3).reshape(x.shape[0], x.shape[2], -1)


def finish(merged: Array, w: Projections, x: Array, mixed: Array) -> Array:
    return merged if w.o is None else merged @ w.o.T + w.o_bias


def turn(q: Array, k: Array, v: Array) -> tuple[Array, Array, Array]:
    return q, k, v


def share(x: Array, times: int) -> Array:
    """Key head g serves the query heads g·R … g·R + R − 1."""
    return x.repeat(times, 1)


def same(allowed: Array) -> Array:
    return allowed


@dataclass(frozen=True)
class AttentionSteps:
    allow: Callable[[Array], Array] = same
    scale: Callable[[HeadSizes], float] = inverse_root
    score: Callable[[Array, Array, Array], Array] = query_key_scores
    hide: Callable[[Array, Array], Array] = hide
    weigh: Callable[[Array, Array, HeadSizes], Array] = weigh
    mix: Callable[[Array, Array, Array], Array] = mix
    split: Callable[[Array, int], Array] = split
    turn: Callable[[Array, Array, Array], tuple[Array, Array, Array]] = turn
    share: Callable[[Array, int], Array] = share
    merge: Callable[[Array], Array] = merge
    finish: Callable[[Array, Projections, Array, Array], Array] = finish


RIGHT = AttentionSteps()


def attend(
    q: Array, k: Array, v: Array, allowed: Array, steps: AttentionSteps, D: int = 0, H: int = 1
) -> tuple[Array, Array]:
    """Return the mixed values and the weights. Rows that may read nothing get zeros."""
    sizes = HeadSizes(q.shape[-1], v.shape[-1], D or q.shape[-1], H, q.shape[-2], k.shape[-2])
    with np.errstate(all="ignore"):
        allowed = steps.allow(allowed)
        scores = steps.hide(steps.score(q, k, v) * steps.scale(sizes), allowed)
        weights = steps.weigh(scores, allowed, sizes)
        return steps.mix(weights, v, k), weights


def multi_head(
    x: Array,
    source: Array,
    value_source: Array,
    w: Projections,
    H: int,
    G: int,
    allowed: Array,
    steps: AttentionSteps = RIGHT,
) -> Array:
    """Compute the layer with the learner's weights. x [B,T,D], source [B,S,D], allowed [B,1,T,S]."""
    q, k, v = x @ w.q.T + w.q_bias, source @ w.k.T + w.k_bias, value_source @ w.v.T + w.v_bias
    q, k, v = steps.split(q, H), steps.split(k, G), steps.split(v, G)
    q, k, v = steps.turn(q, k, v)
    k, v = steps.share(k, H // G), steps.share(v, H // G)
    if k.shape[2] != allowed.shape[-1] or q.shape[2] != allowed.shape[-2]:  # heads attend to heads
        allowed = np.ones((1, 1, q.shape[2], k.shape[2]), bool)
    mixed, _ = attend(q, k, v, allowed, steps, x.shape[-1], H)
    with np.errstate(all="ignore"):  # a wrong step may give NaN
        return steps.finish(steps.merge(mixed), w, x, mixed)


def softmax_over(axis: int | tuple[int, ...]) -> Callable[[Array, Array, HeadSizes], Array]:
    def wrong(scores: Array, allowed: Array, sizes: HeadSizes) -> Array:
        if isinstance(axis, int) and axis < -2 and scores.ndim < 4:  # there is no such axis
            return np.full_like(scores, np.nan)
        powers = np.exp(scores - np.nan_to_num(scores.max(axis, keepdims=True), neginf=0.0))
        return powers / powers.sum(axis, keepdims=True)

    return wrong


def row_top(scores: Array) -> Array:
    """Return the maximum of each row, or 0 where nothing may be read."""
    return np.nan_to_num(scores.max(-1, keepdims=True), neginf=0.0)


def over_positions_and_heads(x: Array, heads: int) -> Array:
    return x.reshape(x.shape[0], heads, -1, x.shape[-1] // heads)


def shifted_causal(by: int) -> Callable[[Array], Array]:
    """A causal mask shifted by some diagonals."""

    def wrong(allowed: Array) -> Array:
        T, S = allowed.shape[-2:]
        i, j = np.arange(T)[:, None], np.arange(S)
        return np.broadcast_to(j <= i + S - T + by, allowed.shape)

    return wrong


def only_future(allowed: Array) -> Array:
    return np.broadcast_to(~causal_mask(allowed.shape[-1]), allowed.shape)


# with a finite fill value, a query that may read nothing reads everything
def fill_low(scores: Array, allowed: Array) -> Array:
    return np.where(allowed, scores, -1e9)


def add_low(scores: Array, allowed: Array) -> Array:
    return scores + np.where(allowed, 0.0, -1e9)


Turn = Callable[[Array, Array, Array], tuple[Array, Array, Array]]


def rotary_variant(layout: str, turned: str = "qk", base: float = 10000.0) -> Turn:
    """Rotate the arrays that `turned` names."""

    def rotate_pairs(*arrays: Array) -> tuple[Array, Array, Array]:
        if arrays[0].shape[-1] % 2:
            return arrays[0], arrays[1], arrays[2]
        q, k, v = (
            rotate(x, np.arange(x.shape[-2]), theta=base, layout=layout) if name in turned else x
            for name, x in zip("qkv", arrays, strict=True)
        )
        return q, k, v

    return rotate_pairs


def rotary_mistakes(layout: str, base: float) -> dict[str, Change]:
    """What goes wrong with rotary positions inside a layer. A shift of all positions changes nothing there."""
    return {
        "rope-on-values": {"turn": rotary_variant(layout, "qkv", base)},
        "rope-on-values.queries": {"turn": rotary_variant(layout, "qv", base)},
        "rope-on-queries-only": {"turn": rotary_variant(layout, "q", base)},
        "rope-on-keys-only": {"turn": rotary_variant(layout, "k", base)},
    }


def unscaled(*_: Any) -> float:
    return 1.0


def unmasked(scores: Array, allowed: Array) -> Array:
    return scores


# key -> the steps that the mistake changes
SCALES: dict[str, Change] = {
    "no-scale": {"scale": lambda s: 1.0},
    "scale-dv": {"scale": lambda s: s.U**-0.5},
    "scale-dmodel": {"scale": lambda s: s.D**-0.5},
    "scale-heads": {"scale": lambda s: s.H**-0.5},
    "scale-length": {"scale": lambda s: s.T**-0.5},
    "scale-length.keys": {"scale": lambda s: s.S**-0.5},
    "scale-no-root": {"scale": lambda s: 1 / s.K},
    "scale-multiplied": {"scale": lambda s: s.K**0.5},
    "scale-multiplied.model": {"scale": lambda s: s.D**0.5},
    "scale-constant": {"scale": lambda s: 8**-0.5},
    "scale-constant.64": {"scale": lambda s: 1 / 8},
    "scale-constant.512": {"scale": lambda s: 512**-0.5},
    "scale-twice": {"scale": lambda s: s.K**-0.25},
    "scale-after-softmax": {"scale": unscaled, "weigh": lambda x, a, s: softmax(x) * s.K**-0.5},
}
WEIGHTS: dict[str, Change] = {
    "softmax-queries": {"weigh": softmax_over(-2)},
    "softmax-heads": {"weigh": softmax_over(-3)},
    "softmax-batch": {"weigh": softmax_over(0)},
    "softmax-all": {"weigh": softmax_over((-1, -2))},
    "no-softmax": {"weigh": lambda x, a, s: np.where(np.isfinite(x), x, 0)},
    "not-normalised": {"weigh": lambda x, a, s: np.exp(x)},
    "not-normalised.shifted": {"weigh": lambda x, a, s: np.exp(x - row_top(x))},
    "softmax-queries.shifted": {"weigh": lambda x, a, s: softmax_over(-2)(x - row_top(x), a, s)},
    "sigmoid": {"weigh": lambda x, a, s: 1 / (1 + np.exp(-x))},
    "softmax-twice": {"weigh": lambda x, a, s: softmax(softmax(x))},
    "normalised-by-sum": {"weigh": lambda x, a, s: x / x.sum(-1, keepdims=True)},
}
MIXES: dict[str, Change] = {
    "mixes-keys": {"mix": lambda w, v, k: w @ k},
    "weights-transposed": {"mix": lambda w, v, k: w.swapaxes(-1, -2) @ v if w.shape[-1] == w.shape[-2] else w @ v},
    "queries-only": {
        "score": lambda q, k, v: q @ q.swapaxes(-1, -2) if q.shape == k.shape else query_key_scores(q, k, v)
    },
    "keys-only": {"score": lambda q, k, v: k @ k.swapaxes(-1, -2) if q.shape == k.shape else query_key_scores(q, k, v)},
    "scores-from-values": {
        "score": lambda q, k, v: q @ v.swapaxes(-1, -2) if k.shape == v.shape else query_key_scores(q, k, v)
    },
}
MASKS: dict[str, Change] = {
    "mask-ignored": {"hide": unmasked},
    "mask-inverted": {"allow": lambda a: ~a},
    "mask-after-softmax": {"hide": unmasked, "weigh": lambda x, a, s: softmax(x) * a},
    "mask-inverted-after": {"hide": unmasked, "weigh": lambda x, a, s: softmax(x) * ~a},
    "mask-to-zero": {"hide": lambda x, a: x * a},
    "mask-to-one": {"hide": lambda x, a: np.where(a, x, 1.0)},
    "mask-to-minus-one": {"hide": lambda x, a: np.where(a, x, -1.0)},
    "mask-added-as-number": {"hide": lambda x, a: x + a},
    "mask-subtracted-as-number": {"hide": lambda x, a: x - ~a},
    "mask-positive": {"hide": lambda x, a: np.where(a, x, 1e9)},
    "mask-additive-sign": {"hide": lambda x, a: x + ~a * 1e9},
}
CAUSAL: dict[str, Change] = {
    "causal-transposed": {"allow": lambda a: np.broadcast_to(causal_mask(a.shape[-1]).T, a.shape)},
    "causal-inverted": {"allow": only_future},
    "causal-strict": {"allow": shifted_causal(-1)},
    "causal-strict.filled": {"allow": shifted_causal(-1), "hide": fill_low},
    "causal-strict.added": {"allow": shifted_causal(-1), "hide": add_low},
    "causal-inverted.filled": {"allow": only_future, "hide": fill_low},
    "causal-inverted.added": {"allow": only_future, "hide": add_low},
    "causal-one-ahead": {"allow": shifted_causal(1)},
    "causal-missing": {"allow": lambda a: np.ones_like(a)},
}
HEADS: dict[str, Change] = {
    "split-no-transpose": {"split": over_positions_and_heads},
    "merge-no-transpose": {"merge": lambda x: x.reshape(x.shape[0], x.shape[2], -1)},
    "split-and-merge-no-transpose": {
        "split": over_positions_and_heads,
        "merge": lambda x: x.reshape(x.shape[0], x.shape[2], -1),
    },
    "attends-over-heads": {
        "split": lambda x, h: x.reshape(*x.shape[:2], h, -1).reshape(*x.shape[:2], h, -1),
        "merge": lambda x: x.reshape(*x.shape[:2], -1),
    },
    "heads-summed": {"merge": lambda x: x.sum(1)},
    "heads-averaged": {"merge": lambda x: x.mean(1)},
    "out-unused": {"finish": lambda merged, w, x, mixed: merged},
    "residual-inside": {"finish": lambda merged, w, x, mixed: x + finish(merged, w, x, mixed)},
    "out-transposed": {"finish": lambda merged, w, x, mixed: merged @ (w.o if w.o is not None else 1) + w.o_bias},
    "values-from-queries": {"turn": lambda q, k, v: (q, k, q if q.shape == v.shape else v)},
    "values-from-keys": {"turn": lambda q, k, v: (q, k, k if k.shape == v.shape else v)},
    "one-head": {"split": lambda x, h: split(x, 1)},
}
# right variants: recorded as an assumption, not as a mistake
VARIANTS: dict[str, Change] = {
    "plain": {},
    "merged_width_first": {"merge": lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape[0], x.shape[2], -1)},
    "groups_interleaved": {"share": lambda x, times: np.tile(x, (1, times, 1, 1))},
}


# what a mask gives that hides every key by a finite number
HIDES_ALL = replace(RIGHT, weigh=lambda x, a, s: np.full_like(x, 1 / x.shape[-1]))


def mistakes(
    *banks: Mapping[str, Change], base: AttentionSteps = RIGHT, count: int | None = None
) -> Iterator[tuple[tuple[str, ...], AttentionSteps]]:
    """Yield every mistake in the steps of `base`, then every pair in different steps; `count` asks for one kind."""
    changes = [(key, change) for bank in banks for key, change in bank.items()]
    for key, change in changes if count != 2 else ():
        yield (key.split(".")[0],), replace(base, **change)
    for (one, first), (two, second) in combinations(changes if count != 1 else (), 2):
        if not set(first) & set(second):
            yield (one.split(".")[0], two.split(".")[0]), replace(base, **first, **second)
