"""Replay parts of a recorded pass: keep only the residual stream, and run single blocks again from it.

A pass over 846 tokens of stories15M holds 478 MB of intermediate values but only 7 MB of residual stream. Running one
block again from its kept input gives the same values, bit for bit, so any of the 478 MB can be had on request.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor

from clearhead.models.context import make_context
from clearhead.models.model import cross_context
from clearhead.nn.context import Context
from clearhead.nn.stack import Stack
from clearhead.nn.tap import Taps

from .model_input import ModelInput, block_output_tap

OUTSIDE = (
    "embedding",
    "embedding.*",
    "source",
    "source.*",
    "target",
    "target.*",
    "*.final_norm",
    "*.score_bias",
    "*.distances",
    "*.distances.norm",
    "head.narrow",
    "head.dense",
    "head.norm",
    "head.pool.*",
    "head.pooled",
    "head.span",
)
"""Taps outside the blocks. They are kept, because running the embedding again is as long as keeping it."""


def stream_taps(model_input: ModelInput) -> Iterator[str]:
    """The tap of every block's output, in all stacks."""
    for stack, blocks in model_input.stacks().items():
        for i, block in enumerate(blocks):
            yield f"{stack}.blocks.{i}.{block_output_tap(block)}"


class Replay:
    """One recorded pass: `values` are the taps of OUTSIDE and of `stream_taps`."""

    def __init__(self, model_input: ModelInput, values: dict[str, Tensor]) -> None:
        self.model_input, self.values = model_input, values

    def stack(self, name: str) -> Stack:
        return cast(Stack, getattr(self.model_input.model, name))

    def block_input(self, stack: str, layer: int) -> Tensor:
        """What block `layer` of a stack reads, `1 T D`."""
        if layer == 0:
            return self.values[{"stack": "embedding", "encoder": "source", "decoder": "target"}[stack]]
        return self.block_output(stack, layer - 1)

    def block_output(self, stack: str, layer: int) -> Tensor:
        blocks = self.model_input.stacks()[stack]
        return self.values[f"{stack}.blocks.{layer}.{block_output_tap(blocks[layer])}"]

    def context(self, stack: str, x: Tensor, taps: Taps | None, memory: Tensor | None = None) -> Context:
        """The context of a stack's blocks, as the model's own forward pass makes it."""
        context = make_context(len(x), x.shape[1], x.device, taps=taps)
        if stack == "decoder":
            read = self.values["encoder.final_norm"].expand(len(x), -1, -1) if memory is None else memory
            context = cross_context(context, read, None)
        return self.stack(stack).block_context(context.at(stack))

    @torch.inference_mode()
    def block_values(self, stack: str, layer: int) -> dict[str, Tensor]:
        """Every value of one block by its path, from running the block again."""
        taps = Taps(read=[f"{stack}.blocks.{layer}.*"])
        x = self.block_input(stack, layer)
        self.stack(stack).layers()[layer](x, self.context(stack, x, taps).at(f"blocks.{layer}"))
        return taps.values

    @torch.inference_mode()
    def logits_from(self, stack: str, layer: int, row: int, taps: Taps | None = None, copies: int = 1) -> Tensor:
        """The logits at `row` when block `layer` and all later ones run again with `taps`, in each of the copies.

        Earlier blocks are not run, and a language model's last block and head compute `row` only.
        """
        x = self.block_input(stack, layer).expand(copies, -1, -1)
        if stack == "encoder":
            memory = self.run_blocks(stack, layer, x, taps)
            target = self.values["target"].expand(copies, -1, -1)
            return self.logits_after("decoder", 0, target, row, taps, memory)
        return self.logits_after(stack, layer, x, row, taps)

    def run_blocks(self, stack: str, layer: int, x: Tensor, taps: Taps | None) -> Tensor:
        module, context = self.stack(stack), self.context(stack, x, taps)
        for i in range(layer, len(module.places)):
            x = module.layers()[i](x, context.at(f"blocks.{i}"))
        return context.tap("final_norm", module.final_norm(x))

    def logits_after(
        self, stack: str, layer: int, x: Tensor, row: int, taps: Taps | None, memory: Tensor | None = None
    ) -> Tensor:
        module, context = self.stack(stack), self.context(stack, x, taps, memory)
        one = self.model_input.predicts_tokens
        layers = module.layers()
        for i in range(layer, len(layers)):
            select: dict[str, Any] = {}
            if one and i == len(layers) - 1:
                select["select"] = lambda h: h[:, [row]]
            x = layers[i](x, context.at(f"blocks.{i}"), **select)
        if one and x.shape[1] != 1:  # there was no block to cut the rows
            x = x[:, [row]]
        logits = self.model_input.head(x)
        return (logits[:, 0] if one else logits).float().cpu()
