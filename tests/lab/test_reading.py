"""Scores, lookups and orders, against direct transcriptions and known facts."""

from __future__ import annotations

import math

import pytest
import torch

from clearhead.lab.dictionary import dictionary
from clearhead.lab.permutation import permutation, random_order
from clearhead.lab.scores import jacobian_norm, scores


def test_the_variance_of_a_product_is_its_width() -> None:
    found = scores(widths=(3, 50), draws=4000)
    for width, plain, scaled in zip(*map(found.column, ("d_k", "var q·k", "var scaled")), strict=True):
        assert plain == pytest.approx(width, rel=0.08)
        assert scaled == pytest.approx(plain / width, rel=1e-4)
    assert found.column("scaled q·q")[1] == pytest.approx(math.sqrt(50), rel=0.05)


def test_the_norm_of_the_jacobian_is_that_of_the_matrix_autograd_gives() -> None:
    x = torch.randn(7, dtype=torch.float64) * 3
    matrix = torch.autograd.functional.jacobian(lambda s: s.softmax(-1), x)
    assert float(jacobian_norm(x.softmax(-1))) == pytest.approx(float(torch.linalg.matrix_norm(matrix)), rel=1e-12)


def test_a_cold_lookup_is_the_best_value_to_the_bit_and_never_beyond_its_bound() -> None:
    found = dictionary(temperatures=(1.0, 1e-9), draws=16)
    assert found.column("exact") == [0.0, 1.0]
    assert found.column("largest error")[1] == 0
    assert all(
        error <= bound for error, bound in zip(found.column("largest error"), found.column("bound"), strict=True)
    )
    assert found.more["tie_error"] < 1e-15


def test_only_attention_that_is_told_no_order_is_equivariant() -> None:
    drawn = {tuple(random_order(3).tolist()) for _ in range(99)}
    assert drawn == {(0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1)}, "neither the same order nor its reverse"
    found = permutation(length=7, dim=16, heads=2, draws=2)
    kept = {
        name for name, each in zip(found.column("model"), found.column("equivariant"), strict=True) if each == "yes"
    }
    assert kept == {"attention alone", "linear attention alone"}
    for name, each, pooled, _ in found.rows:
        assert (each < 1e-12) == (name in kept)
        assert (pooled < 1e-12) == (name in kept)
