"""Interventions as data: a list of changes that a page can send, a test can run, and Python code can repeat.

{"kind": "head", "place": "stack", "layer": 3, "head": 1, "do": "zero"}            set a head's output to zero
{"kind": "head", "place": "stack", "layer": 3, "head": 1, "do": "mean"}            … to its mean over positions
{"kind": "head", "place": "stack", "layer": 3, "head": 1, "do": "scale", "by": 2}  … to a multiple
{"kind": "branch", "place": "stack", "layer": 3, "part": "ffn", "do": "zero"}      a whole mixer or FFN branch
{"kind": "patch", "place": "stack", "layer": 3, "position": 5, "text": "…"}        the stream of another text
{"kind": "token", "position": 5, "token": "dog"}                                   another token in the input
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from clearhead.nn.tap import Taps

from .interventions import check_same_length
from .model_input import ModelInput, block_output_tap

if TYPE_CHECKING:
    from .inspection import Inspection

Change = Mapping[str, Any]
ACTIONS = ("zero", "mean", "scale")
Other = Callable[[str], "Inspection"]
"""The recorded pass of another text."""


def run_changed(changes: Sequence[Change], inspection: Inspection, other: Other) -> Tensor:
    """The logits of the model with every change: tokens are replaced in the input, the rest in the pass."""
    inside = [change for change in changes if change.get("kind") != "token"]
    taps = make_taps(inside, inspection, other)
    return replace_tokens(changes, inspection.model_input).run(taps)


def replace_tokens(changes: Sequence[Change], given: ModelInput) -> ModelInput:
    """The input with the tokens that changes of the kind `token` ask for."""
    edits = [change for change in changes if change.get("kind") == "token"]
    if not edits:
        return given
    if given.image is not None:
        raise ValueError("an image has no tokens to replace")
    ids = given.inputs.clone()
    for change in edits:
        position = int(change.get("position", -1))
        if not 0 <= position < ids.shape[1]:
            raise ValueError(f"position {position} does not exist; there are {ids.shape[1]}")
        ids[0, position] = given.find_token(str(change.get("token")))
    return replace(given, inputs=ids)


def make_taps(changes: Sequence[Change], inspection: Inspection, other: Other) -> Taps:
    """Taps that apply every change, in the given order."""
    functions: dict[str, Callable[[Tensor], Tensor]] = {}
    for change in changes:
        path, function = make_change(change, inspection, other)
        functions[path] = chain(functions.get(path), function)
    return Taps(replace=functions)


def chain(first: Callable[[Tensor], Tensor] | None, then: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return then if first is None else lambda x: then(first(x))


def make_change(change: Change, inspection: Inspection, other: Other) -> tuple[str, Callable[[Tensor], Tensor]]:
    kind, place, layer = change.get("kind"), str(change.get("place", "stack")), int(change.get("layer", 0))
    stack = "decoder" if place == "cross" else place
    blocks = inspection.model_input.stacks().get(stack)
    if blocks is None or not 0 <= layer < len(blocks):
        raise ValueError(f"there is no layer {layer} in {place!r} of {inspection.model_input.name}")
    block = f"{stack}.blocks.{layer}"
    if kind == "head":
        layer_map = inspection.at(layer, place)
        head = int(change.get("head", -1))
        if head not in layer_map.heads:
            raise ValueError(f"layer {layer} has no head {head}; it has {len(layer_map.heads)}")
        return f"{block}.{'cross' if place == 'cross' else 'mixer'}.mixed", act(change, lambda x: x[:, head])
    if kind == "branch":
        part = change.get("part")
        if part not in ("mixer", "cross", "ffn") or getattr(blocks[layer], str(part), None) is None:
            raise ValueError(f"layer {layer} has no branch {part!r}")
        return f"{block}.{part}_residual.inside", act(change, lambda x: x)
    if kind == "patch":
        tap = f"{block}.{block_output_tap(blocks[layer])}"
        theirs, position = other(str(change.get("text", ""))), int(change.get("position", -1))
        check_same_length(inspection.model_input.labels, theirs.model_input.labels)
        if not 0 <= position < len(inspection.model_input.labels):
            raise ValueError(f"position {position} does not exist; there are {len(inspection.model_input.labels)}")
        value = theirs.values[tap][:, position]

        def put(x: Tensor) -> Tensor:
            x = x.clone()
            x[:, position] = value
            return x

        return tap, put
    raise ValueError(f"the kind of a change is {kind!r}, but must be head, branch, patch or token")


def act(change: Change, select: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Zero, average over positions, or scale the selected values."""
    do = change.get("do", "zero")
    if do not in ACTIONS:
        raise ValueError(f"the action of a change is {do!r}, but must be one of {', '.join(ACTIONS)}")
    by = float(change.get("by", 1.0))
    actions: dict[str, Callable[[Tensor], Tensor]] = {
        "zero": torch.zeros_like,
        "mean": mean_over_positions,
        "scale": lambda x: x * by,
    }

    def apply(x: Tensor) -> Tensor:
        x = x.clone()
        part = select(x)
        part.copy_(actions[do](part))
        return x

    return apply


def mean_over_positions(x: Tensor) -> Tensor:
    return x.mean(-2, keepdim=True).expand_as(x)


def python_code(changes: Sequence[Change]) -> str:
    """Python that makes the same changes, for `copy as Python`."""
    lines = ["from clearhead.inspect.changes import run_changed", f"changes = {list(map(dict, changes))!r}"]
    return "\n".join([*lines, "logits = run_changed(changes, inspection, model.inspect)"])
