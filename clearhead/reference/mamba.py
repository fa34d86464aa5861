"""Mamba: a selective state-space model (SSM), a recurrence that decides token by token what to remember.

    h_t = exp(Δ_t A) ∘ h_{t−1} + Δ_t · x_t ⊗ B_t          each channel keeps Z numbers, its column of h: Z I
    y_t = C_t · h_t + D ∘ x_t                             read them out, and let x pass directly

    here:   Δ step,   A decay (negative),   B write,   C read,   D skip

Δ, B and C are computed from x, which is what "selective" means. A large Δ forgets the past and stores this token; Δ = 0
skips the token. h has a fixed size, so decoding costs the same at token 10 and at token 100,000, and training is O(n).
Gu & Dao (2023), "Mamba", equations 2a, 2b and 4.

From a differential equation to the recurrence. A state-space model is h′(t) = A h(t) + B x(t), y(t) = C h(t): a linear
system that is driven by x. Sampled with a step Δ it becomes h_t = exp(ΔA) h_{t−1} + ΔB x_t. With A diagonal and
negative every channel is Z leaky integrators, each with its own time constant −1/A. Here A, B and C may change per
token.

Compare with attention over n tokens of width D:

                      attention                    Mamba
    one token reads   all n keys                   a state of Z·I numbers
    training          O(n²·D)                      O(n·I·Z)
    decoding          O(n·D), a growing cache      O(I·Z), a constant state
    recall            any earlier token, exactly   what the state has room for

Attention can look up a phone number from 50,000 tokens ago. A state of fixed size must have decided to keep it. Hybrids
with a few attention layers get most of both.

By hand, one channel with one number of state, A = −1, B = C = 1 and D = 0. A step of Δ = ln 2 halves the state:

    token       x     Δ        exp(ΔA)     h = exp(ΔA)·h + Δ·x          y
    1           1     ln 2     0.5         0.69                         0.69
    2           0     ln 2     0.5         0.35                         0.35       the first token fades
    3           9     0        1           0.35                         0.35       Δ = 0: the 9 is not even seen
    4           1     5        0.007       5.00                         5.00       a large Δ: the past is gone

Δ plays both roles at once, forgetting and writing, because it is the length of time that passes at this token. The
model computes it from the token: a comma may pass no time, a name much.

Why A is diagonal and stored as a logarithm. With a full matrix exp(ΔA) would be a matrix exponential for every token. A
diagonal one is a single exp per number. A must be negative, or the state grows without bound; −exp(decay) is negative
for every value that training can reach. It starts at −1, −2 … −Z, so the Z integrators of a channel remember over
different times.

Why the recurrence can be trained in parallel. h_t = a_t h_{t−1} + b_t composes: two steps are h ↦ a₂a₁h + (a₂b₁ + b₂),
again of the form a·h + b. Such pairs (a, b) can be combined in any grouping, so a tree of log T levels computes all
h_t.

What each weight does:

    input     D → 2·I      the channels to be mixed, and a gate
    filter    O+1 × I      a short convolution, so that the scan sees pairs and triples of tokens
    select    I → J+2·Z    B, C and, in J numbers, Δ
    step      J → I        Δ of every channel
    decay     Z × I        log(−A)
    skip      I            D
    out       I → D        back to the residual stream
"""

import numpy as np
from jaxtyping import Float

from clearhead.configs import MambaConfig
from clearhead.configs.mamba import SELECTED
from clearhead.reference.checks import check_gradient, check_same_shape
from clearhead.reference.convolution import causal_convolution
from clearhead.reference.ffn import silu
from clearhead.reference.linear import linear
from clearhead.reference.run import Context, runs


def selective_scan(
    x: Float[np.ndarray, "... T I"],
    step: Float[np.ndarray, "... T I"],
    decay: Float[np.ndarray, "Z I"],
    write: Float[np.ndarray, "... T Z"],
    read: Float[np.ndarray, "... T Z"],
) -> Float[np.ndarray, "... T I"]:
    """y = read·h with h = exp(step·decay)∘h + step·x·write, starting from h = 0.

    `decay` must be negative, so that exp(step·decay) is a share between 0 and 1. The skip term D∘x is added by the
    layer.

    One channel, one state, decay ln ½: each step of size 1 halves what is there and adds the new input.

    >>> ones = np.ones((3, 1))
    >>> selective_scan(ones, ones, np.log([[0.5]]), ones, ones)[:, 0]
    array([1.  , 1.5 , 1.75])
    """
    check_same_shape(x, step=step)
    start = np.zeros((*x.shape[:-2], *decay.shape), x.dtype)
    return np.einsum("...tz,...tzi->...ti", read, hidden_states(x, step, decay, write, start))


