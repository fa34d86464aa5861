"""Sparse attention: a window against dense attention, growth with the length, Longformer and BigBird layers."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.configs import AttentionConfig, Blockwise, Full, Global, LongformerConfig, Mask, Window
from clearhead.configs.masks import Span
from clearhead.functional.blocked import sparse_attention
from clearhead.kernels.malloc import keep_memory
from clearhead.nn.attention import MultiHeadAttention
from clearhead.nn.context import Context
from clearhead.nn.longformer import Longformer

from .turns import report, take_turns

HEADS, WIDTH, BLOCK = 8, 64, 64


@dataclass(frozen=True)
class Drawn(Mask):
    """A mask of one's own: a table of pairs, a byte for each."""

    pairs: bytes
    side: int

    def __call__(self, i: np.ndarray, j: np.ndarray) -> np.ndarray:
        return np.frombuffer(self.pairs, bool)[i * self.side + j]

    def over(self, i: Span, j: Span) -> tuple[np.ndarray, np.ndarray]:
        one = (i[0] == i[1]) & (j[0] == j[1])
        return ~one | self(i[0], j[0]), one & self(i[0], j[0])


def bigbird(side: int) -> Drawn:
    """As many blocks as transformers reads: the near three, the first, the last, and three of the others, drawn."""
    blocks, rng = np.arange(side), np.random.default_rng(0)
    table = (Window(2) | Global(1))(blocks[:, None], blocks)
    table[-1] = table[:, -1] = True
    for row in table[1:-1]:
        row[rng.choice(np.flatnonzero(~row), 3, replace=False)] = True
    return Drawn(table.tobytes(), side)


PATTERNS: dict[str, Callable[[int], Mask]] = {
    "Window(257)": lambda n: Window(257),
    "Longformer, w 512": lambda n: Window(257) | Global(1),
    "BigBird, block 64, 3 random": lambda n: Blockwise(BLOCK, bigbird(n // BLOCK)),
}
PEAK = """
import torch
from clearhead.configs import Window
from clearhead.functional.blocked import sparse_attention
from benchmarks.turns import peak
q, k, v = (torch.randn(1, 8, n, 64, requires_grad=True) for n in [16384] * 3)
small = [x[:, :, :600].detach().requires_grad_() for x in (q, k, v)]
sparse_attention(*small, Window(257)).sum().backward()
before = peak()
sparse_attention(q, k, v, Window(257)).sum().backward()
print(f"{(peak() - before) / 2**20:.0f}")
"""


def main() -> None:
    keep_memory()  # as the trainer does, for all contestants
    window()
    growth()
    layers()


def window(length: int = 16384) -> None:
    q, k, v = inputs(length)
    seconds = take_turns(
        {
            "clearhead, Window(257)": lambda: step(lambda: sparse_attention(q, k, v, Window(257)), q, k, v),
            "dense scaled_dot_product_attention": lambda: step(
                lambda: F.scaled_dot_product_attention(q, k, v), q, k, v
            ),
        },
        rounds=5,
    )
    title = f"Window(257) of {length:,} tokens, {HEADS} heads of {WIDTH}, not causal, forward and backward"
    report(title, seconds, "clearhead, Window(257)")
    peak = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True).stdout
    matrix = HEADS * length**2 * 4 / 2**20
    print(f"  peak extra memory {peak.strip()} MiB; the score matrix alone takes {matrix:,.0f} MiB")


def growth(lengths: tuple[int, ...] = (2048, 4096, 8192, 16384, 32768)) -> None:
    print("growth of forward and backward from 2,048 to 32,768 tokens")
    for name, pattern in PATTERNS.items():
        seconds = [quickest(*inputs(length), pattern(length)) for length in lengths]
        logs = [math.log(n) for n in lengths], [math.log(s) for s in seconds]
        centre = [sum(part) / len(part) for part in logs]
        slope = sum((x - centre[0]) * (y - centre[1]) for x, y in zip(*logs, strict=True))
        slope /= sum((x - centre[0]) ** 2 for x in logs[0])
        times = ", ".join(f"{taken * 1e3:.0f}" for taken in seconds)
        print(f"  {name:<36} {times} ms: time grows as n^{slope:.2f}")


def quickest(q: Tensor, k: Tensor, v: Tensor, mask: Mask, rounds: int = 4) -> float:
    """Seconds of the fastest of a few runs, with the plan of the mask made beforehand."""
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        step(lambda: sparse_attention(q, k, v, mask), q, k, v)
        taken.append(time.perf_counter() - start)
    return min(taken)


def layers(length: int = 4096, dim: int = 512) -> None:
    import transformers
    from transformers.models.big_bird.modeling_big_bird import BigBirdBlockSparseAttention, BigBirdModel
    from transformers.models.longformer.modeling_longformer import LongformerSelfAttention

    x = torch.randn(1, length, dim)
    sizes: dict[str, Any] = {"hidden_size": dim, "num_attention_heads": HEADS, "attention_probs_dropout_prob": 0.0}
    longformer = LongformerSelfAttention(transformers.LongformerConfig(attention_window=[512], **sizes), 0)
    kind = torch.zeros(1, length).index_fill(1, torch.tensor([0]), 10000.0)
    bird_config = transformers.BigBirdConfig(block_size=BLOCK, num_random_blocks=3, **sizes)
    bird = BigBirdBlockSparseAttention(bird_config, seed=0).train()
    masks = BigBirdModel.create_masks_for_block_sparse_attn(torch.ones(1, length), BLOCK)
    dense = layer(MultiHeadAttention(AttentionConfig(heads=HEADS, mask=Full(), qkv_bias=True), dim))
    both = {
        "Longformer, w 512, one global token": {
            "clearhead": layer(Longformer(LongformerConfig(heads=HEADS, window=257, tokens=1, qkv_bias=True), dim)),
            "transformers": lambda x: longformer(x, kind, kind < 0, kind > 0, True)[0],
            "dense": dense,
        },
        "BigBird, block 64, 3 random blocks": {
            "clearhead": layer(
                MultiHeadAttention(
                    AttentionConfig(heads=HEADS, mask=PATTERNS["BigBird, block 64, 3 random"](length), qkv_bias=True),
                    dim,
                )
            ),
            "transformers": lambda x: bird(x, masks[1], masks[2], masks[3], masks[0], masks[0])[0],
            "dense": dense,
        },
    }
    for name, contestants in both.items():
        with torch.no_grad():
            forward = take_turns({who: lambda run=run: run(x) for who, run in contestants.items()}, rounds=5)
        report(f"{name}, layer of {length:,} × {dim}: forward", forward, "clearhead")
        steps = {who: backward(run, x) for who, run in contestants.items()}
        report(f"{name}: forward and backward", take_turns(steps, rounds=5), "clearhead")


def backward(run: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], None]:
    leaf = x.clone().requires_grad_()
    return lambda: step(lambda: run(leaf), leaf)


def layer(module: nn.Module) -> Callable[[Tensor], Tensor]:
    def run(x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1])[None]
        return module(x, Context(positions, positions, aligned=True))

    return run


def inputs(length: int) -> list[Tensor]:
    return [torch.randn(1, HEADS, length, WIDTH, requires_grad=True) for _ in range(3)]


def step(run: Callable[[], Tensor], *leaves: Tensor) -> None:
    run().sum().backward()
    for leaf in leaves:
        leaf.grad = None


if __name__ == "__main__":
    main()
