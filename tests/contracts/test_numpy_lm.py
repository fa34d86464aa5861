"""The example that trains in NumPy alone: its gradients are autograd's, and its loss falls."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from .adapters import as_in_production, close

PATH = Path(__file__).parents[2] / "examples" / "numpy_lm.py"
spec = importlib.util.spec_from_file_location("numpy_lm", PATH)
assert spec is not None
assert spec.loader is not None
numpy_lm = importlib.util.module_from_spec(spec)
spec.loader.exec_module(numpy_lm)

VOCABULARY, DIM, HIDDEN, LAYERS, HEADS, B, T = 13, 12, 23, 2, 3, 2, 7


def torch_loss(w: dict[str, torch.Tensor], tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The same model by torch's own functions, with rotary written in complex numbers."""
    K = DIM // HEADS

    def heads(x):
        return x.view(B, T, HEADS, K).transpose(1, 2)

    def turn(x):
        angles = torch.arange(T).double()[:, None] * 10000.0 ** (-torch.arange(0, K, 2).double() / K)
        turned = torch.complex(x[..., : K // 2], x[..., K // 2 :]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag), -1)

    x = F.embedding(tokens, w["embedding"])
    for i in range(LAYERS):
        h = F.layer_norm(x, (DIM,), w[f"{i}.attention_norm.weight"], w[f"{i}.attention_norm.bias"])
        q, k, v = (heads(F.linear(h, w[f"{i}.{name}"])) for name in ("query", "key", "value"))
        mixed = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        x = x + F.linear(mixed.transpose(1, 2).reshape(B, T, DIM), w[f"{i}.out"])
        h = F.layer_norm(x, (DIM,), w[f"{i}.ffn_norm.weight"], w[f"{i}.ffn_norm.bias"])
        h = F.gelu(F.linear(h, w[f"{i}.up"], w[f"{i}.up_bias"]), approximate="tanh")
        x = x + F.linear(h, w[f"{i}.down"], w[f"{i}.down_bias"])
    x = F.layer_norm(x, (DIM,), w["norm.weight"], w["norm.bias"])
    return F.cross_entropy(F.linear(x, w["embedding"]).flatten(0, 1), targets.flatten())


def test_gradients_are_autograds():
    rng = np.random.default_rng(0)
    weights = numpy_lm.initial_weights(VOCABULARY, DIM, HIDDEN, LAYERS, rng)
    weights = {name: w + rng.normal(0, 0.3, w.shape) for name, w in weights.items()}  # away from zeros and ones
    tokens, targets = rng.integers(0, VOCABULARY, (2, B, T))
    loss, gradients = numpy_lm.loss_and_gradients(weights, tokens, targets, HEADS)
    leaves = {name: torch.from_numpy(w.copy()).requires_grad_() for name, w in weights.items()}
    expected = torch_loss(leaves, torch.from_numpy(tokens), torch.from_numpy(targets))
    expected.backward()
    close(loss, expected.item())
    assert gradients.keys() == weights.keys()
    for name, gradient in gradients.items():
        close(gradient, leaves[name].grad.numpy())


def test_adam_is_torchs():
    weights = {"w": np.random.default_rng(0).normal(size=(5, 3))}
    theirs = torch.from_numpy(weights["w"].copy()).requires_grad_()
    ours, adam = numpy_lm.Adam(weights), torch.optim.Adam([theirs], lr=0.1, betas=(0.9, 0.99))
    for step in range(1, 6):
        gradient = np.random.default_rng(step).normal(size=(5, 3))
        ours.step(weights, {"w": gradient}, step, 0.1)
        theirs.grad = torch.from_numpy(gradient)
        adam.step()
    close(weights["w"], theirs.detach().numpy())


def test_the_loss_falls_from_that_of_a_guess(capsys):
    with as_in_production():
        losses = numpy_lm.main(steps=40, seed=1)
    letters = len(set(numpy_lm.zen()))
    assert abs(losses[0] - np.log(letters)) < 0.2
    assert np.mean(losses[-5:]) < 2.6
    assert "Beautiful" in capsys.readouterr().out


def test_one_seed_gives_one_run_and_another_seed_another():
    with as_in_production():
        first, again, other = (numpy_lm.main(steps=3, seed=seed) for seed in (1, 1, 2))
    assert first == again != other


def test_it_needs_no_torch():
    code = f"import sys, runpy; runpy.run_path({str(PATH)!r})['main'](steps=1); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.endswith("False\n")
