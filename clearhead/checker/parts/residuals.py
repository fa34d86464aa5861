"""Residual branches: combine the sublayers of a block in every known way, right and wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np

from ..engine import NumPy, equal
from .sublayer_calls import SublayerCall

Array = np.ndarray
Layer = Callable[[Array], Array]
Form = Callable[[Array, Layer, Layer], Array]
# one residual branch around sublayer f with norm n
PRE: Form = lambda x, f, n: x + f(n(x))
POST: Form = lambda x, f, n: n(x + f(x))
FORMS: dict[str, Form] = {
    "pre": PRE,
    "post": POST,
    "residual-missing": lambda x, f, n: f(n(x)),
    "residual-missing.post": lambda x, f, n: n(f(x)),
    "residual-missing.bare": lambda x, f, n: f(x),
    "residual-from-normed": lambda x, f, n: n(x) + f(n(x)),
    "residual-doubled": lambda x, f, n: 2 * f(n(x)),
    "residual-doubled.post": lambda x, f, n: n(2 * f(x)),
    "norm-missing": lambda x, f, n: x + f(x),
    "norm-on-branch": lambda x, f, n: x + n(f(x)),
    "norm-of-input": lambda x, f, n: n(x) + f(x),
    "norm-twice": lambda x, f, n: n(x + f(n(x))),
}
RIGHT = ("pre", "post")
BARE = ("norm-missing", "residual-missing.bare")  # right for a sublayer with its own norm


def match_residuals(
    calls: list[SublayerCall],
    layers: list[SublayerCall],
    x: Array,
    got: Array,
    engine: NumPy,
    inside: list[bool],
) -> tuple[str, ...] | None:
    """Return how the block combines its sublayers: "pre", "post" … or the keys of its mistakes; None if unknown.

    `inside` says which sublayers hold a norm of their own; their own checks see where it stands.
    """
    norms: list[Layer] = [e.rerun for e in calls if e.kind == "norm"]
    unnormed: Layer = lambda h: h
    tolerance = max(engine.tolerance, 1e-6)
    with engine.no_grad():
        adding = [c for c in calls if c.kind == "norm" and c.adds]
        if adding and len(adding) == len(norms) == len(layers):
            h = x
            for layer, norm in zip(layers, adding, strict=True):
                h = norm.add(h, layer.rerun(h))
            return ("post",) if equal(got, h, tolerance) else None
        if len(norms) == 2 * len(layers):
            h = x
            for i, layer in enumerate(layers):
                h = h + norms[2 * i + 1](layer.rerun(norms[2 * i](h)))
            if equal(got, h, tolerance):
                return ("sandwich",)
        padded = (norms + [norms[-1] if norms else unnormed] * len(layers))[: len(layers)]
        if len(layers) == 2:
            first, second = (layer.rerun for layer in layers)
            for n, m in ((padded[0], padded[0]), (padded[0], padded[1])):
                if equal(got, x + first(n(x)) + second(m(x)), tolerance):
                    return ("parallel",)
            y = x + first(padded[0](x))
            if equal(got, x + second(padded[1](y)), tolerance):
                return ("residual-from-start",)
        for order in ([*range(len(layers))],):
            found = search(order, layers, padded, norms, x, got, tolerance)
            if found:
                return name_mistake(found, layers, inside, bool(norms))
    return None


def search(
    order: list[int],
    layers: list[SublayerCall],
    padded: list[Layer],
    norms: list[Layer],
    x: Array,
    got: Array,
    tolerance: float,
) -> tuple[str, ...] | None:
    """Try all combinations, those with the fewest mistakes first."""
    choices = [padded] if len(norms) >= len(layers) else [padded, *norm_assignments(norms, len(layers))]
    combos = sorted(product(FORMS, repeat=len(layers)), key=count_mistakes)
    for assigned in choices:
        for forms in combos:
            h = x
            for index, form in zip(order, forms, strict=True):
                h = FORMS[form](h, layers[index].rerun, assigned[index])
            if equal(got, h, tolerance):
                return forms
    return None


def norm_assignments(norms: list[Layer], count: int) -> Iterator[list[Layer]]:
    """Yield every assignment of too few norms to the branches."""
    for gap in range(count):
        filled = [*norms[:gap], norms[0] if norms else (lambda h: h), *norms[gap:]]
        if len(filled) >= count:
            yield filled[:count]


def count_mistakes(forms: tuple[str, ...]) -> tuple[int, int, int]:
    wrong = sum(form not in RIGHT for form in forms)
    rank = sum(list(FORMS).index(form) for form in forms)
    return wrong, len(set(forms)), rank


def name_mistake(
    forms: tuple[str, ...], layers: list[SublayerCall], inside: list[bool], has_norms: bool
) -> tuple[str, ...]:
    if any(inside):
        plain = BARE if has_norms else (*BARE, "pre", "residual-missing", "residual-missing.post")
        bare = [form in plain and own for form, own in zip(forms, inside, strict=True)]
        forms = tuple(form for form, is_bare in zip(forms, bare, strict=True) if not is_bare)
        if not forms:
            return ("inside",)
    keys = tuple(dict.fromkeys(form.split(".")[0] for form in forms))
    if "norm-on-branch" in keys and len(keys) == 2 and set(keys) & set(RIGHT):
        return ("norm-mixed",)
    wrong = tuple(key for key in keys if key not in RIGHT)
    if wrong:
        return wrong
    if layers[0].kind == "ffn":
        return ("order-swapped",)
    return keys if len(keys) == 1 else ("norm-mixed",)
