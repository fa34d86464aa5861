"""Mixture of experts: each token passes the few feed-forward layers that a router chooses for it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from clearhead.configs import (
    FeedForwardConfig,
    GatedFeedForwardConfig,
    GroupedChoiceConfig,
    MoEConfig,
    SoftmaxChoiceConfig,
)
from clearhead.functional import ACTIVATIONS, softmax
from clearhead.precision.matrix import linear

from .build import build_part, builds
from .context import Context


@builds(MoEConfig)
class MoE(nn.Module):
    """Σ over the chosen experts e of p_e·expert_e(x), plus the shared expert. No capacity: no token is dropped.

    Its tap `router` holds the probabilities, from which `functional.load_balancing_loss` is computed.
    """

    def __init__(self, config: MoEConfig, dim: int) -> None:
        super().__init__()
        self.active, self.normalised, self.scale = config.active, config.normalised, config.scale
        self.router = nn.Linear(dim, config.experts, bias=False)  # never packed: it chooses
        self.choice = build_part(config.choice, config.experts)
        self.experts = Experts(config.expert, config.experts, dim)
        self.shared = None if config.shared is None else build_part(config.shared, dim)

    def forward(self, x: Float[Tensor, "B T D"], context: Context) -> Float[Tensor, "B T D"]:
        p = context.tap("router", self.choice(self.router(x)))
        which = self.choice.rank(p).topk(self.active, dim=-1).indices  # B T A
        weights = p.gather(-1, which)
        if self.normalised:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        weights = context.tap("chosen", weights * self.scale)
        mixed = self.experts(x.flatten(0, 1), weights.flatten(0, 1), which.flatten(0, 1)).view_as(x)
        return mixed if self.shared is None else mixed + self.shared(x, context.at("shared"))


@builds(SoftmaxChoiceConfig)
class SoftmaxChoice(nn.Module):
    """The likeliest experts."""

    def __init__(self, config: SoftmaxChoiceConfig, experts: int) -> None:
        super().__init__()

    def forward(self, scores: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return softmax(scores)

    def rank(self, p: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return p


@builds(GroupedChoiceConfig)
class GroupedChoice(nn.Module):
    """The largest p + b in the best groups, weighted by p. No gradient reaches b."""

    def __init__(self, config: GroupedChoiceConfig, experts: int) -> None:
        super().__init__()
        self.groups, self.kept = config.groups, config.kept
        self.bias: Tensor
        self.register_buffer("bias", torch.zeros(experts))

    def forward(self, scores: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        return scores.sigmoid()

    def rank(self, p: Float[Tensor, "B T E"]) -> Float[Tensor, "B T E"]:
        grouped = (p + self.bias).unflatten(-1, (self.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1).topk(self.kept, dim=-1).indices
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(left_out[..., None], -torch.inf).flatten(-2)


class Experts(nn.Module):
    """Feed-forward layers of one shape, their weights stacked along a first axis."""

    def __init__(self, config: FeedForwardConfig | GatedFeedForwardConfig, experts: int, dim: int) -> None:
        super().__init__()
        self.activation = config.activation
        for name, (rows, columns) in config.matrices(dim).items():
            self.add_module(name, StackedLinear(experts, rows, columns, config.bias))

    def forward(
        self, x: Float[Tensor, "X D"], weights: Float[Tensor, "X A"], which: Int[Tensor, "X A"]
    ) -> Float[Tensor, "X D"]:
        out = torch.zeros_like(x)
        for expert in which.unique().tolist():
            tokens, place = (which == expert).nonzero(as_tuple=True)
            passed = self.one(expert, x[tokens]) * weights[tokens, place, None]
            out = out.index_add(0, tokens, passed)
        return out

    def one(self, expert: int, x: Float[Tensor, "X D"]) -> Float[Tensor, "X D"]:
        children = dict(self.named_children())
        act = ACTIVATIONS[self.activation]
        up = children["up"](x, expert)
        hidden = act(children["gate"](x, expert)) * up if "gate" in children else act(up)
        return children["down"](hidden, expert)


class StackedLinear(nn.Module):
    """One linear layer per expert."""

    def __init__(self, experts: int, rows: int, columns: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, rows, columns))
        self.bias = nn.Parameter(torch.zeros(experts, rows)) if bias else None

    def forward(self, x: Float[Tensor, "X I"], expert: int) -> Float[Tensor, "X O"]:
        return linear(x, self.weight[expert], None if self.bias is None else self.bias[expert])
