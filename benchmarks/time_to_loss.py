"""Tiny Shakespeare by characters: our `chars` recipe, whole and in a short form, against nanoGPT's CPU recipe, in turn.

The baseline is a GPT-2 block written out as nanoGPT has it: 4 layers, 4 heads, d 128, context 64, batch 12, 2,000
steps, AdamW with β2 0.99, lr 1e-3 with 100 steps of warm-up and a cosine to 1e-4, no dropout, no biases. Both are
scored on every character of the whole validation split, each predicted from up to its model's own context.
"""

from __future__ import annotations

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from clearhead.configs.train import RecipeConfig
from clearhead.data import Shards, build, documents, split, windows
from clearhead.tokenize import Tokenizer, make
from clearhead.training.loop import Callbacks, Trainer
from clearhead.training.recipes import chars
from clearhead.training.text import NextToken, to_torch

SHARED = Path(os.environ.get("CLEARHEAD_SHARED", Path(__file__).parents[2] / "shared"))
TEXT = SHARED / "data/tinyshakespeare/input.txt"


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(dim, bias=False), nn.LayerNorm(dim, bias=False)
        self.attn, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.attn(self.ln_1(x)).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.proj(mixed)
        return x + self.down(F.gelu(self.up(self.ln_2(x))))


class Baseline(nn.Module):
    def __init__(self, vocabulary: int, dim: int = 128, layers: int = 4, heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, dim), nn.Embedding(context, dim)
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(dim, bias=False)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                scaled = name.endswith(("proj.weight", "down.weight"))
                nn.init.normal_(p, std=0.02 / math.sqrt(2 * layers) if scaled else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return F.linear(self.norm(self.blocks(x)), self.tokens.weight)


def train_baseline(model: Baseline, training: Shards, steps: int = 2000, batch: int = 12, context: int = 64) -> float:
    """Seconds of training, nothing else counted."""
    data = torch.from_numpy(training.tokens(0, len(training)).astype("int64"))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))
    begun = time.perf_counter()
    for step in range(steps):
        share = (step - 100) / (steps - 100)
        lr = 1e-3 * (step + 1) / 101 if step < 100 else 1e-4 + 0.5 * (1 + math.cos(math.pi * share)) * 9e-4
        for group in optimizer.param_groups:
            group["lr"] = lr
        at = torch.randint(len(data) - context, (batch,))
        x = torch.stack([data[i : i + context] for i in at])
        y = torch.stack([data[i + 1 : i + 1 + context] for i in at])
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return time.perf_counter() - begun


@torch.inference_mode()
def score(model: nn.Module, validation: Shards, context: int) -> float:
    """The mean loss over every character of the validation split but its first."""
    model.eval()
    total, count = 0.0, 0
    for window in windows(validation, context, batch=128):
        batch = to_torch(window)
        logits = model(batch.inputs).flatten(0, 1)
        total += F.cross_entropy(logits, batch.targets.flatten(), ignore_index=-100, reduction="sum").item()
        count += int((batch.targets != -100).sum())
    model.train()
    assert count == len(validation) - 1
    return total / count


class Silent:
    """A run without a folder: the benchmark times training alone, as it does for the baseline."""

    def log(self, **numbers: float) -> None: ...


def train_ours(recipe: RecipeConfig, tokenizer: Tokenizer, data: tuple[Shards, Shards]) -> tuple[nn.Module, float]:
    """The product's own trainer, step by step, from making model and optimizer to the last step."""
    task = NextToken(recipe, tokenizer, *data)
    begun = time.perf_counter()
    trainer = Trainer(recipe, task, Silent(), Callbacks())  # type: ignore[arg-type]
    trainer.objective.train()
    while trainer.step < recipe.steps:
        trainer.train_step()
    return trainer.model, time.perf_counter() - begun


def main() -> None:
    import tempfile

    if not TEXT.exists():
        print(f"skipped: {TEXT} is not there; set CLEARHEAD_SHARED")
        return
    with tempfile.TemporaryDirectory() as folder:
        corpus = documents([TEXT])
        training, validation = split(corpus, 0.1)
        tokenizer = make(chars().task.tokenizer, corpus.texts())
        data = build(training, tokenizer, Path(folder, "t")), build(validation, tokenizer, Path(folder, "v"))
        torch.manual_seed(1337)
        baseline = Baseline(tokenizer.vocabulary)
        seconds = train_baseline(baseline, data[0])
        loss = score(baseline, data[1], 64)
        size = sum(p.numel() for p in baseline.parameters())
        print(f"baseline: {size:,} parameters, {seconds:.1f} s, validation loss {loss:.4f}")
        long = chars()
        stack = replace(long.model.stack, dim=112, pattern=long.model.stack.pattern[:2])
        short = replace(long, batch=16, steps=225, model=replace(long.model, stack=stack))
        short = short.with_value("task.context", 64).with_value("optimizer.lr", 0.04)
        for name, recipe in (("short", short), ("long", long)):
            model, taken = train_ours(recipe, tokenizer, data)
            ours = score(model, data[1], recipe.task.context)
            size = sum(p.numel() for p in model.parameters())
            print(
                f"clearhead, {name}: {size:,} parameters, {recipe.steps} × {recipe.batch} × {recipe.task.context}, "
                f"{taken:.1f} s = 1/{seconds / taken:.1f} of the baseline's time, validation loss {ours:.4f}"
            )


if __name__ == "__main__":
    main()
