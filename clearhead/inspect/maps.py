"""Attention maps: who reads whom, as numbers and as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from clearhead.models.assemble import SequenceModel
from clearhead.nn.tap import Taps

from .draw import figure, save


@torch.inference_mode()
def attention_map(model: SequenceModel, tokens: Int[Tensor, "1 T"], layer: int) -> Float[np.ndarray, "H T S"]:
    """The weights of every head of one layer, computed beside the fused kernel; the model's answer is unchanged."""
    layers = len(model.config.stack.blocks)
    if not -layers <= layer < layers:
        raise ValueError(f"layer {layer} is not one of the {layers} layers, 0 to {layers - 1}")
    path = f"stack.blocks.{layer % layers}.mixer.weights"
    taps = Taps(read=[path])
    model(tokens, taps=taps)
    return taps.values[path][0].float().numpy()


def draw_maps(
    weights: Float[np.ndarray, "H T S"], labels: Sequence[str], path: str | Path, title: str = "attention"
) -> None:
    """One square for each head: row = the token that reads, column = the token that is read."""
    heads = len(weights)
    columns = min(heads, 4)
    rows = -(-heads // columns)
    with figure(3.2 * columns + 0.8, 3.7 * rows + 0.2) as picture:
        axes = picture.subplots(rows, columns, squeeze=False).ravel()
        for head, axis in enumerate(axes):
            axis.set_axis_off()
            if head >= heads:
                continue
            axis.set_axis_on()
            image = axis.imshow(weights[head], cmap="cividis", vmin=0, vmax=1, interpolation="nearest")
            axis.set_title(f"head {head}", fontsize=10)
            shown = [repr(text)[1:-1] for text in labels]
            axis.set_xticks(range(len(shown)), shown, rotation=90, fontsize=7)
            axis.set_yticks(range(len(shown)), shown, fontsize=7)
        axes[0].set_ylabel("reads", fontsize=9)
        axes[0].set_xlabel("is read", fontsize=9)
        picture.suptitle(title)
        picture.colorbar(image, ax=list(axes), label="weight", shrink=0.8)
        save(picture, path)
