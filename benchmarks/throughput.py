"""A training step of 6 layers, d 384, 6 heads, 16 × 256 tokens, float32: our trainer beside nanoGPT-style code.

The peer is a GPT-2 of the same size, compiled by torch.compile, with AdamW as nanoGPT sets it up. Small and large
vocabularies; the peak memory of each is measured in a process of its own.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from .time_to_loss import Baseline
from .turns import peak, report, take_turns

LAYERS, DIM, HEADS, CONTEXT, BATCH = 6, 384, 6, 256, 16
VOCABULARIES = (65, 32768)
Step = Callable[[], object]


def peer(vocabulary: int) -> Step:
    """As nanoGPT has it: the compiled model gives logits and loss, AdamW as torch sets it up on this device."""
    model = Baseline(vocabulary, DIM, LAYERS, HEADS, CONTEXT)
    data = torch.randint(0, vocabulary, (200_000,))
    groups = [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.99))

    def answer(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = model(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), y.flatten())

    forward = torch.compile(answer)

    def step() -> None:
        at = torch.randint(len(data) - CONTEXT, (BATCH,))
        x = torch.stack([data[i : i + CONTEXT] for i in at])
        y = torch.stack([data[i + 1 : i + 1 + CONTEXT] for i in at])
        _, loss = forward(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def ours(vocabulary: int) -> Step:
    """Our GPT of the same size in our trainer, with the same optimizer."""
    from clearhead import configs as c
    from clearhead.configs.data import BytePairConfig
    from clearhead.configs.train import AdamWConfig, NextTokenConfig, RecipeConfig
    from clearhead.training.loop import Callbacks, Trainer
    from clearhead.training.text import NextToken

    norm = c.LayerNormConfig(bias=False)
    ffn = c.FeedForwardConfig(activation="gelu", bias=False)
    block = c.BlockConfig(mixer=c.AttentionConfig(heads=HEADS, mask=c.Causal()), ffn=ffn, norm=norm)
    recipe = RecipeConfig(
        model=c.SequenceModelConfig(
            embedding=c.TokenEmbeddingConfig(vocabulary=vocabulary, position=c.LearnedConfig(length=CONTEXT)),
            stack=c.StackConfig(dim=DIM, pattern=(block,), repeats=LAYERS, final_norm=norm),
            head=c.LMHeadConfig(vocabulary=vocabulary, tied=True),
        ),
        task=NextTokenConfig(tokenizer=BytePairConfig(), context=CONTEXT),
        optimizer=AdamWConfig(lr=1e-3, beta2=0.99),
        batch=BATCH,
        steps=10**6,
    )
    trainer = Trainer(recipe, NextToken(recipe, *tokens(vocabulary)), None, Callbacks())  # type: ignore[arg-type]
    trainer.objective.train()
    return trainer.train_step


def tokens(vocabulary: int) -> tuple:
    """A stand-in for a tokenizer of that size, and random tokens as shards."""
    import tokenizers

    from clearhead.data.build import build
    from clearhead.data.corpus import Corpus, Document
    from clearhead.tokenize import Tokenizer

    letters = {chr(0x4E00 + i): i for i in range(vocabulary)}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(letters, []))
    drawn = np.random.default_rng(0).integers(0, vocabulary, 200_000)
    text = "".join(chr(0x4E00 + int(i)) for i in drawn)
    tokenizer = Tokenizer(inner)
    corpus = Corpus(lambda: iter([Document("random", ((text, True),))]), "random tokens")
    folder = Path(tempfile.mkdtemp())
    return tokenizer, build(corpus, tokenizer, folder / "a"), build(corpus, tokenizer, folder / "b")


CONTESTANTS = {"clearhead": ours, "nanoGPT style, compiled": peer}


class Contestant:
    """A process of its own, which takes a step on request, so that contestants do not share memory or settings."""

    def __init__(self, name: str, vocabulary: int) -> None:
        code = f"from benchmarks.throughput import serve; serve({name!r}, {vocabulary})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def step(self) -> None:
        self.memory = float(self.ask("step"))

    def ask(self, what: str) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        return self.process.stdout.readline()


def serve(name: str, vocabulary: int) -> None:
    """A step for each line read; answers with the GiB that the process has needed beside torch itself."""
    torch.ones(512, 512) @ torch.ones(512, 512)
    before = peak()
    step = CONTESTANTS[name](vocabulary)
    for _ in sys.stdin:
        step()
        print((peak() - before) / 2**30, flush=True)


def main() -> None:
    for vocabulary in VOCABULARIES:
        contestants = {name: Contestant(name, vocabulary) for name in CONTESTANTS}
        for contestant in contestants.values():
            contestant.step()
        seconds = take_turns({name: contestant.step for name, contestant in contestants.items()}, rounds=7)
        report(f"training step, vocabulary {vocabulary:,}", seconds, "clearhead")
        for name, contestant in contestants.items():
            print(f"  {name:<36} {contestant.memory:9.2f} GiB at its peak")
            contestant.process.kill()


if __name__ == "__main__":
    main()
