"""Mixture of experts: a router sends each token to a few of many feed-forward layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .base import ConfigError, Part, Scope, Step, under
from .ffn import FeedForwardConfig, GatedFeedForwardConfig, SwitchedFeedForwardConfig


@dataclass(frozen=True, kw_only=True)
class SoftmaxChoiceConfig(Part):
    """p = softmax(router(x)), and the likeliest experts are chosen  (Shazeer et al. 2017).

    >>> MoEConfig(expert=FeedForwardConfig(hidden=24), experts=4, active=2, choice=SoftmaxChoiceConfig()).choice
    SoftmaxChoiceConfig()
    """

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.step("", "softmax(X·W_router)", "B T E")


@dataclass(frozen=True, kw_only=True)
class GroupedChoiceConfig(Part):
    """p = sigmoid(router(x)); the experts with the largest p + b in the best groups are chosen, weighted by p alone.

    The bias b balances the experts: DeepSeek's training moves it by how busy each is, not by a gradient. Here it stays
    as loaded, or zero. A group's merit is the sum of its two best experts; only the `kept` best groups are eligible
    (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).

    >>> MoEConfig(expert=FeedForwardConfig(hidden=24), experts=4, active=2, choice=GroupedChoiceConfig(groups=2)).choice
    GroupedChoiceConfig(groups=2, kept=1)
    """

    groups: int = 1
    kept: int = 1

    def check(self) -> None:
        self.require_positive("groups", "kept")
        if self.kept > self.groups:
            raise ConfigError(f"GroupedChoice.kept is {self.kept}, but there are only {self.groups} groups")

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.step("", "sigmoid(X·W_router)", "B T E", weights={"bias": (scope["E"],)})


@dataclass(frozen=True, kw_only=True)
class GroupedSoftmaxChoiceConfig(Part):
    """p = softmax(router(x)); the likeliest experts of the best groups. A group's merit is its best expert.

    DeepSeek-V2, arXiv 2405.04434, section 2.2.2.

    >>> GroupedSoftmaxChoiceConfig(groups=2, kept=1)
    GroupedSoftmaxChoiceConfig(groups=2, kept=1)
    """

    groups: int = 1
    kept: int = 1

    def check(self) -> None:
        self.require_positive("groups", "kept")
        if self.kept > self.groups:
            raise ConfigError(f"GroupedSoftmaxChoice.kept is {self.kept}, but there are only {self.groups} groups")

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.step("", "softmax(X·W_router)", "B T E")


@dataclass(frozen=True, kw_only=True)
class SigmoidChoiceConfig(Part):
    """p = sigmoid(router(x)), and the experts with the largest p are chosen  (Llama 4).

    >>> SigmoidChoiceConfig()
    SigmoidChoiceConfig()
    """

    def steps(self, scope: Scope) -> Iterator[Step]:
        yield scope.step("", "sigmoid(X·W_router)", "B T E")


ChoiceConfig = SoftmaxChoiceConfig | GroupedChoiceConfig | GroupedSoftmaxChoiceConfig | SigmoidChoiceConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Part):
    """Σ over the `active` best experts e of p_e·expert_e(x), p given by the router  (Shazeer et al. 2017).

    There is no capacity limit: every token reaches all of its experts.

    >>> MoEConfig(expert=GatedFeedForwardConfig(hidden=24), experts=4, active=2).weights(8)["experts.up.weight"]
    (4, 24, 8)
    """

    expert: FeedForwardConfig | GatedFeedForwardConfig
    experts: int
    active: int
    shared: FeedForwardConfig | GatedFeedForwardConfig | SwitchedFeedForwardConfig | None = None  # for every token
    normalised: bool = True  # the chosen weights are divided by their sum (Mixtral)
    scale: float = 1.0  # and multiplied by this
    choice: ChoiceConfig = SoftmaxChoiceConfig()
    router_bias: bool = False

    def check(self) -> None:
        self.require_positive("experts", "active", "scale")
        if self.active > self.experts:
            raise ConfigError(f"MoE.active is {self.active}, but there are only {self.experts} experts")
        if isinstance(self.choice, GroupedChoiceConfig | GroupedSoftmaxChoiceConfig):
            size, rest = divmod(self.experts, self.choice.groups)
            least = 2 if isinstance(self.choice, GroupedChoiceConfig) else 1
            if rest or size < least or self.choice.kept * size < self.active:
                raise ConfigError(
                    f"MoE.choice keeps {self.choice.kept} of {self.choice.groups} groups, but the {self.experts} "
                    f"experts must fall into groups of {least} or more that hold the {self.active} active ones"
                )

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.with_sizes("ffn", E=self.experts, A=self.active)
        tokens = s["B"] * s["T"]
        for step in under("choice", self.choice.steps(s)):
            matrix = {"router.weight": (s["E"], s["D"])} | ({"router.bias": (s["E"],)} if self.router_bias else {})
            flops = 2 * tokens * s["E"] * s["D"]
            yield replace(step, name="router", weights=matrix | dict(step.weights), flops=flops, order="n·d")
        yield s.step("chosen", "the A largest, as weights", "B T A", kept=0)
        # A of E experts work on each token; their weights are stacked along a first axis
        for step in self.expert.steps(s):
            yield replace(
                step,
                name=f"experts.{step.name}",
                letters=f"{step.letters} A",
                shape=(*step.shape, s["A"]),
                weights={f"experts.{name}": (s["E"], *shape) for name, shape in step.weights.items()},
                idle=(s["E"] - s["A"]) * sum(math.prod(shape) for shape in step.weights.values()),
                flops=step.flops * s["A"],
            )
        if self.shared is not None:
            yield from under("shared", self.shared.steps(s))


@dataclass(frozen=True, kw_only=True)
class InputWeightedMoEConfig(MoEConfig):
    """Σ over the chosen experts e of expert_e(p_e·x): the weight acts on what an expert reads  (Llama 4).

    >>> expert = FeedForwardConfig(hidden=16, bias=False)
    >>> InputWeightedMoEConfig(expert=expert, experts=4, active=1).weights(8)["experts.up.weight"]
    (4, 16, 8)
    """
