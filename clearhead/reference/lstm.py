"""The LSTM (long short-term memory): the recurrent layer that Transformers replaced, as a baseline.

    i, f, o = σ(W x_t + R h_{t−1} + b)        input, forget and output gate, between 0 and 1
    g = tanh(W x_t + R h_{t−1} + b)           what would be stored
    c_t = f ∘ c_{t−1} + i ∘ g                 the cell: keep a share f of the old, add a share i of the new
    h_t = o ∘ tanh(c_t)                       the output: a share o of what is stored

Everything about the past passes through h and c, whose size is fixed. Token t needs h_{t−1}, so tokens cannot be
computed in parallel; attention can, and that is why it won. Hochreiter & Schmidhuber (1997); forget gate Gers (2000).

Why gates. A plain recurrent layer h_t = tanh(W x + R h) multiplies its gradient by R at every step, so over n steps by
about Rⁿ: it vanishes or explodes. The cell c is changed by addition instead, and its gradient is multiplied by the
forget gate f only. If f is near 1 the cell is a conveyor belt, on which a fact can travel for hundreds of tokens.

    shapes, with I hidden units     x … T D     W 4I × D     R 4I × I     h, c … I     gates … 4I

By hand, one unit with c₋₁ = 2 and h₋₁ = 0, and gates i = 0, f = 1, o = ½: the cell keeps c = 1·2 + 0·g = 2, whatever g
is, and the output is h = ½·tanh 2 = 0.48. With f = 0 and i = 1 it forgets the 2 and stores g instead. The gates are
learned functions of the token, so the layer decides by content what to keep.

Compared with the alternatives in this package, all of which pass the past through a state of fixed size:

    layer               state          update                          in parallel over tokens?
    LSTM                2·I            gates that read h_{t−1}         no: the gates need the output of the token before
    Mamba               Z·I            gates that read x_t only        yes: the recurrence is linear in h
    linear attention    K·U per head   S + k vᵀ                        yes
    attention           grows          append k and v                  yes, at the price of O(T²)

That one difference, reading h_{t−1} in the gates, makes the LSTM more expressive per step and slow on parallel
hardware.

Cost: 8·I·(D + I) FLOPs per token, about that of a feed-forward layer, but one token after the other. On hardware that
is fast only at large products, that is the slow part. The state has 2·I numbers; everything that is to be remembered
has to fit into them.

How far back a gradient reaches. Along the cell it is multiplied by f at every step:

    f = 0.5       0.5²⁰ = 0.000001         nothing is left after 20 tokens
    f = 0.9       0.9²⁰ = 0.12             a sentence
    f = 0.99      0.99¹⁰⁰ = 0.37           several hundred tokens

A fresh forget gate with bias 0 is ½ open, so a fresh LSTM hardly learns beyond 20 tokens. Starting its bias at 1 gives
f = 0.73, as the PyTorch engine does (Jozefowicz et al. 2015).

Mistakes that run without an error: gates in another order than i, f, g, o (a loaded model writes noise); one of torch's
two biases forgotten (they are added, so one vector is enough here); and a state carried from one text into the next.
"""

import numpy as np
from jaxtyping import Float

from clearhead.configs import LSTMConfig
from clearhead.reference.checks import check_gradient
from clearhead.reference.linear import linear, linear_backward
from clearhead.reference.run import Context, runs