def selective_scan_backward(
    d_out: Float[np.ndarray, "... T I"],
    x: Float[np.ndarray, "... T I"],
    step: Float[np.ndarray, "... T I"],
    decay: Float[np.ndarray, "Z I"],
    write: Float[np.ndarray, "... T Z"],
    read: Float[np.ndarray, "... T Z"],
) -> tuple[
    Float[np.ndarray, "... T I"],
    Float[np.ndarray, "... T I"],
    Float[np.ndarray, "Z I"],
    Float[np.ndarray, "... T Z"],
    Float[np.ndarray, "... T Z"],
]:
    """d_x, d_step, d_decay, d_write, d_read: backpropagation through time.

    From the last token to the first, d_h = read·d_out + exp(step′·decay)∘d_h′, where ′ is the next token's: h is read
    now and kept for later. With e = d_h∘h₋₁∘exp(step·decay), the gradient of the exponent step·decay, and
    a = Σ_z d_h·write, that of step·x:

        d_decay = Σ e·step       d_step = Σ_z e·decay + a·x      d_x = a·step
        d_write = Σ_i d_h·step·x                d_read = Σ_i d_out·h

    >>> x, step, decay = np.ones((5, 2)), np.ones((5, 2)), -np.ones((3, 2))
    >>> write, read = np.ones((2, 5, 3))
    >>> selective_scan_backward(np.ones((5, 2)), x, step, decay, write, read)[0].shape  # the gradient of x
    (5, 2)
    """
    check_same_shape(x, step=step)
    check_gradient(d_out, *x.shape)
    start = np.zeros((*x.shape[:-2], *decay.shape), x.dtype)
    h = hidden_states(x, step, decay, write, start)
    before = np.concatenate((start[..., None, :, :], h[..., :-1, :, :]), -3)  # h₋₁ of every token
    kept = np.exp(step[..., None, :] * decay)  # … T Z I
    d_h = read[..., None] * d_out[..., None, :]
    for t in reversed(range(x.shape[-2] - 1)):
        d_h[..., t, :, :] += kept[..., t + 1, :, :] * d_h[..., t + 1, :, :]
    # Every token's d_h is known now, so the rest needs no loop.
    e = d_h * before * kept
    d_added = np.einsum("...zi,...z->...i", d_h, write)  # a
    d_step = (e * decay).sum(-2) + d_added * x
    d_decay = (e * step[..., None, :]).sum(tuple(range(e.ndim - 2)))
    d_write = np.einsum("...zi,...i->...z", d_h, step * x)
    return d_added * step, d_step, d_decay, d_write, np.einsum("...zi,...i->...z", h, d_out)


def hidden_states(
    x: Float[np.ndarray, "... T I"],
    step: Float[np.ndarray, "... T I"],
    decay: Float[np.ndarray, "Z I"],
    write: Float[np.ndarray, "... T Z"],
    h: Float[np.ndarray, "... Z I"],
) -> Float[np.ndarray, "... T Z I"]:
    """h of every token, continuing from the h before the first.

    The loop is the definition. Because the recurrence is linear in h, it can also be computed by a parallel scan, or in
    chunks, as `clearhead.functional.mamba` does.
    """
    found = np.zeros((*x.shape[:-1], *decay.shape), x.dtype)
    for t in range(x.shape[-2]):
        added = (step[..., t, :] * x[..., t, :])[..., None, :] * write[..., t, :, None]  # … Z I
        h = np.exp(step[..., t, None, :] * decay) * h + added
        found[..., t, :, :] = h
    return found


def softplus(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """log(1 + eˣ): positive for every x, and about x for large x. It makes a step size of any number.

    >>> softplus(np.array([-20.0, 0.0, 20.0])).round(3)
    array([ 0.   ,  0.693, 20.   ])
    """
    return np.logaddexp(x, 0).astype(x.dtype)


@runs(MambaConfig)
def mamba(config: MambaConfig, x: Float[np.ndarray, "B T D"], context: Context) -> Float[np.ndarray, "B T D"]:
    """The whole mixer, over the real tokens of each document.

    x ─ input ─┬─ inner ─ conv ─ silu ─┬──────────────── scan ─ (+ skip∘conv) ─ (∘) ─ out
               │                       └─ select ─ step, write, read ─┘          │
               └─ gate ─ silu ───────────────────────────────────────────────────┘
    """
    both = context.tap("input", linear(x, context["input.weight"], context.get("input.bias")))
    inner, gate = np.split(both, 2, -1)  # B T I each
    conv = context.tap("conv", silu(causal_convolution(inner, context)))
    # Δ of all I channels comes from J numbers only, a low-rank product; B and C are Z numbers each.
    select = context.tap("select", linear(conv, context["select.weight"]))  # B T J+Z+Z
    rank = context["step.weight"].shape[1]
    ranked, write, read = np.split(select, (rank, rank + config.state_dim), -1)
    if config.select_norm is not None:
        named = zip(SELECTED, (ranked, write, read), strict=True)
        ranked, write, read = (context.tap(name, context.run(name, config.select_norm, part)) for name, part in named)
    step = context.tap("step", softplus(linear(ranked, context["step.weight"], context["step.bias"])))
    decay = -np.exp(context["decay"])  # stored as log(−A), so that A is negative whatever is learned
    scanned = conv * context["skip"]
    start = context.load_state("ssm", np.zeros((len(x), *decay.shape), x.dtype))
    last = start.copy()
    for row, at in context.sequences():
        h = hidden_states(conv[row, at], step[row, at], decay, write[row, at], start[row])
        scanned[row, at] += np.einsum("tz,tzi->ti", read[row, at], h)
        last[row] = h[-1]
    context.save_state("ssm", last)
    gated = context.tap("gated", context.tap("scanned", scanned) * silu(gate))
    return context.tap("out", linear(gated, context["out.weight"], context.get("out.bias")))
