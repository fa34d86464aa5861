"""Mixture of experts (MoE): many feed-forward layers, of which each token passes only a few.

    p = softmax(router · x)                     E probabilities for each token
    chosen = the A experts with the largest p
    out = Σ_{e in chosen} p_e · expert_e(x)     + shared expert, if there is one

The model has the weights of E experts and the cost of A. Here every token reaches all of its chosen experts: there is
no capacity limit, so no token is dropped.

Why. A feed-forward network's knowledge grows with its weights, and its cost too. If each token uses only A of E
networks, the weights grow by E and the cost by A. Mixtral 8×7B has 46.7 billion weights, of which 12.9 billion are used
for a token (E = 8, A = 2).

What is hard is the choice. Taking the largest A is a step function, so the router gets a gradient only through the
weights p_e of the experts that were chosen. Nothing pulls a token towards an expert that was never tried. Balance has
to be encouraged: by a loss (`load_balancing_loss`), or by a bias b that is raised for idle experts and lowered for busy
ones without any gradient (DeepSeek-V3, `grouped_choice`).

By hand: two experts, A = 1. The router gives a token the scores (2, 1), so p = (0.73, 0.27). Expert 0 is chosen, and
the output is 0.73 · expert_0(x): even a lone expert is multiplied by its probability, because that product is the only
path on which the router gets a gradient. With A = 2 and renormalised weights the output would be 0.73 · expert_0(x) +
0.27 · expert_1(x).

Balance, and why it matters. On many machines each holds some experts. A batch waits for the busiest expert, so time is
decided by the largest load and not by the mean. And an expert that is rarely chosen is rarely trained:

    even         each of 8 experts gets 1/8 of the tokens       all weights learn
    collapsed    two experts get everything                     six eighths of the weights are dead

Experts do not become specialists for topics. In trained models they divide tokens by kind (punctuation, digits, parts
of words) more than by subject (Jiang et al. 2024, "Mixtral of Experts", section 5).

Compared with one wide network of the same cost, an MoE learns more per FLOP and takes more memory: all E experts must
be at hand, although A are used. In decoding with a batch of 1 it reads A experts' weights per token and is fast; with a
large batch almost every expert is read.

The cost of a layer in numbers, Mixtral 8×7B: D = 4,096, F = 14,336, gated, so 3·D·F = 176 million weights per expert.
Eight of them have 1.41 billion, and a token uses two, 352 million. The router has E·D = 32,768 weights and decides over
all of that.

Mistakes that run without an error:

    weights not renormalised     or renormalised twice: outputs are too small or too large by a constant per token
    bias b used as weight        it may only rank; as a weight it would leak balancing into the output
    rank on scores in bfloat16   two close experts change places, and the text differs from the reference
    load loss over padding       padding tokens all choose the same expert, and the loss fights that

    router     x · Wᵀ            B T D → B T E         one score for each expert
    choice     p, rank           B T E                 the weight of an expert, and what it is ranked by
    which      top A of rank     B T A                 numbers of the chosen experts
    out        Σ p · expert(x)   B T D
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float, Int

from clearhead.configs import (
    FeedForwardConfig,
    GroupedChoiceConfig,
    GroupedSoftmaxChoiceConfig,
    InputWeightedMoEConfig,
    MoEConfig,
    SigmoidChoiceConfig,
    SoftmaxChoiceConfig,
)

from .checks import check_gradient
from .ffn import ACTIVATIONS, gated_values, open_gate
from .linear import linear
from .run import Context, runs
from .softmax import softmax


@runs(MoEConfig)
@runs(InputWeightedMoEConfig)
def mixture_of_experts(
    config: MoEConfig, x: Float[np.ndarray, "B T D"], context: Context
) -> Float[np.ndarray, "B T D"]:
    """Σ over the chosen experts e of p_e·expert_e(x), plus the shared expert.

    Whether the chosen weights are renormalised to sum to 1 differs between families and must match the checkpoint:
    Mixtral does, DeepSeek-V2 multiplies by a constant instead. A mistake here changes every output a little, and
    only a comparison with another implementation shows it.
    """
    scores = linear(x, context["router.weight"], context.get("router.bias"))
    p, rank = context.run("choice", config.choice, scores)  # each B T E
    # Stable sorting of −rank: of equal experts the first wins, as in torch.topk.
    which = np.argsort(-rank, axis=-1, kind="stable")[..., : config.active]  # B T A
    weights = np.take_along_axis(context.tap("router", p), which, -1)
    if config.normalised:  # Mixtral: the chosen weights sum to 1
        weights = weights / weights.sum(-1, keepdims=True)
    weights = context.tap("chosen", weights * config.scale)
    each = np.repeat(x[:, :, None], config.active, axis=2)  # B T A D: the token's vector for each of its experts
    if isinstance(config, InputWeightedMoEConfig):  # Llama 4: an expert reads p·x, and its output counts fully
        each, weights = each * weights[..., None].astype(x.dtype), np.ones_like(weights)
    outputs = expert_outputs(config, each, which, context.at("experts"))
    out = (outputs * weights[..., None]).sum(2).astype(x.dtype)
    return out if config.shared is None else out + context.run("shared", config.shared, x)


@runs(SoftmaxChoiceConfig)
def softmax_choice(
    config: SoftmaxChoiceConfig, scores: Float[np.ndarray, "B T E"], context: Context
) -> Float[np.ndarray, "2 B T E"]:
    """The weight of each expert and the number it is ranked by: both are its probability (Mixtral).

    >>> config = SoftmaxChoiceConfig()
    >>> p, rank = softmax_choice(config, np.array([[[0.0, 0.0]]]), None)
    >>> p, bool((p == rank).all())
    (array([[[0.5, 0.5]]]), True)
    """
    p = softmax(scores)
    return np.stack((p, p))


@runs(SigmoidChoiceConfig)
def sigmoid_choice(
    config: SigmoidChoiceConfig, scores: Float[np.ndarray, "B T E"], context: Context
) -> Float[np.ndarray, "2 B T E"]:
    """The weight of each expert and the number it is ranked by: sigmoid(score) (Llama 4).

    The order is that of the scores, as with softmax, but the weights need not sum to 1. For the scores (2, 1) they are
    0.88 and 0.73, where softmax gives 0.73 and 0.27: a second expert does not take weight from the first.
    """
    p = 1 / (1 + np.exp(-scores))
    return np.stack((p, p))


@runs(GroupedChoiceConfig)
def grouped_choice(
    config: GroupedChoiceConfig, scores: Float[np.ndarray, "B T E"], context: Context
) -> Float[np.ndarray, "2 B T E"]:
    """p = sigmoid(scores) is the weight; p + b ranks, within the best groups only (DeepSeek-V3).

    A group's merit is the sum of its two best experts; the `kept` groups with the largest merit are eligible. On many
    machines with one group each, a token then travels to at most `kept` of them.
    """
    p = 1 / (1 + np.exp(-scores))
    grouped = (p + context["bias"]).reshape(*p.shape[:-1], config.groups, -1)  # B T groups, experts of each
    merit = np.sort(grouped, axis=-1)[..., -2:].sum(-1)
    return np.stack((p, only_best_groups(grouped, merit, config.kept)))


@runs(GroupedSoftmaxChoiceConfig)
def grouped_softmax_choice(
    config: GroupedSoftmaxChoiceConfig, scores: Float[np.ndarray, "B T E"], context: Context
) -> Float[np.ndarray, "2 B T E"]:
    """p = softmax(scores) is the weight and ranks, within the groups that have the likeliest experts (DeepSeek-V2).

    Softmax couples the experts: raising one score lowers all other probabilities. The sigmoid of `grouped_choice` rates
    each expert alone, so adding experts does not shrink the weights.
    """
    p = softmax(scores)
    grouped = p.reshape(*p.shape[:-1], config.groups, -1)
    return np.stack((p, only_best_groups(grouped, grouped.max(-1), config.kept)))


def only_best_groups(
    grouped: Float[np.ndarray, "B T N M"], merit: Float[np.ndarray, "B T N"], kept: int
) -> Float[np.ndarray, "B T E"]:
    """The ranks of the experts in the `kept` groups with the largest merit; −∞ for the others.

    Two groups of two experts, one group kept. The best single expert is in group 0, but group 1 has the larger sum:

    >>> grouped = np.array([[[[0.9, 0.0], [0.6, 0.5]]]])
    >>> only_best_groups(grouped, grouped.sum(-1), kept=1)
    array([[[-inf, -inf,  0.6,  0.5]]])
    """
    place = np.argsort(np.argsort(-merit, axis=-1, kind="stable"), axis=-1)  # 0 for the best group, 1 for the next …
    return np.where(place[..., None] < kept, grouped, -np.inf).reshape(*grouped.shape[:-2], -1)


def expert_outputs(
    config: MoEConfig, x: Float[np.ndarray, "B T A D"], which: Int[np.ndarray, "B T A"], context: Context
) -> Float[np.ndarray, "B T A D"]:
    """The feed-forward layer of each token's A experts: down · act(up · x), or gated.

    The weights of all experts are stacked, E F D; expert e's are row e. Taps are B T F A, as in the trace.

    The loop runs over experts and not over tokens: the tokens of one expert form one matrix product. A token appears A
    times, once for each of its experts. Nothing is padded, so an expert without tokens costs nothing.
    """

    def layer(name: str, h: Float[np.ndarray, "B T A I"]) -> Float[np.ndarray, "B T A O"]:
        """One matrix of each token's experts: expert by expert, with all the tokens that chose it in one product."""
        weight, bias = context[f"{name}.weight"], context.get(f"{name}.bias")
        out = np.empty((*h.shape[:-1], weight.shape[1]), h.dtype)
        for e in range(config.experts):
            out[which == e] = linear(h[which == e], weight[e], None if bias is None else bias[e])
        return out

    def tap(name: str, value: Float[np.ndarray, "B T A F"]) -> Float[np.ndarray, "B T A F"]:
        context.tap(name, np.moveaxis(value, 2, -1))
        return value

    expert, up = config.expert, layer("up", x)
    if isinstance(expert, FeedForwardConfig):
        hidden = ACTIVATIONS[expert.activation](tap("pre_activation", up))
    else:
        opened = tap("gate", open_gate(expert, tap("pre_activation", layer("gate", x))))
        hidden = opened * gated_values(expert, up)
    return tap("down", layer("down", tap("up", hidden)))


