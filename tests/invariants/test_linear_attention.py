"""Feature maps: the estimate is of the softmax, chunks change nothing, no later key has a say, and sums stay finite."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import clearhead
from clearhead.configs import Causal, ConfigError, FavorConfig, Full, LinearAttentionConfig, Window
from clearhead.functional.attention import attention
from clearhead.functional.linear_attention import (
    favor_exponents,
    favor_over_all_keys,
    favor_over_keys_so_far,
    linear_attention,
    no_favor_sums,
)
from clearhead.measure.cost import cost
from clearhead.nn.build import build_part
from clearhead.nn.context import Context
from clearhead.nn.linear_attention import redraw
from clearhead.nn.packing import DenseRows
from clearhead.reference.linear_attention import positive_features, random_directions
from tests.contracts.adapters import as_in_production

from .cases import MIXERS, block, sequence
from .tools import close, fresh, ids

CAUSAL = ("linear", "performer", "performer, value_dim")


def test_the_estimate_is_of_the_exponential() -> None:
    """E[φ(q)·φ(k)] = exp(q·k): the mean over many draws is within five standard errors of it."""
    rng = np.random.default_rng(0)
    q, k = 0.3 * rng.standard_normal((2, 5, 8))
    drawn = []
    for seed in range(2000):
        directions = random_directions(8, 8, seed)
        drawn.append(positive_features(q, directions) @ positive_features(k, directions).T)
    error = np.std(drawn, 0) / np.sqrt(len(drawn))
    assert (np.abs(np.mean(drawn, 0) - np.exp(q @ k.T)) < 5 * error).all()
    assert (error / np.exp(q @ k.T)).max() < 0.1


def test_the_error_falls_with_the_number_of_features() -> None:
    """Like 1/√W, and orthogonal directions have less of it than independent ones."""
    rng = np.random.default_rng(1)
    q, k = 0.2 * rng.standard_normal((2, 6, 16))

    def error(draw: object, features: int) -> float:
        found = [draw(features, seed) for seed in range(60)]
        estimates = [positive_features(q, d) @ positive_features(k, d).T for d in found]
        return float(np.sqrt(np.mean((np.array(estimates) - np.exp(q @ k.T)) ** 2)))

    def orthogonal(features: int, seed: int) -> np.ndarray:
        return random_directions(features, 16, seed)

    def independent(features: int, seed: int) -> np.ndarray:
        return np.random.default_rng(seed).standard_normal((features, 16))

    errors = [error(orthogonal, features) for features in (16, 64, 256, 1024)]
    assert all(1.5 < more / fewer < 2.7 for more, fewer in pairwise(errors))
    assert error(orthogonal, 16) < error(independent, 16)


def test_directions_are_orthogonal_in_sets_and_normal_one_by_one() -> None:
    directions = random_directions(20, 8, 3)
    for start in (0, 8, 16):
        products = directions[start : start + 8] @ directions[start : start + 8].T
        np.testing.assert_allclose(products - np.diag(np.diag(products)), 0, atol=1e-12)
    many = np.concatenate([random_directions(8, 8, seed) for seed in range(1500)])
    np.testing.assert_allclose(many.mean(0), 0, atol=0.05)
    np.testing.assert_allclose(many.T @ many / len(many), np.eye(8), atol=0.06)


@pytest.mark.parametrize("mask", [Causal(), Full()], ids=str)
def test_a_performer_comes_near_to_attention(mask: Causal | Full) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 2, 30, 8).double() * size for size in (0.4, 0.4, 1.0))
    want = attention(q, k, v, causal=mask.causal)
    errors = []
    for features in (64, 1024, 16384):
        found = []
        for seed in range(4):
            directions = torch.from_numpy(random_directions(features, 8, seed))
            log_q, log_k = favor_exponents(q, directions), favor_exponents(k, directions)
            if mask.causal:
                found.append(favor_over_keys_so_far(log_q, log_k, v, no_favor_sums(log_q, v))[0])
            else:
                found.append(favor_over_all_keys(log_q, log_k, v))
        errors.append(float((torch.stack(found) - want).square().mean().sqrt()))
    assert errors[0] > 2 * errors[1] > 4 * errors[2]
    assert errors[2] < 0.01


@pytest.mark.parametrize("name", CAUSAL)
@pytest.mark.parametrize("chunk", [1, 3, 5, 17, 64])
def test_chunks_change_nothing(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that no chunk divides, padding inside a row, documents that come again: as written out, gradients too."""
    monkeypatch.setattr(sys.modules["clearhead.functional.linear_attention"], "CHUNK", chunk)
    monkeypatch.setattr(sys.modules["clearhead.configs.linear_attention"], "FAVOR_CHUNK", 1 << (chunk.bit_length() - 1))
    model, tokens = fresh(sequence(block(MIXERS[name]), repeats=1)), ids(3, 17)
    readable = torch.ones(3, 17, dtype=torch.bool)
    readable[0, 4:7] = readable[1, :3] = readable[2, 11:] = False
    documents = torch.tensor([[0] * 6 + [1] * 2 + [4] * 9, [2] * 9 + [1] * 8, [0, 1] * 8 + [0]])
    for options in (
        {},
        {"readable": readable},
        {"documents": documents},
        {"readable": readable, "documents": documents},
    ):
        fast, written = (model(tokens, fused=fused, **options) for fused in (True, False))
        close(fast, written)
        aim = torch.randn(fast.shape, generator=torch.Generator().manual_seed(2)).double()
        parameters = list(model.parameters())
        steep, plain = (torch.autograd.grad((out * aim).sum(), parameters) for out in (fast, written))
        for one, other in zip(steep, plain, strict=True):
            close(one, other)


