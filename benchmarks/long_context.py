"""Four times the trained context without training: stories15M, trained at 256, over stories of its own joined to 1,024.

The loss at positions 768–1023 beside that at 128–255, with plain rotary positions and with Dual Chunk Attention.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import clearhead
from clearhead.configs import ConfigError, DualChunkConfig, NTKScaling, RotaryConfig, SequenceModelConfig
from clearhead.models.model import SequenceModel, build

SHARED = Path(os.environ.get("CLEARHEAD_SHARED", Path(__file__).parents[2] / "shared"))
FOLDER = SHARED / "models/stories15M"
BEGIN, TRAINED, LONG, ROWS = 1, 256, 1024, 8


def main() -> None:
    if not FOLDER.exists():
        print(f"skipped: {FOLDER} is not there; set CLEARHEAD_SHARED")
        return
    model = clearhead.load(FOLDER).eval()
    texts = joined(model)
    rotaries = {
        "plain rotary": RotaryConfig(),
        "NTK-aware, 4 times": RotaryConfig(scaling=NTKScaling(factor=4.0)),
        "Dual Chunk Attention, chunks of 128": DualChunkConfig(chunk=128, length=TRAINED),
    }
    print(f"{ROWS} rows of {LONG} tokens, from a model trained at {TRAINED}: mean loss")
    for name, rotary in rotaries.items():
        near, far = (losses(with_rotary(model, rotary), texts)[:, part].mean().item() for part in PARTS)
        print(f"  {name:<36} 128–255: {near:.3f}   768–1023: {far:.3f}   {far - near:+.3f}")


PARTS = (slice(128, 256), slice(768, 1024))


def with_rotary(model: SequenceModel, rotary: RotaryConfig | DualChunkConfig) -> SequenceModel:
    """The same weights with other positions."""
    config = model.config.with_value("stack.pattern.0.mixer.rotary", rotary.to_dict())
    if not isinstance(config, SequenceModelConfig):
        raise ConfigError("not a model of one sequence")
    other = build(config).eval()
    other.load_state_dict(model.state_dict())
    return other


@torch.inference_mode()
def joined(model: SequenceModel) -> Tensor:
    """Stories that the model wrote, one after the other, each from its own beginning, within its own context."""
    count = ROWS * (LONG // TRAINED + 4)  # some stories are short
    written = drawn(model, torch.full((count, 1), BEGIN), TRAINED)
    rows = []
    for stories in written.chunk(ROWS):
        kept = [story[: end + 1] for story in stories if (end := last_of(story))]
        rows.append(torch.cat(kept)[: LONG + 1])
    shortest = min(map(len, rows))
    assert shortest > LONG, f"the stories came to {shortest} tokens only"
    return torch.stack(rows)


def drawn(model: SequenceModel, prompt: Tensor, length: int) -> Tensor:
    """Every row continued to `length` tokens, each drawn as likely as the model has it."""
    rng, state, rows = torch.Generator().manual_seed(0), model.init_state(len(prompt), length), [prompt]
    while len(rows) < length:
        logits = model(rows[-1], state=state)[:, -1]
        rows.append(torch.multinomial(logits.softmax(dim=-1), 1, generator=rng))
    return torch.cat(rows, dim=1)


def last_of(story: Tensor) -> int:
    """Where it ends: before the next story begins, or with the context."""
    again = (story[1:] == BEGIN).nonzero()
    return int(again[0]) if len(again) else len(story) - 1


@torch.inference_mode()
def losses(model: SequenceModel, texts: Tensor) -> Tensor:
    """Of the token after each position."""
    rows = [F.cross_entropy(model(row[None, :-1])[0], row[1:], reduction="none") for row in texts]
    return torch.stack(rows)


if __name__ == "__main__":
    main()
