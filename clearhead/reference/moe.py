"""Mixture of experts: each token passes the few feed-forward layers that a router chooses for it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from clearhead.configs import GroupedChoiceConfig, MoEConfig, SoftmaxChoiceConfig

from .ffn import ACTIVATIONS
from .linear import linear
from .run import Here, runs
from .softmax import softmax


@runs(MoEConfig)
def mixture_of_experts(config: MoEConfig, x: Float[np.ndarray, "B T D"], here: Here) -> Float[np.ndarray, "B T D"]:
    """Σ over the chosen experts e of p_e·expert_e(x), plus the shared expert."""
    p, rank = here.run("choice", config.choice, linear(x, here["router.weight"]))  # each B T E
    which = np.argsort(-rank, axis=-1, kind="stable")[..., : config.active]  # B T A
    weights = np.take_along_axis(here.note("router", p), which, -1)
    if config.normalised:
        weights = weights / weights.sum(-1, keepdims=True)
    weights = here.note("chosen", weights * config.scale)
    out = np.zeros_like(x)
    for e in range(config.experts):
        b, t, place = np.nonzero(which == e)  # the tokens that chose expert e
        out[b, t] += expert(config, e, x[b, t], here.at("experts")) * weights[b, t, place, None]
    return out if config.shared is None else out + here.run("shared", config.shared, x)


@runs(SoftmaxChoiceConfig)
def softmax_choice(
    config: SoftmaxChoiceConfig, scores: Float[np.ndarray, "B T E"], here: Here
) -> Float[np.ndarray, "2 B T E"]:
    """What weighs each expert, and what ranks it: the same."""
    p = softmax(scores)
    return np.stack((p, p))


@runs(GroupedChoiceConfig)
def grouped_choice(
    config: GroupedChoiceConfig, scores: Float[np.ndarray, "B T E"], here: Here
) -> Float[np.ndarray, "2 B T E"]:
    """p = sigmoid(scores) weighs; p + b ranks, in the groups whose two best experts have the largest sum."""
    p = 1 / (1 + np.exp(-scores))
    grouped = (p + here["bias"]).reshape(*p.shape[:-1], config.groups, -1)  # B T groups, experts of each
    merit = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
    place = np.argsort(np.argsort(-merit, axis=-1, kind="stable"), axis=-1)
    rank = np.where(place[..., None] < config.kept, grouped, -np.inf)
    return np.stack((p, rank.reshape(p.shape)))


def expert(config: MoEConfig, e: int, x: Float[np.ndarray, "X D"], here: Here) -> Float[np.ndarray, "X D"]:
    """One expert's feed-forward layer: its weights are row e of the stacked ones."""

    def layer(name: str, h: np.ndarray) -> np.ndarray:
        bias = here.get(f"{name}.bias")
        return linear(h, here[f"{name}.weight"][e], None if bias is None else bias[e])

    act = ACTIVATIONS[config.expert.activation]
    up = layer("up", x)
    return layer("down", act(layer("gate", x)) * up if "gate" in config.expert.matrices(x.shape[-1]) else act(up))


def load_balancing_loss(router: Float[np.ndarray, "... E"], active: int) -> Float[np.ndarray, ""]:
    """E · Σ_e f_e·P_e: f_e the share of tokens sent to expert e, P_e the mean probability it is given.

    It is `active` when all experts are used alike and grows as tokens crowd on the experts that the router favours.
    Fedus et al. (2022), equations 4 to 6.
    """
    return np.asarray(router.shape[-1] * (_share(router, active) * router.reshape(-1, router.shape[-1]).mean(0)).sum())


def load_balancing_loss_backward(
    d_out: Float[np.ndarray, ""], router: Float[np.ndarray, "... E"], active: int
) -> Float[np.ndarray, "... E"]:
    """E·f_e/tokens for every token: the choice itself has no gradient, the probabilities do."""
    experts = router.shape[-1]
    return np.broadcast_to(d_out * experts * _share(router, active) * experts / router.size, router.shape).copy()


def _share(router: Float[np.ndarray, "... E"], active: int) -> Float[np.ndarray, "E"]:
    """The share of tokens for which each expert is among the `active` likeliest."""
    flat = router.reshape(-1, router.shape[-1])
    which = np.argsort(-flat, axis=-1, kind="stable")[:, :active]
    return np.bincount(which.ravel(), minlength=flat.shape[1]) / len(flat)
