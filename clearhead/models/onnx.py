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
    Full,
    GatedFeedForwardConfig,
    LatentAttentionConfig,
    PoolerConfig,
    RotaryConfig,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)
from clearhead.extras import install_command
from clearhead.files import check_target, flush_to_disk

from .context import make_context
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


class EncoderGraph(Graph):
    """ids and which of them are real -> the hidden states, and what the head says, if there is one."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        model, readable = self.model, attention_mask.bool()
        context = make_context(*input_ids.shape, input_ids.device, readable=readable, fused=False)
        x = model.hidden_states(input_ids, context)
        return (x,) if model.head is None else (x, model.head(x, context.at("head"), model.embedding.table))


def is_encoder(config: SequenceModelConfig) -> bool:
    """Whether every token may read every other one, so padding must be masked."""
    return all(getattr(block.mixer, "mask", None) == Full() for block in config.stack.blocks)


def save_onnx(model: Model, path: Path, force: bool = False) -> None:
    """Write `path`, and its weights beside it. `force` replaces both.

    A decoder's graph goes from `input_ids` to `logits`. An encoder's takes `attention_mask` too, 1 where a token is
    real, and gives `last_hidden_state` and the output of its head: `pooler_output` or `logits`.
    """
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
    graph, inputs, outputs = (Graph(model), ["input_ids"], ["logits"])
    if is_encoder(config):
        said = [] if config.head is None else ["pooler_output" if isinstance(config.head, PoolerConfig) else "logits"]
        graph, inputs, outputs = EncoderGraph(model), ["input_ids", "attention_mask"], ["last_hidden_state", *said]
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what the exporter says of its own ways
        program = torch.onnx.export(
            graph.eval(),
            tuple(torch.ones(2, 3, dtype=torch.long) for _ in inputs),
            dynamic_shapes=dict.fromkeys(inputs, sizes),
            input_names=inputs,
            output_names=outputs,
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
