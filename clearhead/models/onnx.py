"""ONNX: the whole model as one graph that onnxruntime runs, of any batch and length."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from clearhead.configs import (
    EncoderDecoderConfig,
    ModelConfig,
    PoolerConfig,
    RotaryConfig,
    SequenceModelConfig,
    TokenEmbeddingConfig,
)
from clearhead.extras import install_command
from clearhead.files import check_target, flush_to_disk

from .context import make_context
from .convert import CheckpointError
from .model import EncoderDecoder, Model


class Graph(nn.Module):
    """A model with the named inputs and outputs of its ONNX file. `names` are those of the inputs."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        config = model.config
        encodes = isinstance(config, SequenceModelConfig) and reads_both_ways(config)
        if isinstance(config, EncoderDecoderConfig):
            tokens = isinstance(config.source, TokenEmbeddingConfig)
            read = ["input_ids", "attention_mask"] if tokens else ["input_features"]
            self.names = [*read, "decoder_input_ids"]
        elif not isinstance(config.embedding, TokenEmbeddingConfig):
            self.names = ["pixel_values"]
        else:
            self.names = ["input_ids", *(["attention_mask"] if encodes else [])]
            self.names += ["token_type_ids"] if encodes and config.embedding.segments is not None else []
        answer = "pooler_output" if isinstance(config.head, PoolerConfig) else "logits"
        self.outputs = ["last_hidden_state"] if encodes or config.head is None else []
        self.outputs += [] if config.head is None else [answer]

    def forward(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`fused=False`: kernels are chosen by lengths, which are not known yet."""
        model, given = self.model, dict(zip(self.names, inputs, strict=True))
        mask = given["attention_mask"].bool() if "attention_mask" in given else None
        if isinstance(model, EncoderDecoder):
            return (model(inputs[0], given["decoder_input_ids"], source_readable=mask, fused=False),)
        length = model.config.embedding.positions(inputs[0].shape[1])
        context = make_context(inputs[0].shape[0], length, inputs[0].device, readable=mask, fused=False)
        x = model.hidden_states(inputs[0], context, given.get("token_type_ids"))
        found = [] if model.head is None else [model.head(x, context.at("head"), model.embedding.table)]
        return (x, *found) if "last_hidden_state" in self.outputs else tuple(found)

    def examples(self) -> tuple[tuple[Tensor, ...], tuple[dict[int, Any], ...]]:
        """An example of each input, and the sizes that may differ: the batch, and the length of a text."""
        batch = torch.export.Dim("batch", max=2**16)
        length, target = (torch.export.Dim(name, max=2**20) for name in ("length", "target_length"))
        config: Any = self.model.config
        examples, sizes = [], []
        for name in self.names:
            if name in ("pixel_values", "input_features"):
                embedding = config.embedding if name == "pixel_values" else config.source
                examples.append(self.model.blank(embedding, 2))
                sizes.append({0: batch})
            else:
                written = name == "decoder_input_ids"
                examples.append(torch.ones(2, 5 if written else 3, dtype=torch.long))
                sizes.append({0: batch, 1: target if written else length})
        return tuple(examples), tuple(sizes)


def reads_both_ways(config: SequenceModelConfig) -> bool:
    """Whether a token may read later ones, as in an encoder; then padding must be masked."""
    return any(not block.mixer.mask.causal for block in config.stack.blocks)


def check_onnx(config: ModelConfig) -> None:
    """Raise if a part of the model cannot be written to ONNX."""
    stacks = (config.stack,) if isinstance(config, SequenceModelConfig) else (config.encoder, config.decoder)
    for block in (block for stack in stacks for block in stack.blocks):
        for part in (block.mixer, block.ffn):
            if part is not None and not part.traceable:
                raise CheckpointError(
                    f"a {part.kind()} does something else for each text, and is not written to ONNX; "
                    "attention and plain or gated feed-forward layers are"
                )
        rotary = getattr(block.mixer, "rotary", None)
        if isinstance(rotary, RotaryConfig) and rotary.varies:
            raise CheckpointError(
                f"{type(rotary.scaling).__name__} changes with the length of the text, and is not written to ONNX"
            )


def save_onnx(model: Model, path: Path, force: bool = False) -> None:
    """Write `path`, and its weights beside it. `force` replaces both.

    model             inputs                                                  outputs
    decoder           input_ids                                               logits
    encoder           input_ids, attention_mask, token_type_ids if it has     last_hidden_state, then logits or
                      segments                                                pooler_output if it has a head
    image model       pixel_values                                            the same
    encoder–decoder   input_ids, attention_mask, decoder_input_ids            logits
    speech            input_features, decoder_input_ids                       logits

    The batch and the lengths are free.
    """
    weights = path.with_name(f"{path.name}.data")
    check_target(path, force)
    check_target(weights, force)
    check_onnx(model.config)
    try:
        import onnxscript  # noqa: F401
    except ImportError:
        raise CheckpointError(f"ONNX files need the packages onnx and onnxscript: {install_command('onnx')}") from None
    graph = Graph(model).eval()
    inputs, sizes = graph.examples()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # what the exporter says of its own ways
        program = torch.onnx.export(
            graph,
            inputs,
            dynamic_shapes=(sizes,),
            input_names=graph.names,
            output_names=graph.outputs,
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
