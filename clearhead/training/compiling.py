"""torch.compile for the training step."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

import torch
from torch import nn

from clearhead.measure.machine import look_for_compiler


def compile_objective(objective: nn.Module, say: Callable[[str], None]) -> nn.Module:
    """Compile the objective in place; if this machine cannot compile, say why and leave it as it is."""
    if problem := compile_problem():
        say(f"torch.compile {problem}; training without it (see `clearhead doctor`)")
        return objective
    say("Compiling: the first step takes about a minute.")
    if "TORCH_LOGS" not in os.environ:
        torch._logging.set_logs(dynamo=logging.ERROR)  # hide graph-break warnings
    objective.compile()
    return objective


def compile_problem() -> str | None:
    """Why torch.compile cannot be used here; None if a small trial works."""
    if not look_for_compiler().possible:
        return "needs a C++ compiler and Python's headers"
    try:
        torch.compile(lambda x: x + 1)(torch.ones(2))
    except Exception as error:  # errors of the compiler, the system and torch have no common class
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return f"does not work here: {lines[0]}"
    return None