def lstm(
    x: Float[np.ndarray, "... T D"],
    input_weight: Float[np.ndarray, "I4 D"],
    recurrent_weight: Float[np.ndarray, "I4 I"],
    bias: Float[np.ndarray, "I4"] | None = None,
) -> Float[np.ndarray, "... T I"]:
    """h of every token, starting from h = c = 0.

    The rows of the weights are those of the gates i, f, g, o stacked, in torch's order: 4·I rows.

    Weights: 4·I·(D + I + 1). With D = I = 768 that is 4.7 million, two thirds of a Transformer block's 7.1 million.

    >>> rng = np.random.default_rng(0)
    >>> lstm(rng.normal(size=(5, 3)), rng.normal(size=(8, 3)), rng.normal(size=(8, 2))).shape      # 4·I = 8, so I = 2
    (5, 2)
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
    """Backpropagation through time, from the last token to the first. With ′ for the next token's values:

    d_h = d_out + Rᵀ·d_gates′                           h is an output, and is read by the next token's gates
    d_c = d_h∘o∘(1 − tanh²c) + d_c′∘f′                  c shapes this output, and is kept in the next cell
    d_o = d_h∘tanh c,   d_i = d_c∘g,   d_g = d_c∘i,   d_f = d_c∘c₋₁

    and then through the gates' own curves, σ′ = σ(1 − σ) and tanh′ = 1 − tanh². Along c the gradient is multiplied by
    f alone: with f near 1 it survives hundreds of steps, where a plain recurrent layer's vanishes.

    >>> x, weight, recurrent = np.ones((5, 3)), np.ones((8, 3)), np.ones((8, 2))
    >>> [d.shape for d in lstm_backward(np.ones((5, 2)), x, weight, recurrent)[:3]]
    [(5, 3), (8, 3), (8, 2)]
    """
    gates = linear(x, input_weight, bias)
    check_gradient(d_out, *x.shape[:-1], recurrent_weight.shape[1])
    start = np.zeros((*x.shape[:-2], recurrent_weight.shape[1]), x.dtype)
    hidden, cells = lstm_from(gates, recurrent_weight, start, start)
    # h and c of the token before each token: shift by one, with zeros in front.
    before = [np.concatenate((start[..., None, :], each[..., :-1, :]), -2) for each in (hidden, cells)]
    i, f, g, o = gate_values(gates + linear(before[0], recurrent_weight))
    curve = np.tanh(cells)
    # d_h and d_c hold what the tokens after t have passed back. They start at 0: nothing reads the last token's state.
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
        # What the token before receives: through its output, which all four gates read, and along its cell. The second
        # path has no matrix in it, only the forget gate; that is why an LSTM can learn over long distances.
        d_h, d_c = d_gates[now] @ recurrent_weight, d_c * f[now]
    # With all gate gradients known, the weights' gradients are those of two linear layers.
    _, d_recurrent, _ = linear_backward(d_gates, before[0], recurrent_weight)
    d_x, d_input, d_bias = linear_backward(d_gates, x, input_weight, bias)
    return d_x, d_input, d_recurrent, d_bias


def lstm_from(
    gates: Float[np.ndarray, "... T I4"],
    recurrent_weight: Float[np.ndarray, "I4 I"],
    h: Float[np.ndarray, "... I"],
    c: Float[np.ndarray, "... I"],
) -> tuple[Float[np.ndarray, "... T I"], Float[np.ndarray, "... T I"]]:
    """h and c of every token, continuing from the h and c before the first.

    `gates` is W·x + b of all tokens, computed in one product beforehand; only R·h must wait for the token before.

    Splitting the work so is what fast kernels do too: T·8·I·D of the FLOPs run as one large product, and the loop keeps
    T products of a single vector with R, 8·I² each.

    Continuing from the state of the first half gives the same as one pass:

    >>> rng = np.random.default_rng(0)
    >>> gates, R, zeros = rng.normal(size=(6, 8)), rng.normal(size=(8, 2)), np.zeros(2)
    >>> whole, _ = lstm_from(gates, R, zeros, zeros)
    >>> first, cells = lstm_from(gates[:3], R, zeros, zeros)
    >>> second, _ = lstm_from(gates[3:], R, first[-1], cells[-1])
    >>> bool(np.allclose(whole[3:], second))
    True
    """
    hidden = np.zeros((*gates.shape[:-1], h.shape[-1]), gates.dtype)
    cells = np.zeros_like(hidden)
    for t in range(gates.shape[-2]):
        i, f, g, o = gate_values(gates[..., t, :] + linear(h, recurrent_weight))
        c = f * c + i * g
        h = o * np.tanh(c)
        hidden[..., t, :], cells[..., t, :] = h, c
    return hidden, cells


def gate_values(gates: Float[np.ndarray, "... I4"]) -> tuple[Float[np.ndarray, "... I"], ...]:
    """i, f, g and o: how far each gate is open, and g, what would be stored.

    >>> [float(x[0]) for x in gate_values(np.zeros(4))]            # half open, and nothing to store
    [0.5, 0.5, 0.0, 0.5]
    """
    i, f, g, o = np.split(gates, 4, -1)
    return sigmoid(i), sigmoid(f), np.tanh(g), sigmoid(o)


def sigmoid(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """1/(1 + e⁻ˣ) = (1 + tanh(x/2))/2; tanh does not overflow.

    >>> sigmoid(np.array([-1000.0, 0.0, 1000.0]))
    array([0. , 0.5, 1. ])
    """
    return 0.5 * (1 + np.tanh(0.5 * x))


@runs(LSTMConfig)
def lstm_part(config: LSTMConfig, x: Float[np.ndarray, "B T D"], context: Context) -> Float[np.ndarray, "B T D"]:
    """`lstm` over the real tokens of each document, and a projection back to width D. Padding has h = 0.

    Taps: `gates` B T 4·I before their curves, `hidden` B T I, `out` B T D. A row's state after the call is that of its
    last real token, so padding on either side changes nothing.
    """
    gates = context.tap("gates", linear(x, context["input.weight"], context["input.bias"]))
    recurrent = context["recurrent.weight"]
    hidden = np.zeros((*x.shape[:2], recurrent.shape[1]), x.dtype)
    zeros = np.zeros((len(x), recurrent.shape[1]), x.dtype)
    start_h, start_c = context.load_state("hidden", zeros), context.load_state("cell", zeros)
    h, c = start_h.copy(), start_c.copy()
    for row, columns in context.sequences():
        hidden[row, columns], cells = lstm_from(gates[row, columns], recurrent, start_h[row], start_c[row])
        h[row], c[row] = hidden[row, columns[-1]], cells[-1]
    context.save_state("hidden", h)
    context.save_state("cell", c)
    return context.tap("out", linear(context.tap("hidden", hidden), context["out.weight"]))
