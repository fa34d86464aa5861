"""Experts: as many per token as promised, numbers that can be checked on paper, and a slow loop that agrees."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from clearhead.configs import (
    FeedForwardConfig,
    GroupedChoiceConfig,
    InputWeightedMoEConfig,
    MoEConfig,
    SigmoidChoiceConfig,
    SoftmaxChoiceConfig,
)
from clearhead.functional import ACTIVATIONS
from clearhead.nn.build import build_part
from clearhead.nn.context import Context
from clearhead.nn.moe import MoE
from clearhead.nn.tap import Taps

from .cases import DIM, FEEDS
from .tools import BATCH, LENGTH, close, randomise

KINDS = [name for name, config in FEEDS.items() if isinstance(config, MoEConfig)]


def context(length: int, taps: Taps | None = None) -> Context:
    positions = torch.arange(length)[None]
    return Context(positions, positions, taps=taps)


def made(name: str) -> tuple[MoE, MoEConfig]:
    config = FEEDS[name]
    assert isinstance(config, MoEConfig)
    moe = build_part(config, DIM).double()
    randomise(moe)
    return moe, config


def one_expert(moe: MoE, config: MoEConfig, e: int, x: Tensor) -> Tensor:
    """The feed-forward layer of expert e as a module of its own."""
    layer: nn.Module = build_part(config.expert, DIM).double()
    layer.load_state_dict({name: weight[e] for name, weight in moe.experts.state_dict().items()})
    return layer(x, context(x.shape[1]))


def shares(moe: MoE, config: MoEConfig, scores: list[float]) -> tuple[list[float], list[float]]:
    """What weighs each expert and what ranks it, as the papers write them."""
    if isinstance(config.choice, SigmoidChoiceConfig):
        return [1 / (1 + math.exp(-score)) for score in scores], scores
    total = sum(math.exp(score) for score in scores)
    share = [math.exp(score) / total for score in scores]
    if isinstance(config.choice, SoftmaxChoiceConfig):
        return share, share
    merit, counted = share, 1  # of a group: its best expert
    if isinstance(config.choice, GroupedChoiceConfig):
        share = [1 / (1 + math.exp(-score)) for score in scores]
        merit, counted = [p + float(b) for p, b in zip(share, moe.choice.bias, strict=True)], 2
    size = config.experts // config.choice.groups
    groups = [range(g * size, (g + 1) * size) for g in range(config.choice.groups)]
    best = sorted(groups, key=lambda group: -sum(sorted(merit[e] for e in group)[-counted:]))[: config.choice.kept]
    inside = {e for group in best for e in group}
    return share, [m if e in inside else -math.inf for e, m in enumerate(merit)]


@pytest.mark.parametrize("name", KINDS)
def test_experts_are_a_slow_loop_over_tokens(name: str) -> None:
    moe, config = made(name)
    x = torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = torch.zeros_like(x)
    with torch.no_grad():
        for b in range(BATCH):
            for t in range(LENGTH):
                token = x[b : b + 1, t : t + 1]
                scores = moe.router(token)[0, 0].tolist()
                share, merit = shares(moe, config, scores)
                best = sorted(range(config.experts), key=lambda e: -merit[e])[: config.active]
                total = sum(share[e] for e in best) if config.normalised else 1.0
                for e in best:
                    weight = config.scale * share[e] / total
                    if isinstance(config, InputWeightedMoEConfig):
                        want[b, t] += one_expert(moe, config, e, weight * token)[0, 0]
                    else:
                        want[b, t] += weight * one_expert(moe, config, e, token)[0, 0]
        if moe.shared is not None:
            want += moe.shared(x, context(LENGTH))
        close(moe(x, context(LENGTH)), want, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", KINDS)
def test_every_token_reaches_so_many_experts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    moe, config = made(name)
    x = torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    seen = dict.fromkeys(range(BATCH * LENGTH), 0)
    passed = moe.experts.one

    def counting(expert: int, tokens: Tensor) -> Tensor:
        for token in tokens:  # the one with the same direction: experts may read weighted inputs
            seen[int(torch.cosine_similarity(x.flatten(0, 1), token[None]).argmax())] += 1
        return passed(expert, tokens)

    monkeypatch.setattr(moe.experts, "one", counting)
    taps = Taps(read=["*"])
    with torch.no_grad():
        moe(x, context(LENGTH, taps))
    assert set(seen.values()) == {config.active}
    if isinstance(config.choice, SoftmaxChoiceConfig):
        close(taps.values["router"].sum(-1), torch.ones(BATCH, LENGTH, dtype=torch.float64))
    if config.normalised:
        close(taps.values["chosen"].sum(-1), torch.full((BATCH, LENGTH), config.scale, dtype=torch.float64))
    else:
        most = config.active if isinstance(config.choice, SigmoidChoiceConfig) else 1
        assert (taps.values["chosen"].sum(-1) < most * config.scale).all()


@pytest.mark.parametrize(("normalised", "share"), [(True, 1.0), (False, 0.75)])
def test_two_experts_on_paper(normalised: bool, share: float) -> None:
    """Expert 0 doubles, expert 1 negates; the router gives 3 : 1 to expert 0 for (1, 0) and to expert 1 for (0, 1)."""
    expert = FeedForwardConfig(hidden=2, activation="relu", bias=False)
    moe = build_part(MoEConfig(expert=expert, experts=2, active=1, normalised=normalised), 2).double()
    eye, ln3 = torch.eye(2, dtype=torch.float64), torch.tensor(3.0, dtype=torch.float64).log()
    with torch.no_grad():
        moe.router.weight.copy_(eye * ln3)
        moe.experts.up.weight.copy_(torch.stack((eye, eye)))
        moe.experts.down.weight.copy_(torch.stack((2 * eye, -eye)))
        out = moe(torch.tensor([[[1.0, 0.0], [0.0, 1.0]]], dtype=torch.float64), context(2))
    close(out, share * torch.tensor([[[2.0, 0.0], [0.0, -1.0]]], dtype=torch.float64))


def test_two_active_experts_on_paper() -> None:
    """Both experts, 3 : 1: (1, 0) becomes 3/4·2 − 1/4·1 = 1.25 in its first place."""
    expert = FeedForwardConfig(hidden=2, activation="relu", bias=False)
    moe = build_part(MoEConfig(expert=expert, experts=2, active=2, scale=4.0), 2).double()
    eye = torch.eye(2, dtype=torch.float64)
    with torch.no_grad():
        moe.router.weight.copy_(eye * torch.tensor(3.0, dtype=torch.float64).log())
        moe.experts.up.weight.copy_(torch.stack((eye, eye)))
        moe.experts.down.weight.copy_(torch.stack((2 * eye, -eye)))
        out = moe(torch.tensor([[[1.0, 0.0]]], dtype=torch.float64), context(1))
    close(out, torch.tensor([[[5.0, 0.0]]], dtype=torch.float64))


@pytest.mark.parametrize("name", KINDS)
def test_gradients_reach_router_and_chosen_experts(name: str) -> None:
    moe, _ = made(name)
    x = torch.randn(BATCH, LENGTH, DIM, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    moe(x, context(LENGTH)).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in moe.parameters())


def test_activations_are_all_tried() -> None:
    tried = {getattr(config, "activation", None) for config in FEEDS.values()}
    assert set(ACTIVATIONS) <= tried
