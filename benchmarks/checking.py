"""How long a full check of one file takes once torch is loaded. Goal: below 2 s, and below 0.5 s for NumPy."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch

import clearhead

from .turns import take_turns

FILES = {
    "numpy": """
import numpy as np

def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)

def causal_mask(n):
    return np.tril(np.ones((n, n), dtype=bool))

def layer_norm(x, gamma, beta, eps=1e-5):
    return gamma * (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + eps) + beta
""",
    "torch": """
import torch
from torch import nn

class MultiHeadAttention(nn.Module):
    def __init__(self, d_model, num_heads):
        super().__init__()
        self.h, self.d = num_heads, d_model // num_heads
        self.q, self.k, self.v, self.o = (nn.Linear(d_model, d_model) for _ in range(4))

    def forward(self, x):
        B, T, D = x.shape
        q, k, v = (f(x).view(B, T, self.h, self.d).transpose(1, 2) for f in (self.q, self.k, self.v))
        weights = torch.softmax(q @ k.transpose(-2, -1) / self.d**0.5, -1)
        return self.o((weights @ v).transpose(1, 2).reshape(B, T, D))
""",
}


def main() -> None:
    assert torch.__version__  # loaded before the clock starts
    with tempfile.TemporaryDirectory() as folder:
        for name, text in FILES.items():
            path = Path(folder, f"{name}.py")
            path.write_text(text)
            report = clearhead.check(str(path))
            seconds = take_turns({name: lambda path=path: clearhead.check(str(path))}, rounds=5)
            print(f"{name}: {seconds[name]:.2f} s for {len(text.splitlines())} lines, right: {report.ok}")


if __name__ == "__main__":
    main()
