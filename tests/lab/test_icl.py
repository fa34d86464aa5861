"""Gradient descent in attention, and the estimators beside it, against NumPy and each other."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clearhead.lab.icl import baselines, descend, descent_stack, icl, predict, ridge

WIDTH, EXAMPLES = 3, 7


def prompts(count: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, EXAMPLES + 1, WIDTH, generator=generator, dtype=torch.float64)
    y = torch.randn(count, EXAMPLES, generator=generator, dtype=torch.float64)
    return x[:, :-1], y, x[:, -1]


@pytest.mark.parametrize("steps", [1, 4])
def test_hand_set_layers_are_steps_of_gradient_descent_by_autograd(steps: int) -> None:
    """The gradient is autograd's, of the squared error written down; nothing of ours is in it."""
    x, y, question = prompts()
    weights = torch.zeros(len(x), WIDTH, dtype=torch.float64, requires_grad=True)
    for _ in range(steps):
        loss = ((x @ weights[..., None])[..., 0] - y).square().sum() / (2 * EXAMPLES)
        (slope,) = torch.autograd.grad(loss, weights)
        weights = (weights - 0.2 * slope).detach().requires_grad_()
    torch.testing.assert_close(descend(x, y, steps, 0.2), weights.detach(), rtol=0, atol=1e-13)
    for dtype, atol in ((torch.float64, 1e-13), (torch.float32, 1e-6)):
        stack = descent_stack(WIDTH, steps, EXAMPLES, 0.2, dtype)
        ours = predict(stack, x.to(dtype), y.to(dtype), question.to(dtype))
        wanted = (weights.detach() * question).sum(-1)
        torch.testing.assert_close(ours.double(), wanted, rtol=0, atol=atol)


def test_many_steps_come_to_least_squares() -> None:
    x, y, question = prompts(1)
    ours = predict(descent_stack(WIDTH, 400, EXAMPLES, 0.5), x, y, question)
    theirs = question[0].numpy() @ np.linalg.lstsq(x[0].numpy(), y[0].numpy(), rcond=None)[0]
    assert float(ours) == pytest.approx(float(theirs), abs=1e-9)


def test_ridge_is_least_squares_with_rows_for_the_penalty() -> None:
    x, y, _ = prompts()
    for row in range(len(x)):
        more = np.concatenate((x[row].numpy(), np.sqrt(0.3) * np.eye(WIDTH)))
        wanted = np.linalg.lstsq(more, np.concatenate((y[row].numpy(), np.zeros(WIDTH))), rcond=None)[0]
        np.testing.assert_allclose(ridge(x, y, 0.3)[row].numpy(), wanted, atol=1e-12)


def test_with_enough_examples_and_no_noise_everyone_but_few_steps_knows_the_weights() -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(256, 9, WIDTH, generator=generator, dtype=torch.float64)
    y = (x * torch.randn(256, 1, WIDTH, generator=generator, dtype=torch.float64)).sum(-1)
    found = baselines(x, y, 0.0, 3)
    assert found["least squares"][-1] < 1e-12
    assert found["ridge"][-1] < 1e-6
    assert found["least squares"][-1] < found["3 steps"][-1] < found["1 step"][-1] < found["1 step"][0]


def test_a_model_learns_from_its_prompt() -> None:
    found = icl(width=2, examples=6, steps=150, batch=32, dim=32, layers=1, noise=0.1)
    for name in ("Transformer of 1", "one linear layer"):
        errors = found.column(name)
        assert errors[-1] < 0.6 * errors[0]
    assert max(found.more["construction"].values()) < 1e-6
    assert min(found.column("ridge")) == min(min(row[1:]) for row in found.rows)
