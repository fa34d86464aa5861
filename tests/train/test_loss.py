"""The loss by chunks of logits is the loss with all of them: value and every gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from clearhead.configs import LMHeadConfig
from clearhead.nn.build import build_part
from clearhead.nn.context import Context
from clearhead.training import loss as module
from clearhead.training.loss import head_loss, linear_cross_entropy


@pytest.mark.parametrize("chunk", [1, 29 * 3, 2**22])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("biased", [False, True])
def test_equals_torch(monkeypatch: pytest.MonkeyPatch, chunk: int, smoothing: float, biased: bool) -> None:
    monkeypatch.setattr(module, "CHUNK", chunk)
    torch.manual_seed(0)
    x, weight = torch.randn(3, 7, 11, requires_grad=True), torch.randn(29, 11, requires_grad=True)
    bias = torch.randn(29, requires_grad=True) if biased else None
    targets = torch.randint(0, 29, (3, 7))
    targets[0, 2:5] = -100
    inputs = [t for t in (x, weight, bias) if t is not None]
    ours = linear_cross_entropy(x, weight, targets, bias=bias, label_smoothing=smoothing)
    got = torch.autograd.grad(3 * ours, inputs)
    theirs = F.cross_entropy(F.linear(x, weight, bias).flatten(0, 1), targets.flatten(), label_smoothing=smoothing)
    torch.testing.assert_close(ours, theirs)
    for mine, wanted in zip(got, torch.autograd.grad(3 * theirs, inputs), strict=True):
        torch.testing.assert_close(mine, wanted, atol=1e-5, rtol=1e-5)


def test_no_gradient_is_worked_out_where_none_is_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, targets = torch.randn(3, 5), torch.nn.Parameter(torch.randn(7, 5)), torch.tensor([1, 2, 3])
    wanted = linear_cross_entropy(x, weight, targets)
    monkeypatch.setattr(module, "add_product", lambda *given: pytest.fail("a gradient was worked out"))
    with torch.no_grad():
        assert torch.equal(linear_cross_entropy(x, weight, targets), wanted)


def test_no_target_counts() -> None:
    x = torch.randn(2, 3, 5, requires_grad=True)
    loss = linear_cross_entropy(x, torch.randn(7, 5), torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0
    assert x.grad is not None
    assert x.grad.abs().sum() == 0


@pytest.mark.parametrize("more", [{"scale": 0.3}, {"softcap": 1.5}, {"bias": True, "scale": 2.5}, {"width": 4}])
def test_the_loss_of_a_head_is_that_of_its_logits(more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    head = build_part(LMHeadConfig(vocabulary=7, **more), 5)
    for weight in head.parameters():
        torch.nn.init.normal_(weight)
    x, targets, at = torch.randn(2, 3, 5), torch.tensor([[1, 6, -100], [0, 2, 5]]), torch.arange(3)[None]
    wanted = torch.nn.functional.cross_entropy(
        head(x, Context(at, at), None).flatten(0, 1), targets.flatten(), label_smoothing=0.1
    )
    torch.testing.assert_close(head_loss(head, x, None, targets, 0.1), wanted)
