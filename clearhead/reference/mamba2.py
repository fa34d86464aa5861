"""Mamba-2: a state-space model in heads, each of which forgets at one rate.

    h_t = exp(Δ_t A)·h_{t−1} + Δ_t · B_t ⊗ x_t            each head keeps a matrix h: Z K
    y_t = C_t · h_t + D · x_t

    here:   Δ step,   A decay (negative),   B write,   C read,   D skip

Compare with Mamba: A and Δ are one number for a head and not one for each channel. That is less, but it makes the
recurrence an attention. Unrolled, y_t = Σ_s (C_t·B_s) · exp(A·Σ_{s<r≤t} Δ_r) · Δ_s x_s: queries C, keys B, values Δx,
and a mask that fades with distance instead of a softmax. So a chunk of tokens is computed by matrix products, and only
the state between chunks by the recurrence. Dao & Gu (2024), "Transformers are SSMs".

What each weight does:

    input       D → 2·I+2·G·Z+H   the gate; x, B and C; and Δ of every head
    filter      O+1 × I+2·G·Z     a short convolution of x, B and C
    step_bias   H                 added to Δ before the softplus
    decay       H                 log(−A)
    skip        H                 D
    norm        I                 after the gate
    out         I → D             back to the residual stream

The two forms by hand: one head, Z = K = 1, Δ = B = C = 1 and exp(A) = ½, for x = (1, 1, 1):

    recurrence    h = 1,   ½·1 + 1 = 1.5,   ½·1.5 + 1 = 1.75
    attention     (1  0  0)   (1)     (1.00)          row t, column s: ½ for each step from s to t
                  (½  1  0) · (1)  =  (1.50)
                  (¼  ½  1)   (1)     (1.75)

The recurrence costs T steps that wait for each other; the matrix costs T² products that do not. Chunks of 64 to 256
tokens take the second form inside and the first between them.

How much the state holds: mamba2-130m has D = 768, I = 1,536, K = 64, so H = 24, and Z = 128. The state is H·Z·K =
196,608 numbers in each layer, however long the text. Attention of the same width caches 2·D = 1,536 numbers per token
and passes that after 128 tokens.

Why a norm after the gate: `scanned ∘ silu(gate)` multiplies two values that both grow in training. Large models became
unstable without it (Dao & Gu 2024, section 7.1).
"""

import numpy as np
from jaxtyping import Float

from clearhead.configs import Mamba2Config
from clearhead.reference.convolution import causal_convolution
from clearhead.reference.ffn import silu
from clearhead.reference.linear import linear
from clearhead.reference.mamba import softplus
from clearhead.reference.run import Context, runs


def head_states(
    x: Float[np.ndarray, "T H K"],
    step: Float[np.ndarray, "T H"],
    decay: Float[np.ndarray, "H"],
    write: Float[np.ndarray, "T H Z"],
    h: Float[np.ndarray, "H Z K"],
) -> Float[np.ndarray, "T H Z K"]:
    """h of every token, continuing from the h before the first.

    One head of one channel with one state, decay ln ½: each step of size 1 halves what is there and adds the input.

    >>> ones = np.ones((3, 1, 1))
    >>> head_states(ones, ones[..., 0], np.log([0.5]), ones, np.zeros((1, 1, 1)))[:, 0, 0, 0]
    array([1.  , 1.5 , 1.75])
    """
    found = np.zeros((len(x), *h.shape), x.dtype)
    for t in range(len(x)):
        added = write[t, :, :, None] * (step[t, :, None] * x[t])[:, None]  # H Z K
        h = np.exp(step[t] * decay)[:, None, None] * h + added
        found[t] = h
    return found


@runs(Mamba2Config)
def mamba2(config: Mamba2Config, x: Float[np.ndarray, "B T D"], context: Context) -> Float[np.ndarray, "B T D"]:
    """The whole mixer, over the real tokens of each document.

    x ─ input ─┬─ x, write, read ─ conv ─ silu ─ scan ─ (+ skip·x) ─ (∘) ─ norm ─ out
               ├─ step ──────────────────────────┘                    │
               └─ gate ─ silu ────────────────────────────────────────┘
    """
    heads, inner, shared = config.heads, config.inner, config.groups * config.state_dim
    both = context.tap("input", linear(x, context["input.weight"], context.get("input.bias")))
    # x, B and C pass the convolution together, as in a projection to q, k and v; the gate and Δ do not.
    gate, mixed, step = np.split(both, (inner, inner + config.convolved), -1)
    conv = context.tap("conv", silu(causal_convolution(mixed, context)))
    step = context.tap("step", softplus(step + context["step_bias"]))
    values = conv[..., :inner].reshape(*conv.shape[:2], heads, config.head_dim)  # B T H K
    write, read = (
        part.reshape(*part.shape[:2], config.groups, -1).repeat(heads // config.groups, axis=2)  # B T H Z
        for part in np.split(conv[..., inner:], (shared,), -1)
    )
    decay = -np.exp(context["decay"])  # stored as log(−A), so that A is negative whatever is learned
    scanned = values * context["skip"][:, None]
    empty = np.zeros((len(x), heads, config.state_dim, config.head_dim), x.dtype)
    start = context.load_state("ssm", empty)
    last = start.copy()
    for row, at in context.sequences():
        h = head_states(values[row, at], step[row, at], decay, write[row, at], start[row])
        scanned[row, at] += np.einsum("thz,thzk->thk", read[row, at], h)
        last[row] = h[-1]
    context.save_state("ssm", last)
    gated = context.tap("gated", context.tap("scanned", scanned.reshape(gate.shape)) * silu(gate))
    normed = context.tap("norm", context.run("norm", config.norm, gated))
    return context.tap("out", linear(normed, context["out.weight"], context.get("out.bias")))
