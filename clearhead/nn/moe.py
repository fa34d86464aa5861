"""Mixture of experts: a router sends each token to a few of many feed-forward layers.

    x B T D ── router ── choice ── weights, which  B T A ──┐
       └────────────── experts ── B T A D ─────────────────┴── Σ_A weight · output ── B T D   (+ shared expert)

Two ways to run the experts give the same result: sorted by expert, so that each expert multiplies all of its tokens in
one product, or written out, so that every inner value can be tapped.

All experts are one stacked tensor, E F D, and not E modules: loading, quantizing and the kernels then treat an MoE like
a wide layer. The router stays in full precision, because rounding a score could send a token to another expert, which
is not a small error.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import (
    FeedForwardConfig,
    GatedFeedForwardConfig,
    GroupedChoiceConfig,
    GroupedSoftmaxChoiceConfig,
    InputWeightedMoEConfig,
    MoEConfig,
    SigmoidChoiceConfig,
    SoftmaxChoiceConfig,
)
from clearhead.functional import softmax
from clearhead.precision.matrix import linear

from .build import build_part, builds
from .context import Context
from .ffn import activate


@builds(MoEConfig)
class MoE(nn.Module):
    """Σ over the chosen experts e of p_e·expert_e(x), plus the shared expert.

    There is no capacity limit, so no token is dropped. The tap `router` holds the probabilities, from which
    `functional.load_balancing_loss` is computed; the taps `experts.*` hold the inner values of the chosen experts.
    """

    def __init__(self, config: MoEConfig, dim: int) -> None:
        super().__init__()
        self.active, self.normalised, self.scale = config.active, config.normalised, config.scale
        # never quantized: a rounded score could choose another expert
        self.router = nn.Linear(dim, config.experts, bias=config.router_bias)
        self.choice = build_part(config.choice, config.experts)
        self.experts = Experts(config.expert, config.experts, dim)
        self.shared = None if config.shared is None else build_part(config.shared, dim)

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        """The weighted outputs of each token's experts, B T D.

        1. The router scores all experts, and the choice turns scores into weights p, B T E. 2. The `active` experts
        of the highest rank are chosen, B T A. The rank may differ from p (DeepSeek-V3). 3. Their weights are divided
        by their sum (`normalised`), multiplied by `scale`, and applied to the outputs.

        Taps: router B T E, chosen B T A.
        """
        p = context.tap("router", self.choice(self.router(x)))
        which = self.choice.rank(p).topk(self.active, dim=-1).indices  # B T A
        weights = p.gather(-1, which)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = context.tap("chosen", weights * self.scale)
        mixed = self.experts(x, weights, which, context.at("experts"))
        return mixed if self.shared is None else mixed + self.shared(x, context.at("shared"))


@builds(SoftmaxChoiceConfig)
class SoftmaxChoice(nn.Module):
    """p = softmax(scores); the experts with the largest p are chosen (Mixtral)."""

    def __init__(self, config: SoftmaxChoiceConfig | SigmoidChoiceConfig, experts: int) -> None:
        super().__init__()

    def forward(self, scores: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return softmax(scores)

    def rank(self, p: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """The numbers by which experts are chosen: p itself."""
        return p


@builds(SigmoidChoiceConfig)
class SigmoidChoice(SoftmaxChoice):
    """p = sigmoid(scores); the experts with the largest p are chosen (Llama 4).

    Each expert is rated alone, so the weights need not sum to 1, and a second expert takes nothing from the first.
    """

    def forward(self, scores: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return scores.sigmoid()


@builds(GroupedChoiceConfig)
class GroupedChoice(nn.Module):
    """p = sigmoid(scores); the largest p + b in the best groups are chosen, weighted by p (DeepSeek-V3).

    The bias b only ranks, so no gradient reaches it: it is a buffer that balances the experts.
    """

    def __init__(self, config: GroupedChoiceConfig, experts: int) -> None:
        super().__init__()
        self.groups, self.kept = config.groups, config.kept
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, scores: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return scores.sigmoid()

    def rank(self, p: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """p + b, and −∞ outside the `kept` groups whose two best experts have the largest sum."""
        grouped = (p + self.bias).unflatten(-1, (self.groups, -1))
        return only_best_groups(grouped, grouped.topk(2, dim=-1).values.sum(-1), self.kept)


@builds(GroupedSoftmaxChoiceConfig)
class GroupedSoftmaxChoice(nn.Module):
    """p = softmax(scores); the largest p in the groups that have the likeliest experts (DeepSeek-V2)."""

    def __init__(self, config: GroupedSoftmaxChoiceConfig, experts: int) -> None:
        super().__init__()
        self.groups, self.kept = config.groups, config.kept

    def forward(self, scores: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return softmax(scores)

    def rank(self, p: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        """p, and −∞ outside the `kept` groups whose best expert is likeliest."""
        grouped = p.unflatten(-1, (self.groups, -1))
        return only_best_groups(grouped, grouped.amax(-1), self.kept)


def only_best_groups(
    grouped: Float[Tensor, "B T N M"], merit: Float[Tensor, "B T N"], kept: int
) -> Float[Tensor, "B T E"]:
    """The ranks of the experts in the `kept` groups with the largest merit; −∞ for the others."""
    best = merit.topk(kept, dim=-1).indices
    left_out = torch.ones_like(merit, dtype=torch.bool).scatter(-1, best, False)
    return grouped.masked_fill(left_out[..., None], -torch.inf).flatten(-2)


class Experts(nn.Module):
    """Feed-forward layers of one shape, their weights stacked along a first axis."""

    up: StackedLinear
    down: StackedLinear
    gate: StackedLinear  # only if the layers are gated

    def __init__(self, config: FeedForwardConfig | GatedFeedForwardConfig, experts: int, dim: int) -> None:
        super().__init__()
        self.config, self.gated = config, "gate" in config.matrices(dim)
        for name, (rows, columns) in config.matrices(dim).items():
            self.add_module(name, StackedLinear(experts, rows, columns, config.bias))

    def forward(
        self,
        x: Float[Tensor, "B T D"],
        weights: Float[Tensor, "B T A"],
        which: Int[Tensor, "B T A"],
        context: Context,
    ) -> Float[Tensor, "B T D"]:
        """Σ_a weights_a · expert_{which_a}(x), each expert on all the tokens that chose it at once."""
        inner = ("pre_activation", "gate", "up", "down")
        if not context.fused or context.replaces(*inner):
            return self.run_written_out(x, weights, which, context)
        if context.reads(*inner):
            self.run_written_out(x, weights, which, context)  # for the taps alone, so that reading changes nothing
        flat, chosen = x.flatten(0, 1), which.flatten(0, 1)
        out = torch.zeros_like(flat)
        for expert in chosen.unique().tolist():
            tokens, place = (chosen == expert).nonzero(as_tuple=True)
            weight = weights.flatten(0, 1)[tokens, place, None]
            passed = self.leave(self.one(expert, self.enter(flat[tokens], weight)), weight)
            out = out.index_add(0, tokens, passed.to(out.dtype))  # under autocast, products are narrower than x
        return out.view_as(x)

    def enter(self, x: Float[Tensor, "... D"], weight: Float[Tensor, "... 1"]) -> Float[Tensor, "... D"]:
        """What an expert reads."""
        return x

    def leave(self, y: Float[Tensor, "... D"], weight: Float[Tensor, "... 1"]) -> Float[Tensor, "... D"]:
        """What of an expert's output is added."""
        return y * weight

    def one(self, expert: int, x: Float[Tensor, "X D"]) -> Float[Tensor, "X D"]:
        """One expert's feed-forward layer."""
        up, gate = self.up(x, expert), self.gate(x, expert) if self.gated else None
        return self.down(activate(self.config, gate, up), expert)

    def run_written_out(
        self,
        x: Float[Tensor, "B T D"],
        weights: Float[Tensor, "B T A"],
        which: Int[Tensor, "B T A"],
        context: Context,
    ) -> Float[Tensor, "B T D"]:
        """The same, one matrix after the other, with the inner values of all chosen experts side by side: B T F A."""

        def tap(name: str, value: Float[Tensor, "B T A F"]) -> Float[Tensor, "B T A F"]:
            return context.tap(name, value.movedim(2, -1)).movedim(-1, 2)

        each = self.enter(x.unsqueeze(2).expand(*which.shape, x.shape[2]), weights.unsqueeze(-1).to(x.dtype))
        up = self.by_expert(self.up, each, which)
        gate = self.by_expert(self.gate, each, which) if self.gated else None
        hidden = activate(self.config, gate, up, tap)
        down = tap("down", self.by_expert(self.down, hidden, which))
        return self.leave(down, weights.unsqueeze(-1)).sum(2).to(x.dtype)

    @staticmethod
    def by_expert(
        layer: StackedLinear, x: Float[Tensor, "B T A I"], which: Int[Tensor, "B T A"]
    ) -> Float[Tensor, "B T A O"]:
        """One matrix of each token's experts, on a vector for each of them."""
        rows, chosen = x.flatten(0, 2), which.flatten()
        order = chosen.argsort(stable=True)
        parts = [layer(rows[chosen == expert], expert) for expert in chosen.unique().tolist()]
        joint = torch.cat(parts) if parts else rows.new_zeros(0, layer.weight.shape[1])
        return joint[order.argsort()].unflatten(0, which.shape)


