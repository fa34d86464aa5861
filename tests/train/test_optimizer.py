"""Muon's updates are orthogonal, and the same whether matrices are worked on together or alone."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import pytest
import torch
from torch import nn

import clearhead
from clearhead.configs import (
    AttentionConfig,
    LinearAttentionConfig,
    LinformerConfig,
    LongformerConfig,
    ShortConvConfig,
)
from clearhead.configs.train import AdamWConfig, MuonConfig
from clearhead.models.llama import llama
from clearhead.models.model import build_empty
from clearhead.optim import AdamW, Muon, matrices, orthogonal
from clearhead.training.optimizer import fused_rows, make_optimizer
from tests.invariants.cases import MIXERS, block, sequence

FUSED = (AttentionConfig, LinearAttentionConfig, LinformerConfig, LongformerConfig, ShortConvConfig)


def test_orthogonal_takes_singular_values_near_one() -> None:
    torch.manual_seed(0)
    for shape in ((3, 16, 16), (2, 16, 40)):
        values = torch.linalg.svdvals(orthogonal(torch.randn(*shape), 5))
        assert values.min() > 0.7
        assert values.max() < 1.3


def test_orthogonal_keeps_the_directions() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 12, 30)
    u, _, vt = torch.linalg.svd(x[0], full_matrices=False)
    near, exact = orthogonal(x, 5)[0].flatten(), (u @ vt).flatten()
    assert near @ exact > 0.99 * near.norm() * exact.norm()


def test_muon_moves_every_matrix_by_its_own_orthogonal_direction() -> None:
    torch.manual_seed(0)
    model = clearhead.build(clearhead.preset("tiny-deepseek"))
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    config = MuonConfig(lr=0.1, momentum=0.0)
    make_optimizer(config, model).step(1.0)
    for name, p in model.named_parameters():
        moved = p.detach() - before[name]
        if ".blocks." in name and p.dim() > 1:
            rows = fused_rows(model).get(name)
            for change, gradient in zip(matrices(moved, rows), matrices(p.grad, rows), strict=True):
                tall = change.shape[0] > change.shape[1]
                side = gradient.T if tall else gradient
                wanted = orthogonal(side[None], 5)[0] * -0.1 * ((side.shape[1] / side.shape[0]) ** 0.5 if tall else 1)
                torch.testing.assert_close(change, wanted.T if tall else wanted, atol=2e-5, rtol=1e-3)
        else:
            assert moved.abs().max() > 0


def test_fused_qkv_is_three_matrices_and_experts_are_many() -> None:
    assert [tuple(m.shape) for m in matrices(torch.zeros(96, 32), (32, 32, 32))] == [(32, 32)] * 3
    assert [tuple(m.shape) for m in matrices(torch.zeros(5, 24, 32))] == [(24, 32)] * 5
    assert [tuple(m.shape) for m in matrices(torch.zeros(96, 32))] == [(96, 32)]
    grouped = llama(dim=32, layers=1, heads=4, kv_heads=2, hidden=96, vocabulary=50)
    optimizer = make_optimizer(MuonConfig(), clearhead.build(grouped))
    muon = optimizer.optimizers[0]
    stacks = [stack for group in muon.param_groups for stack in muon.stacks(group)]
    names = [(optimizer.names[id(p)].split(".")[-2], i) for stack in stacks for p, i, _ in stack.places]
    assert sorted(names) == [("down", 0), ("gate", 0), ("out", 0), ("qkv", 0), ("qkv", 1), ("qkv", 2), ("up", 0)]
    momenta = [tuple(value.shape) for state in muon.state.values() for value in state.values()]
    assert sorted(momenta) == [(1, 32, 32), (1, 32, 32), (2, 16, 32), (3, 32, 96)]


def loss_after_steps(make: Callable[[nn.Module], list[torch.optim.Optimizer]], steps: int = 30) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    x, y = torch.randn(64, 8), torch.randn(64, 4)
    optimizers, losses = make(model), []
    for _ in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        losses.append(loss.item())
    return losses


def test_the_optimizers_work_in_a_plain_torch_loop() -> None:
    def both(model: nn.Module) -> list[torch.optim.Optimizer]:
        weights, biases = ([p for p in model.parameters() if (p.dim() == 2) == matrix] for matrix in (True, False))
        return [Muon(weights, lr=0.05), AdamW(biases, lr=0.01)]

    losses = loss_after_steps(both)
    assert losses[-1] < 0.8 * losses[0]
    losses = loss_after_steps(lambda model: [AdamW(model.parameters(), lr=0.01)])
    assert losses[-1] < 0.9 * losses[0]


def test_adamw_decays_by_dimension_whatever_the_names() -> None:
    matrix, gain = nn.Parameter(torch.ones(3, 3)), nn.Parameter(torch.ones(3))
    optimizer = AdamW([("gain.weight", gain), ("scale", matrix)], lr=0.1, weight_decay=0.5)
    matrix.grad, gain.grad = torch.zeros_like(matrix), torch.zeros_like(gain)
    optimizer.step()
    assert torch.allclose(matrix, torch.full_like(matrix, 0.95))
    assert torch.equal(gain, torch.ones_like(gain))


def test_muon_continues_from_a_state_dict_to_the_bit_and_refuses_vectors() -> None:
    torch.manual_seed(0)
    gradients = [torch.randn(6, 4) for _ in range(4)]
    one, other = nn.Parameter(torch.zeros(6, 4)), nn.Parameter(torch.zeros(6, 4))
    first = Muon([one], lr=0.1)
    for gradient in gradients[:2]:
        one.grad = gradient.clone()
        first.step()
    second = Muon([other], lr=0.5)
    second.load_state_dict(deepcopy(first.state_dict()))
    other.data.copy_(one.data)
    for gradient in gradients[2:]:
        for parameter, optimizer in ((one, first), (other, second)):
            parameter.grad = gradient.clone()
            optimizer.step()
    assert torch.equal(one, other)
    with pytest.raises(ValueError, match=r"but got a parameter of shape \(3,\); give it to AdamW"):
        Muon([nn.Parameter(torch.zeros(3))])


def test_fused_rows_are_all_the_rows_of_a_matrix() -> None:
    for name, mixer in MIXERS.items():
        model = build_empty(sequence(block(mixer), repeats=1))
        fused = fused_rows(model)
        assert {path: len(model.get_parameter(path)) for path in fused} == {p: sum(rows) for p, rows in fused.items()}
        assert bool(fused) == isinstance(mixer, FUSED), name


def test_adamw_equals_torch_and_spares_vectors_from_decay() -> None:
    torch.manual_seed(0)
    ours, theirs = (clearhead.build(clearhead.preset("tiny-gpt")) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    matrices = [p for p in theirs.parameters() if p.dim() > 1]
    vectors = [p for p in theirs.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    torch_adam = torch.optim.AdamW(groups, lr=0.5 * 0.01, betas=(0.9, 0.99), eps=1e-8)
    our_adam = make_optimizer(AdamWConfig(lr=0.01, beta2=0.99, weight_decay=0.3), ours)
    for _ in range(3):
        for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
            mine.grad = torch.randn_like(mine)
            other.grad = mine.grad.clone()
        our_adam.step(0.5)
        torch_adam.step()
    for mine, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other)


def test_state_saved_and_loaded_goes_on_to_the_bit() -> None:
    for config in (AdamWConfig(), MuonConfig()):
        torch.manual_seed(0)
        model = clearhead.build(clearhead.preset("tiny-llama"))
        gradients = [[torch.randn_like(p) for p in model.parameters()] for _ in range(4)]

        def advance(optimizer, model, some) -> None:
            for given in some:
                for p, g in zip(model.parameters(), given, strict=True):
                    p.grad = g.clone()
                optimizer.step(1.0)

        optimizer = make_optimizer(config, model)
        advance(optimizer, model, gradients[:2])
        saved = {k: v.clone() for k, v in optimizer.tensors().items()}
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        advance(optimizer, model, gradients[2:])
        other = clearhead.build(clearhead.preset("tiny-llama"))
        other.load_state_dict(weights)
        resumed = make_optimizer(config, other)
        with torch.no_grad():
            for name, tensor in resumed.tensors().items():
                tensor.copy_(saved[name])
        advance(resumed, other, gradients[2:])
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
