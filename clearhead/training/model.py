"""The model of a run: fresh weights, or those of a checkpoint."""

from __future__ import annotations

import torch
from torch import nn

from clearhead.configs import Blocks, ConfigError, ModelConfig
from clearhead.configs.train import RecipeConfig
from clearhead.models.convert.differences import differences
from clearhead.models.hub import find_checkpoint
from clearhead.models.initialise import RESIDUAL_OUTPUTS
from clearhead.models.load import load
from clearhead.models.lora import adapt
from clearhead.models.model import EncoderDecoder, Model, build, build_empty
from clearhead.models.quantize import dequantize

from .distributed import World, full_tensor
from .task import Task


def make_model(recipe: RecipeConfig, config: ModelConfig) -> Model:
    """Build the model with fresh weights, or load the checkpoint in `recipe.start`.

    With `zero_out`, every residual branch and the head start at zero, so all tokens are equally likely at first.
    """
    torch.manual_seed(recipe.seed)
    if recipe.start is not None:
        if recipe.adapter is not None and not find_checkpoint(recipe.start).is_dir():
            raise ConfigError(
                f"{recipe.start} is a file, and LoRA needs a checkpoint folder; write one first: "
                f"clearhead export {recipe.start} --to hf FOLDER"
            )
        model = load(recipe.start)
        if isinstance(model.precision, Blocks):
            model = dequantize(model)
        if model.precision is not None:
            raise ConfigError(f"{recipe.start} is quantized and cannot be trained; train the model it was made from")
        model = match_config(model, config, recipe.start).float().train()
        if recipe.adapter is not None:
            adapt(model, recipe.adapter)
        return model
    model = build(config)
    if recipe.zero_out:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(RESIDUAL_OUTPUTS) or name == "head.weight":
                    parameter.zero_()
    return model


def match_config(model: Model, config: ModelConfig, start: str) -> Model:
    """The loaded model under the recipe's config, which may change the dropout and nothing else."""
    if found := differences(config, model.config):
        raise ConfigError(
            f"the recipe's model differs from {start}: {found[0]}; with --from, only dropout can be changed"
        )
    if config == model.config:
        return model
    matched = build_empty(config)
    matched.load_state_dict(model.state_dict(), assign=True)
    matched.origin = model.origin
    return matched


def list_blocks(model: Model) -> list[nn.Module]:
    """Every block once, even if several layers share it."""
    stacks = [model.encoder, model.decoder] if isinstance(model, EncoderDecoder) else [model.stack]
    return list(dict.fromkeys(block for stack in stacks for block in stack.layers()))


def gather_model(model: Model, task: Task, recipe: RecipeConfig, world: World) -> Model:
    """A full copy of a sharded model in the memory of the first process; the others get a copy without weights.

    Only one tensor at a time is gathered on a device.
    """
    with torch.device("meta"):
        copy = build(task.config)
        if recipe.adapter is not None:
            adapt(copy, recipe.adapter)
    weights = {}
    for name, tensor in model.state_dict().items():
        gathered = full_tensor(tensor)
        if world.first:
            weights[name] = gathered.cpu()
    copy.load_state_dict(weights, strict=world.first, assign=True)
    copy.origin = model.origin
    return copy
