"""What it takes to look at every head of a GPT-2 over 2,048 tokens: memory, time, and the size of the page."""

from __future__ import annotations

import torch

import clearhead
from clearhead.inspect.inspection import inspect

from .turns import peak, report, take_turns

LENGTH = 2048


def main() -> None:
    torch.manual_seed(0)
    config = clearhead.preset("gpt2").with_value("embedding.position.length", LENGTH)
    model = clearhead.build(config).eval()
    tokens = torch.randint(0, 50257, (1, LENGTH))

    @torch.inference_mode()
    def forward() -> None:
        model(tokens)

    @torch.inference_mode()
    def thumbnails() -> None:
        for map in inspect(model, tokens).maps:
            assert map.thumbnails.shape == (12, 128, 128)

    peaks = [peak()]
    for run in (forward, thumbnails):
        run()
        peaks.append(peak())
    seconds = take_turns({"forward": forward, "forward, thumbnails and tags": thumbnails}, rounds=3)
    report(f"GPT-2, 12 layers × 12 heads, {LENGTH:,} tokens", seconds, "forward")
    plain, looking = (after - peaks[0] for after in peaks[1:])
    print(f"  peak beside the model: forward {plain / 2**20:.0f} MiB, with thumbnails {looking / 2**20:.0f} MiB")
    print(f"  the page: {len(inspect(model, tokens).html().encode()) / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