@pytest.mark.parametrize("name", CAUSAL)
def test_no_later_key_has_a_say(name: str) -> None:
    """Not even in rounding: a later key of any size leaves every bit of what is before it."""
    config = MIXERS[name]
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, config.heads, 300, n) for n in (*[config.widths(20)[0]] * 2, config.widths(20)[1]))
    kernel, rows = build_part(config.kernel, config.widths(20)[0]), DenseRows((2, 300), None, None)
    louder = k.clone()
    louder[:, :, 140:] *= 60
    outs = [kernel.mix_causal(kernel(q), kernel(keys), v, rows, None) for keys in (k, louder)]
    assert torch.equal(outs[0][:, :, :140], outs[1][:, :, :140])
    assert not torch.equal(outs[0][:, :, 140:], outs[1][:, :, 140:])


def test_large_keys_neither_overflow_nor_vanish() -> None:
    """Keys whose features would be beyond the smallest or the largest float, alone or beside others."""
    features = build_part(FavorConfig(features=32), 16)
    torch.manual_seed(0)
    for size in (0.01, 1.0, 30.0, 1000.0):
        q, k, v = torch.randn(1, 1, 40, 16), size * torch.randn(1, 1, 40, 16), torch.rand(1, 1, 40, 3)
        out = favor(features, q, k, v)
        assert out.isfinite().all()
        assert (out > v.min() - 1e-3).all(), "a mean of values, not zero"
        assert (out < v.max() + 1e-3).all()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("size", [1.0, 16.0, 65.0, 400.0])
def test_no_query_is_lost_however_long_q_and_k_are(size: float, causal: bool) -> None:
    """In float32, features of long vectors underflow; the outputs are still those of float64 and its definition."""
    features = build_part(FavorConfig(features=32), 16)
    torch.manual_seed(0)
    q, k = (size * torch.nn.functional.normalize(torch.randn(2, 2, 400, 16), dim=-1) for _ in range(2))
    v = torch.rand(2, 2, 400, 3) + 1
    exact = [features(x.double()) for x in (q, k)]
    allowed = torch.ones(400, 400, dtype=torch.bool).tril()[None, None] if causal else None
    want = features.weights(*exact, allowed) @ v.double()
    out = favor(features, q, k, v, causal)
    assert (out >= 1 - 1e-3).all(), "a mean of values, not zero"
    close(out.double(), want, atol=1e-2, rtol=1e-2)  # exponents of up to 10⁴ have few digits left in float32
    close(favor(features, q.double(), k.double(), v.double(), causal), want)


def favor(features: nn.Module, q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    rows = DenseRows((len(q), q.shape[2]), None, None)
    log_q, log_k = features(q), features(k)
    return features.mix_causal(log_q, log_k, v, rows, None) if causal else features.mix(log_q, log_k, v, rows)


def test_a_loud_document_does_not_silence_the_next() -> None:
    """Each document has its own stabilisers: the quiet one reads as it reads alone, in float32 too."""
    mixer = build_part(LinearAttentionConfig(heads=2, mask=Causal(), kernel=FavorConfig(features=32)), 16)
    torch.manual_seed(0)
    x, positions = torch.randn(1, 400, 16), torch.arange(400)[None]
    x[:, :100] *= 1000
    documents = (torch.arange(400) >= 100).long()[None]
    both = mixer(x, Context(positions, positions, documents=documents))
    alone = mixer(x[:, 100:], Context(positions[:, :300], positions[:, :300]))
    close(both[:, 100:], alone, atol=1e-5, rtol=1e-5)


def test_redrawing_changes_the_features_and_the_config(tmp_path: Path) -> None:
    model, tokens = clearhead.build(sequence(block(MIXERS["performer"]))), ids(2, 9)
    parameters = [p.clone() for p in model.parameters()]
    with torch.no_grad():
        before = model(tokens)
        redraw(model, 11)
        after = model(tokens)
        model.save(tmp_path)
        again = clearhead.load(tmp_path)(tokens)
        assert not torch.allclose(before, after)
        assert torch.equal(again, after)
        redraw(model, 0)
        assert torch.equal(model(tokens), before)
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), parameters, strict=True))
    assert model.config.stack.pattern[0].mixer.kernel == FavorConfig(features=7)


@pytest.mark.parametrize("length", [1, 100, 128, 300])
@pytest.mark.parametrize("name", ["linear", "linear, full", "performer, value_dim", "performer, full"])
def test_flops_are_what_the_fast_path_does(name: str, length: int) -> None:
    config = sequence(block(MIXERS[name]), repeats=1)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        clearhead.build(config)(ids(2, length))
    assert cost(config, batch=2, length=length).flops.forward == counter.get_total_flops()


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Favor\.features is 0, but must be positive"):
        FavorConfig(features=0)
    with pytest.raises(ConfigError, match=r"must be Full\(\) or Causal\(\): sums over keys cannot leave out some"):
        LinearAttentionConfig(heads=2, mask=Causal() & Window(3))
    with as_in_production(), pytest.raises(ValueError, match=r"takes q .* not q \(3, 2\), k \(4, 2\), v \(5, 2\)"):
        linear_attention(torch.ones(3, 2), torch.ones(4, 2), torch.ones(5, 2), causal=True)


def test_an_empty_context_is_fine() -> None:
    layer = build_part(MIXERS["linear, full"], 20)
    none = torch.zeros(2, 0, dtype=torch.long)
    assert layer(torch.zeros(2, 0, 20), Context(none, none)).shape == (2, 0, 20)
