"""ONNX: the whole model as one graph that onnxruntime runs, of any batch and length."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from clearhead.configs import (
    AttentionConfig,
    FeedForwardConfig,
    GatedFeedForwardConfig,
    LatentAttentionConfig,
    RotaryConfig,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)
from clearhead.extras import install_command
from clearhead.files import check_target, flush_to_disk

from .convert import CheckpointError
from .model import Model, SequenceModel

MIXERS = (AttentionConfig, LatentAttentionConfig)
FEED_FORWARD = (FeedForwardConfig, GatedFeedForwardConfig)


class Graph(nn.Module):
    """ids -> what the head says."""

    def __init__(self, model: SequenceModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids, fused=False)  # kernels are chosen by lengths, which are not known yet


def save_onnx(model: Model, path: Path, force: bool = False) -> None:
    """Write `path`, and its weights beside it; the input is `input_ids`, the output `logits`. `force` replaces both."""
    weights = path.with_name(f"{path.name}.data")
    check_target(path, force)
    check_target(weights, force)
    config = model.config
    if not isinstance(config, SequenceModelConfig) or not isinstance(config.embedding, TokenEmbeddingConfig):
        raise CheckpointError(f"a {config.kind()} that reads no tokens alone is not written to ONNX yet")
    assert isinstance(model, SequenceModel)
    for block in config.stack.blocks:
        for part, known in ((block.mixer, MIXERS), (block.ffn, FEED_FORWARD)):
            if part is not None and not isinstance(part, known):
                raise CheckpointError(
                    f"a {part.kind()} does something else for each text, and is not written to ONNX; "
                    "attention and plain or gated feed-forward layers are"
                )
        rotary = getattr(block.mixer, "rotary", None)
        if isinstance(rotary, RotaryConfig) and rotary.varies:
            raise CheckpointError(
                f"{type(rotary.scaling).__name__} changes with the length of the text, and is not written to ONNX"
            )
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise CheckpointError(f"ONNX files need the packages onnx and onnxscript: {install_command('onnx')}") from None
    sizes = {0: torch.export.Dim("batch", max=2**16), 1: torch.export.Dim("length", max=2**20)}
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what the exporter says of its own ways
        program = torch.onnx.export(
            Graph(model).eval(),
            (torch.ones(2, 3, dtype=torch.long),),
            dynamic_shapes={"input_ids": sizes},
            input_names=["input_ids"],
            output_names=["logits"],
            dynamo=True,
            verbose=False,
        )
    assert program is not None
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{path.name}.", suffix=".part", dir=path.parent) as folder:
        staged = Path(folder, path.name)  # the graph names its weights file, so both are written under their own names
        program.save(str(staged), external_data=True)
        for name in (weights.name, path.name):
            flush_to_disk(Path(folder, name))
            Path(folder, name).replace(path.with_name(name))
