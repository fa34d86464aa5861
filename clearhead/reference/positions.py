"""Where things stand: sinusoids added to the input, ALiBi added to the scores, and the causal mask."""

from math import log2

import numpy as np
from jaxtyping import Bool, Float


def sinusoidal_positions(
    length: int, dim: int, base: float = 10000.0, layout: str = "interleaved"
) -> Float[np.ndarray, "{length} {dim}"]:
    """PE(pos, 2i) = sin(pos / base^(2i/D)), PE(pos, 2i+1) = cos(pos / base^(2i/D)).

    PE(pos + k) is a rotation of PE(pos), the same for every pos. An odd D has one more sine than cosines.
    The layout "halves" stores all sines, then all cosines, as Marian does.
    Vaswani et al. (2017), "Attention Is All You Need", section 3.5.
    """
    sines = (dim + 1) // 2
    angles = np.arange(length)[:, None] * base ** (-2 * np.arange(sines) / max(dim, 1))  # length sines
    if layout == "interleaved":
        at_sines, at_cosines = slice(0, None, 2), slice(1, None, 2)
    elif layout == "halves":
        at_sines, at_cosines = slice(0, sines), slice(sines, None)
    else:
        raise ValueError(f'layout is "interleaved" or "halves", not {layout!r}')
    out = np.empty((length, dim))
    out[:, at_sines] = np.sin(angles)
    out[:, at_cosines] = np.cos(angles[:, : dim // 2])
    return out


def alibi_bias(heads: int, queries: int, keys: int) -> Float[np.ndarray, "{heads} {queries} {keys}"]:
    """−slope_h · |distance|, added to the scores: far keys count less, and each head has its own idea of far.

    The last query stands at the last key. Press, Smith & Lewis (2022), "Train Short, Test Long", section 3.
    """
    if heads < 1:
        raise ValueError(f"alibi_bias needs at least one head, not {heads}")
    i = np.arange(queries)[:, None] + keys - queries
    j = np.arange(keys)
    return -np.array(alibi_slopes(heads))[:, None, None] * abs(i - j)


def alibi_slopes(heads: int) -> list[float]:
    """2^(−8h/H) for h = 1 … H if H is a power of two.

    Otherwise the slopes of the power below, and then every other slope of the power above, as in the authors' code
    (github.com/ofirpress/attention_with_linear_biases, fairseq/models/transformer.py, get_slopes).
    """
    power = 2 ** int(log2(heads))
    slopes = [2 ** (-8 * h / power) for h in range(1, power + 1)]
    between = [2 ** (-8 * h / (2 * power)) for h in range(1, 2 * power, 2)]
    return slopes + between[: heads - power]


def causal_mask(queries: int, keys: int | None = None) -> Bool[np.ndarray, "{queries} S"]:
    """j ≤ i + S − T: a query may read its own position and the past; the last query sees the last key.

    causal_mask(3)        causal_mask(2, 4)
    ■ · ·                 ■ ■ ■ ·
    ■ ■ ·                 ■ ■ ■ ■
    ■ ■ ■
    """
    keys = queries if keys is None else keys
    i, j = np.arange(queries)[:, None], np.arange(keys)
    return j <= i + keys - queries
