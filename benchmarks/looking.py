"""What it takes to look at every head of a GPT-2 over 2,048 tokens: thumbnails, tags, and the page."""

from __future__ import annotations

import torch

import clearhead
from clearhead.inspect.look import inspect

from .turns import report, take_turns

LENGTH = 2048


def main() -> None:
    torch.manual_seed(0)
    config = clearhead.preset("gpt2").changed("embedding.position.length", LENGTH)
    model = clearhead.build(config).eval()
    tokens = torch.randint(0, 50257, (1, LENGTH))

    @torch.inference_mode()
    def forward() -> None:
        model(tokens)

    @torch.inference_mode()
    def thumbnails() -> None:
        for map in inspect(model, tokens).maps:
            assert map.thumbnails.shape == (12, 128, 128)

    seconds = take_turns({"forward": forward, "forward, thumbnails and tags": thumbnails}, rounds=3)
    report(f"GPT-2, 12 layers × 12 heads, {LENGTH:,} tokens", seconds, "forward")
    size = len(inspect(model, tokens).html().encode())
    print(f"  the page is {size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
