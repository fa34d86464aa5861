"""A selective state space, token after token, and its backward through time."""

import numpy as np
from jaxtyping import Float

from clearhead.configs import MambaConfig
from clearhead.reference.convolution import filtered
from clearhead.reference.ffn import silu
from clearhead.reference.linear import linear
from clearhead.reference.run import Here, runs


def selective_scan(
    x: Float[np.ndarray, "... T I"],
    step: Float[np.ndarray, "... T I"],
    decay: Float[np.ndarray, "Z I"],
    write: Float[np.ndarray, "... T Z"],
    read: Float[np.ndarray, "... T Z"],
) -> Float[np.ndarray, "... T I"]:
    """y = h·read with h = exp(step·decay)∘h + step·x·write, from zeros  (Gu & Dao 2023, equations 2a, 2b and 4).

    Every channel remembers Z numbers, its column of h. `decay` is the paper's A, below zero; B is `write`, C is `read`.
    """
    start = np.zeros((*x.shape[:-2], *decay.shape), x.dtype)
    return np.einsum("...tz,...tzi->...ti", read, memories(x, step, decay, write, start))


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
    """From the last token to the first, d_h = d_out·read + exp(step′·decay)∘d_h′, where ′ is the next token's.

    With e = d_h∘h₋₁∘exp(step·decay) and a = Σ_z d_h·write: d_decay = Σ e·step, d_step = Σ_z e·decay + a·x,
    d_x = a·step, d_write = Σ_i d_h·step·x, d_read = Σ_i d_out·h.
    """
    start = np.zeros((*x.shape[:-2], *decay.shape), x.dtype)
    h = memories(x, step, decay, write, start)
    before = np.concatenate((start[..., None, :, :], h[..., :-1, :, :]), -3)
    kept = np.exp(step[..., None, :] * decay)
    d_h = read[..., None] * d_out[..., None, :]
    for t in reversed(range(x.shape[-2] - 1)):
        d_h[..., t, :, :] += kept[..., t + 1, :, :] * d_h[..., t + 1, :, :]
    e = d_h * before * kept
    d_added = np.einsum("...zi,...z->...i", d_h, write)
    d_step = (e * decay).sum(-2) + d_added * x
    d_decay = (e * step[..., None, :]).sum(tuple(range(e.ndim - 2)))
    d_write = np.einsum("...zi,...i->...z", d_h, step * x)
    return d_added * step, d_step, d_decay, d_write, np.einsum("...zi,...i->...z", h, d_out)


def memories(
    x: Float[np.ndarray, "... T I"],
    step: Float[np.ndarray, "... T I"],
    decay: Float[np.ndarray, "Z I"],
    write: Float[np.ndarray, "... T Z"],
    h: Float[np.ndarray, "... Z I"],
) -> Float[np.ndarray, "... T Z I"]:
    """h of every token, going on from that of the token before the first."""
    found = np.zeros((*x.shape[:-1], *decay.shape), x.dtype)
    for t in range(x.shape[-2]):
        added = (step[..., t, :] * x[..., t, :])[..., None, :] * write[..., t, :, None]
        h = np.exp(step[..., t, None, :] * decay) * h + added
        found[..., t, :, :] = h
    return found


def softplus(x: Float[np.ndarray, "..."]) -> Float[np.ndarray, "..."]:
    """log(1 + eˣ)."""
    return np.logaddexp(x, 0).astype(x.dtype)


@runs(MambaConfig)
def mamba(config: MambaConfig, x: Float[np.ndarray, "B T D"], here: Here) -> Float[np.ndarray, "B T D"]:
    """x -> (x, gate); x filtered -> step, write, read -> scan -> gate -> out, over the real tokens of each document."""
    both = here.note("input", linear(x, here["input.weight"], here.get("input.bias")))
    inner, gate = np.split(both, 2, -1)
    conv = here.note("conv", silu(filtered(inner, here)))
    select = here.note("select", linear(conv, here["select.weight"]))
    rank = here["step.weight"].shape[1]
    write, read = np.split(select[..., rank:], 2, -1)
    step = here.note("step", softplus(linear(select[..., :rank], here["step.weight"], here["step.bias"])))
    decay = -np.exp(here["decay"])
    scanned = conv * here["skip"]
    start = here.recall("memory", np.zeros((len(x), *decay.shape), x.dtype))
    last = start.copy()
    for row, at in here.lanes():
        h = memories(conv[row, at], step[row, at], decay, write[row, at], start[row])
        scanned[row, at] += np.einsum("tz,tzi->ti", read[row, at], h)
        last[row] = h[-1]
    here.keep("memory", last)
    gated = here.note("gated", here.note("scanned", scanned) * silu(gate))
    return here.note("out", linear(gated, here["out.weight"], here.get("out.bias")))
