"""The long short-term memory, token after token, and its backward through time."""

import numpy as np
from jaxtyping import Float

from clearhead.configs import LSTMConfig
from clearhead.reference.linear import linear, linear_backward
from clearhead.reference.run import Here, runs


def lstm(
    x: Float[np.ndarray, "... T D"],
    input_weight: Float[np.ndarray, "I4 D"],
    recurrent_weight: Float[np.ndarray, "I4 I"],
    bias: Float[np.ndarray, "I4"] | None = None,
) -> Float[np.ndarray, "... T I"]:
    """h of every token: c = f∘c + i∘g, h = o∘tanh(c), from zeros.

    The rows of the weights are those of the gates i, f, g and o, in torch's order.
    """
    start = np.zeros((*x.shape[:-2], recurrent_weight.shape[1]), x.dtype)
    return lstm_from(linear(x, input_weight, bias), recurrent_weight, start, start)[0]


def lstm_backward(
    d_out: Float[np.ndarray, "... T I"],
    x: Float[np.ndarray, "... T D"],
    input_weight: Float[np.ndarray, "I4 D"],
    recurrent_weight: Float[np.ndarray, "I4 I"],
    bias: Float[np.ndarray, "I4"] | None = None,
) -> tuple[
    Float[np.ndarray, "... T D"],
    Float[np.ndarray, "I4 D"],
    Float[np.ndarray, "I4 I"],
    Float[np.ndarray, "I4"] | None,
]:
    """From the last token to the first: d_h gathers what this output and the next token's gates owe to h, and

    d_c = d_h∘o∘(1 − tanh²c) + d_c′∘f′,   d_o = d_h∘tanh c,   d_i = d_c∘g,   d_g = d_c∘i,   d_f = d_c∘c₋₁,

    where ′ is the next token's; then the gates' own derivatives σ(1 − σ) and 1 − tanh².
    """
    gates = linear(x, input_weight, bias)
    start = np.zeros((*x.shape[:-2], recurrent_weight.shape[1]), x.dtype)
    hidden, cells = lstm_from(gates, recurrent_weight, start, start)
    before = [np.concatenate((start[..., None, :], kept[..., :-1, :]), -2) for kept in (hidden, cells)]
    i, f, g, o = opened(gates + linear(before[0], recurrent_weight))
    curve = np.tanh(cells)
    d_gates, d_h, d_c = np.zeros_like(gates), np.zeros_like(start), np.zeros_like(start)
    for t in reversed(range(x.shape[-2])):
        now = (..., t, slice(None))
        d_h = d_h + d_out[now]
        d_c = d_c + d_h * o[now] * (1 - curve[now] ** 2)
        d_gates[now] = np.concatenate(
            (
                d_c * g[now] * i[now] * (1 - i[now]),
                d_c * before[1][now] * f[now] * (1 - f[now]),
                d_c * i[now] * (1 - g[now] ** 2),
                d_h * curve[now] * o[now] * (1 - o[now]),
            ),
            -1,
        )
        d_h, d_c = d_gates[now] @ recurrent_weight, d_c * f[now]
    _, d_recurrent, _ = linear_backward(d_gates, before[0], recurrent_weight)
    d_x, d_input, d_bias = linear_backward(d_gates, x, input_weight, bias)
    return d_x, d_input, d_recurrent, d_bias


def lstm_from(
    gates: Float[np.ndarray, "... T I4"],
    recurrent_weight: Float[np.ndarray, "I4 I"],
    h: Float[np.ndarray, "... I"],
    c: Float[np.ndarray, "... I"],
) -> tuple[Float[np.ndarray, "... T I"], Float[np.ndarray, "... T I"]]:
    """h and c of every token, going on from those of the token before the first."""
    hidden = np.zeros((*gates.shape[:-1], h.shape[-1]), gates.dtype)
    cells = np.zeros_like(hidden)
    for t in range(gates.shape[-2]):
        i, f, g, o = opened(gates[..., t, :] + linear(h, recurrent_weight))
        c = f * c + i * g
        h = o * np.tanh(c)
        hidden[..., t, :], cells[..., t, :] = h, c
    return hidden, cells


def opened(gates: Float[np.ndarray, "... I4"]) -> tuple[Float[np.ndarray, "... I"], ...]:
    """i, f, g and o: how far each gate is open, and what would come in."""
    i, f, g, o = np.split(gates, 4, -1)
    return sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o)


def sigmoid(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """1/(1 + e⁻ˣ), through tanh, which does not overflow."""
    return 0.5 * (1 + np.tanh(0.5 * x))


@runs(LSTMConfig)
def lstm_part(config: LSTMConfig, x: Float[np.ndarray, "B T D"], here: Here) -> Float[np.ndarray, "B T D"]:
    """`lstm` over the real tokens of each document, and the way back to width D; padding has h = 0."""
    gates = here.note("gates", linear(x, here["input.weight"], here["input.bias"]))
    recurrent = here["recurrent.weight"]
    hidden = np.zeros((*x.shape[:2], recurrent.shape[1]), x.dtype)
    start = np.zeros((len(x), recurrent.shape[1]), x.dtype)
    start_h, start_c = here.recall("hidden", start), here.recall("cell", start)
    h, c = start_h.copy(), start_c.copy()
    for row, columns in here.lanes():
        hidden[row, columns], cells = lstm_from(gates[row, columns], recurrent, start_h[row], start_c[row])
        h[row], c[row] = hidden[row, columns[-1]], cells[-1]
    here.keep("hidden", h)
    here.keep("cell", c)
    return here.note("out", linear(here.note("hidden", hidden), here["out.weight"]))
