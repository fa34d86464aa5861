"""Every public name has an example in its docstring; the examples run, and print what they say."""

from __future__ import annotations

import doctest
from importlib import import_module
from inspect import isclass, isfunction
from typing import Any

import numpy as np
import pytest
import torch

import clearhead

PACKAGES = ["", "reference", "functional", "configs", "nn", "optim", "data", "tokenize", "scaling", "testing"]
# methods and helpers that packages do not list
MODULES = ["schedules", "measure.cost", "measure.trace", "models.presets", "models.model", "tokenize.tokenizer"]
ALSO: dict[str, Any] = {"torch": torch, "np": np, "clearhead": clearhead, "__name__": "__main__"}


def public(package: str) -> dict[str, Any]:
    """What a package lists, by name."""
    module = import_module(f"clearhead.{package}".rstrip("."))
    return {name: getattr(module, name) for name in module.__all__}


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_has_an_example_that_runs(package: str) -> None:
    names = public(package)
    found = {name: value for name, value in names.items() if isclass(value) or isfunction(value)}
    assert found
    assert not [name for name, value in found.items() if ">>>" not in (value.__doc__ or "")]
    parser, runner = doctest.DocTestParser(), doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE)
    for name, value in found.items():
        known = vars(import_module(value.__module__)) | names | ALSO | public("configs")
        runner.run(parser.get_doctest(value.__doc__, known, name, None, None))
    tried = runner.summarize(verbose=False)
    assert tried.attempted >= len(found)
    assert tried.failed == 0


@pytest.mark.parametrize("module", MODULES)
def test_examples_of_methods_run(module: str) -> None:
    found, names = import_module(f"clearhead.{module}"), ALSO | public("tokenize")
    failed, tried = doctest.testmod(found, extraglobs=names, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert tried > 0
    assert failed == 0
