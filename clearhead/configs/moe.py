"""Mixture of experts: a router sends each token to a few of many feed-forward layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from .base import ConfigError, Part, Scope, Step, under
from .ffn import FeedForwardConfig, GatedFeedForwardConfig


@dataclass(frozen=True, kw_only=True)
class MoEConfig(Part):
    """Σ over the `active` best experts e of p_e·expert_e(x), p = softmax(router(x))  (Shazeer et al. 2017).

    Every token reaches all of its experts: there is no capacity, so none is dropped.
    """

    expert: FeedForwardConfig | GatedFeedForwardConfig
    experts: int
    active: int
    shared: FeedForwardConfig | GatedFeedForwardConfig | None = None  # every token passes it as well (DeepSeek)
    normalised: bool = True  # the chosen weights are divided by their sum (Mixtral)
    scale: float = 1.0  # and multiplied by this

    def check(self) -> None:
        self.require_positive("experts", "active", "scale")
        if self.active > self.experts:
            raise ConfigError(f"MoE.active is {self.active}, but there are only {self.experts} experts")

    def steps(self, scope: Scope) -> Iterator[Step]:
        s = scope.having("ffn", E=self.experts, A=self.active)
        tokens = s["B"] * s["T"]
        yield s.step(
            "router",
            "softmax(X·W_router)",
            "B T E",
            weights={"router.weight": (s["E"], s["D"])},
            flops=2 * tokens * s["E"] * s["D"],
            order="n·d",
        )
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
