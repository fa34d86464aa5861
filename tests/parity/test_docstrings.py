"""The examples of docstrings run, and print what they say."""

from __future__ import annotations

import doctest
from importlib import import_module

import numpy as np
import pytest
import torch

MODULES = """
schedules measure.cost measure.trace models.presets models.model models.quantize models.load tokenize.tokenizer
functional.attention functional.ffn functional.gradients functional.linear functional.linear_attention functional.loss
functional.lstm functional.mamba functional.moe functional.norm functional.positions functional.rotary
"""


@pytest.mark.parametrize("module", MODULES.split())
def test_examples_run(module: str) -> None:
    found, names = import_module(f"clearhead.{module}"), {"torch": torch, "np": np, "nn": torch.nn}
    failed, tried = doctest.testmod(found, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0
    assert failed == 0
