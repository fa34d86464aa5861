"""The selective scan: chunks change nothing, its own backward is right, and what it remembers does not grow."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import clearhead
from clearhead.configs import Scope
from clearhead.functional import mamba
from clearhead.models.presets import preset
from clearhead.nn.context import Context
from clearhead.nn.packing import dense_rows

from .cases import MIXERS, block, sequence
from .tools import close, fresh, ids


def numbers(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("name", ["mamba", "mamba, narrow"])
@pytest.mark.parametrize("chunk", [1, 3, 5, 16])
def test_chunks_change_nothing(name: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths that no chunk divides, padding inside a row, documents that come again: as written out, gradients too."""
    monkeypatch.setattr(mamba, "chunk_size", lambda start, length: chunk)
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
        aim, parameters = numbers(*fast.shape), list(model.parameters())
        steep, plain = (torch.autograd.grad((out * aim).sum(), parameters) for out in (fast, written))
        for one, other in zip(steep, plain, strict=True):
            close(one, other)


def test_the_scan_is_as_wide_under_autocast() -> None:
    """float16 stands for bfloat16, which some machines cannot multiply."""
    mixer = fresh(sequence(block(MIXERS["mamba"]), repeats=1), torch.float32).stack.blocks[0].mixer
    inner, state = mixer.filter.shape[1], len(mixer.decay)
    conv, step, write, read = (numbers(2, 9, width).float() for width in (inner, inner, state, state))
    positions = torch.arange(9)[None]
    row = dense_rows(Context(positions, positions), 2)
    for written_out in (True, False):
        plain = mixer.scan(conv, step.abs(), write, read, row, None, written_out)
        with torch.autocast("cpu", torch.float16):
            assert torch.equal(mixer.scan(conv, step.abs(), write, read, row, None, written_out), plain)


def test_the_backward_is_what_differences_say() -> None:
    x, write, read = numbers(2, 9, 3), numbers(2, 9, 4, seed=2), numbers(2, 9, 4, seed=3)
    step, decay = F.softplus(numbers(2, 9, 3, seed=4)), -numbers(4, 3, seed=5).exp()
    arguments = [value.requires_grad_() for value in (x, step, decay, write, read)]
    assert torch.autograd.gradcheck(mamba.selective_scan, arguments)


def test_a_memory_as_large_for_a_long_text_as_for_a_short_one() -> None:
    config = preset("mamba-130m")
    short, long = (config.state(Scope({"B": 1, "S": length})) for length in (10, 1_000_000))
    assert short == long
    assert sum(map(math.prod, short.values())) == 24 * 1536 * (16 + 3)


def test_it_starts_as_its_authors_start_it() -> None:
    """A = −1 … −Z in every channel, Δ between 0.001 and 0.1 where nothing is read, and skip 1."""
    mixer = clearhead.build(preset("tiny-mamba")).stack.blocks[0].mixer
    close(-mixer.decay.exp(), -torch.arange(1.0, 17)[:, None].expand(16, 64), atol=1e-5, rtol=1e-5)
    step = F.softplus(mixer.step.bias)
    assert 1e-3 <= step.min() < 5e-3 < 3e-2 < step.max() <= 0.1
    assert (mixer.skip == 1).all()