def load_balancing_loss(router: Float[np.ndarray, "... E"], active: int) -> Float[np.ndarray, ""]:
    """E · Σ_e f_e·P_e: f_e the share of tokens sent to expert e, P_e the mean probability it is given.

    A router left alone soon sends everything to a few experts, which then learn most. This loss is added to the
    model's own: it is `active` if all experts are used alike, and grows as tokens crowd on the favourites.
    Fedus et al. (2022), "Switch Transformers", equations 4 to 6.

    Both factors are needed. f alone has no gradient, and P alone would be lowest for any distribution that sums to 1.

    >>> even, crowded = np.array([[0.6, 0.4], [0.4, 0.6]]), np.array([[0.9, 0.1], [0.9, 0.1]])
    >>> [float(load_balancing_loss(router, active=1)) for router in (even, crowded)]
    [1.0, 1.8]
    """
    check_active(router, active)
    mean = router.reshape(-1, router.shape[-1]).mean(0) if router.size else np.zeros(router.shape[-1])
    return np.asarray(router.shape[-1] * (_share(router, active) * mean).sum())


def load_balancing_loss_backward(
    d_out: Float[np.ndarray, ""], router: Float[np.ndarray, "... E"], active: int
) -> Float[np.ndarray, "... E"]:
    """d_out · E·f_e/tokens, for every token alike.

    The choice of experts (f) is a step function and has no gradient; the probabilities (P) do. The loss pushes down
    the probability of busy experts.

    >>> load_balancing_loss_backward(np.array(1.0), np.zeros((2, 4)), active=1).shape
    (2, 4)
    """
    check_active(router, active)
    check_gradient(d_out)
    experts = router.shape[-1]
    tokens = max(router.size // experts, 1)
    return np.broadcast_to(d_out * experts * _share(router, active) / tokens, router.shape).copy()


def _share(router: Float[np.ndarray, "... E"], active: int) -> Float[np.ndarray, "E"]:
    """f: the share of tokens for which each expert is among the `active` most probable.

    The shares sum to `active`, since every token chooses that many.

    >>> _share(np.array([[0.6, 0.4], [0.4, 0.6], [0.9, 0.1]]), active=1).round(2)
    array([0.67, 0.33])
    """
    flat = router.reshape(-1, router.shape[-1])
    which = np.argsort(-flat, axis=-1, kind="stable")[:, :active]
    return np.bincount(which.ravel(), minlength=flat.shape[1]) / max(len(flat), 1)


def check_active(router: Any, active: int) -> None:
    """Raise one clear sentence if `active` is no number of experts, in either engine.

    With active = E every token uses every expert: allowed, and no longer a choice.
    """
    if not 1 <= active <= router.shape[-1]:
        raise ValueError(f"active is {active}, but must be between 1 and the number of experts, {router.shape[-1]}")