class InputWeightedExperts(Experts):
    """Experts that read weighted inputs, p·x, and whose outputs are added unweighted.

    That is not the same as weighting outputs: an activation between two matrices does not commute with a factor.
    """

    def enter(self, x: Float[Tensor, "... D"], weight: Float[Tensor, "... 1"]) -> Float[Tensor, "... D"]:
        return x * weight

    def leave(self, y: Float[Tensor, "... D"], weight: Float[Tensor, "... 1"]) -> Float[Tensor, "... D"]:
        return y


@builds(InputWeightedMoEConfig)
class InputWeightedMoE(MoE):
    """Σ over the chosen experts e of expert_e(p_e·x), plus the shared expert (Llama 4)."""

    def __init__(self, config: InputWeightedMoEConfig, dim: int) -> None:
        super().__init__(config, dim)
        self.experts = InputWeightedExperts(config.expert, config.experts, dim)


class StackedLinear(nn.Module):
    """One linear layer per expert: weight E O I, bias E O. `forward` applies one expert to the tokens that chose it."""

    def __init__(self, experts: int, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns))
        self.bias = nn.Parameter(torch.zeros(experts, rows)) if bias else None

    def forward(self, x: Float[Tensor, "X I"], expert: int) -> Float[Tensor, "X O"]:
        return linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])
