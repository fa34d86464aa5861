"""Muon's updates are orthogonal, and the same whether matrices are worked on together or alone."""

from __future__ import annotations

import torch

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
from clearhead.training.optimizer import fused_rows, make_optimizer, orthogonal, parts
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
            for change, gradient in zip(parts(moved, rows), parts(p.grad, rows), strict=True):
                tall = change.shape[0] > change.shape[1]
                side = gradient.T if tall else gradient
                wanted = orthogonal(side[None], 5)[0] * -0.1 * ((side.shape[1] / side.shape[0]) ** 0.5 if tall else 1)
                torch.testing.assert_close(change, wanted.T if tall else wanted, atol=2e-5, rtol=1e-3)
        else:
            assert moved.abs().max() > 0


def test_fused_qkv_is_three_matrices_and_experts_are_many() -> None:
    assert [tuple(m.shape) for m in parts(torch.zeros(96, 32), (32, 32, 32))] == [(32, 32)] * 3
    assert [tuple(m.shape) for m in parts(torch.zeros(5, 24, 32))] == [(24, 32)] * 5
    assert [tuple(m.shape) for m in parts(torch.zeros(96, 32))] == [(96, 32)]
    grouped = llama(dim=32, layers=1, heads=4, kv_heads=2, hidden=96, vocabulary=50)
    optimizer = make_optimizer(MuonConfig(), clearhead.build(grouped))
    found = sorted((name.split(".")[-2], i) for group in optimizer.groups for name, i, _ in group.places)
    assert found == [("down", 0), ("gate", 0), ("out", 0), ("qkv", 0), ("qkv", 1), ("qkv", 2), ("up", 0)]
    assert sorted(tuple(group.momentum.shape) for group in optimizer.groups) == [(2, 16, 32), (2, 32, 32), (3, 32, 96)]


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
        saved = {k: v.clone() for k, v in optimizer.state().items()}
        weights = {k: v.clone() for k, v in model.state_dict().items()}
        advance(optimizer, model, gradients[2:])
        other = clearhead.build(clearhead.preset("tiny-llama"))
        other.load_state_dict(weights)
        resumed = make_optimizer(config, other)
        with torch.no_grad():
            for name, tensor in resumed.state().items():
                tensor.copy_(saved[name])
        advance(resumed, other, gradients[2:])
        for a, b in zip(model.parameters(), other.parameters(), strict=True):
            assert torch.equal(a, b)
