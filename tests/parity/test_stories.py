"""A real trained checkpoint: the same logits as `transformers`, and the story word for word."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import clearhead
from benchmarks import long_context
from clearhead.configs import DualChunkConfig, RotaryConfig

SHARED = Path(os.environ.get("CLEARHEAD_SHARED", Path(__file__).parents[3] / "shared"))
STORIES = SHARED / "models/stories15M"
pytestmark = pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is not there; set CLEARHEAD_SHARED")
STORY = (
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the sunshine. "
    "One day, she saw a big, red ball in the sky. It was the sun!"
)


def test_the_story_comes_out_word_for_word() -> None:
    (written,) = clearhead.load(STORIES).generate("", max_new_tokens=60)
    assert written.text.startswith(STORY)


def test_dual_chunks_read_four_times_the_trained_length_as_well() -> None:
    """The same story after 128 other tokens, within the trained length of 256, and after 896."""
    model = clearhead.load(STORIES).eval()
    names, things = ("Tom", "Anna", "Max", "Sue", "Ben", "Mia", "Sam"), ("dog", "car", "kite", "bird", "tree", "hat")
    other = " ".join(f"{name} had a {thing}. {name} was very happy." for thing in things for name in names)
    tokenizer = model.tokenizer
    before, story = (torch.tensor([long_context.BEGIN, *tokenizer.encode(text)]) for text in (other * 3, STORY))

    def loss(rotary: RotaryConfig | DualChunkConfig, length: int) -> float:
        text = torch.cat((before[:length], story))[None]
        return long_context.losses(long_context.with_rotary(model, rotary), text)[0, length:].mean().item()

    near, dual = loss(RotaryConfig(), 128), DualChunkConfig(chunk=128, length=256)
    assert len(before) > 896
    assert loss(dual, 896) - near < 0.15
    assert loss(RotaryConfig(), 896) - near > 1


def test_logits_equal_transformers_and_the_numpy_engine() -> None:
    transformers = pytest.importorskip("transformers")
    model = clearhead.load(STORIES)
    tokens = torch.randint(3, 32000, (2, 64), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        ours = model(tokens)
        theirs = transformers.LlamaForCausalLM.from_pretrained(STORIES)(tokens).logits
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    weights = {name: weight.numpy() for name, weight in model.state_dict().items()}
    again = clearhead.reference.run(model.config, weights, tokens.numpy())
    torch.testing.assert_close(torch.from_numpy(again), theirs, atol=1e-3, rtol=1e-3)
