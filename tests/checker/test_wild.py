"""Files as they are in the wild: globals, missing modules, packages, example calls, notebooks, library modules."""

import inspect
import json
from pathlib import Path

import pytest
import torch

import clearhead
import clearhead.nn
from clearhead.checker.check import check_file
from clearhead.checker.discover import notebook_source

GOOD = """
import numpy as np
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
"""
MYSTERY = """
import numpy as np
{comment}
def attention(first, second, third, factor):
    s = first @ np.swapaxes(second, -1, -2) * factor / first.shape[-1] ** 0.5
    e = np.exp(s - s.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True) @ third
"""


def saved(folder: Path, text: str, name: str = "learner.py") -> str:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return str(path)


def keys(report) -> list[str]:
    return [d.key for d in report.diagnostics if d.severity != "note"]


def test_a_missing_module_is_named(tmp_path: Path) -> None:
    text = "import no_such_library as lib\nimport numpy as np\ndef softmax(x):\n    return lib.softmax(x)\n"
    report = check_file(saved(tmp_path, text))
    assert keys(report) == ["needs-module"]
    assert report.diagnostics[0].values["module"] == "no_such_library"


def test_a_class_with_a_missing_base_is_not_checked(tmp_path: Path) -> None:
    text = GOOD + "from labml_x import Module\nclass FeedForward(Module):\n    pass\n"
    report = check_file(saved(tmp_path, text))
    assert {part.name: part.verdict for part in report.parts} == {"softmax": "right", "FeedForward": "unchecked"}


def test_a_line_that_opens_a_file_hides_nothing(tmp_path: Path) -> None:
    text = GOOD + "text = open('input.txt').read()\ndef attention(q, k, v):\n    return text + softmax(q @ k.T) @ v\n"
    report = check_file(saved(tmp_path, text))
    assert keys(report) == ["needs-line"]
    assert report.parts[0].verdict == "right"


def test_an_undefined_name_is_a_mistake(tmp_path: Path) -> None:
    report = check_file(saved(tmp_path, GOOD.replace("return e /", "return ee /")))
    assert keys(report) == ["undefined-name"]


def test_relative_imports_work(tmp_path: Path) -> None:
    saved(tmp_path, "raise RuntimeError\n", "pkg/__init__.py")
    saved(tmp_path, GOOD, "pkg/tools.py")
    text = "from .tools import softmax\nimport numpy as np\ndef attention(q, k, v):\n"
    text += "    return softmax(q @ np.swapaxes(k, -1, -2) / q.shape[-1] ** 0.5) @ v\n"
    assert check_file(saved(tmp_path, text, "pkg/model.py")).ok


def test_an_example_call_in_a_comment(tmp_path: Path) -> None:
    unknown = check_file(saved(tmp_path, MYSTERY.format(comment="")))
    assert unknown.verdict == "unchecked"
    comment = "# clearhead: attention(q, k, v, 1.0)"
    assert check_file(saved(tmp_path, MYSTERY.format(comment=comment))).ok
    wrong = check_file(saved(tmp_path, MYSTERY.format(comment=comment.replace("1.0", "2.0"))))
    assert wrong.verdict == "wrong"


def test_an_example_call_as_an_argument(tmp_path: Path) -> None:
    path = saved(tmp_path, MYSTERY.format(comment=""))
    assert clearhead.check(path, example="attention(q, k, v, 1.0)").ok


def test_an_example_of_a_class(tmp_path: Path) -> None:
    text = """
# clearhead: Mixer(12, parts=3)(x, 7)
import torch
from torch import nn
class Mixer(nn.Module):
    def __init__(self, n, parts):
        super().__init__()
        self.heads = parts
        self.q, self.k, self.v, self.o = (nn.Linear(n, n) for _ in range(4))
    def forward(self, thing, unused):
        B, T, D = thing.shape
        q, k, v = (f(thing).reshape(B, T, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        w = (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1)
        return self.o((w @ v).transpose(1, 2).reshape(B, T, D))
"""
    report = check_file(saved(tmp_path, text) + ":Mixer", "multi_head")
    assert report.ok, str(report)


NOTEBOOK = {
    "cells": [
        {"cell_type": "markdown", "source": ["# Softmax"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!ls\n", "import numpy as np"]},
        {"cell_type": "code", "source": ["%%bash\n", "echo not python"]},
        {"cell_type": "code", "source": GOOD.splitlines(keepends=True)},
    ]
}


def test_notebooks_are_read_cell_by_cell(tmp_path: Path) -> None:
    assert "echo" not in notebook_source(json.dumps(NOTEBOOK))
    assert check_file(saved(tmp_path, json.dumps(NOTEBOOK), "homework.ipynb")).ok


@pytest.mark.parametrize(
    "thing",
    [
        torch.nn.LayerNorm,
        torch.nn.RMSNorm,
        torch.nn.MultiheadAttention,
        torch.nn.TransformerEncoderLayer,
        torch.nn.LayerNorm(6),
        torch.nn.MultiheadAttention(12, 3),
        torch.nn.functional.softmax,
    ],
    ids=lambda thing: thing.__name__ if hasattr(thing, "__name__") else type(thing).__name__.lower(),
)
def test_the_library_is_right(thing) -> None:
    report = clearhead.check(thing, "softmax" if thing is torch.nn.functional.softmax else None)
    assert report.ok, str(report)


SIZES = {"heads": 3, "latent_dim": 4, "plain_dim": 4, "rope_dim": 4, "experts": 4, "active": 2}
LAYERS = [name for name, place in clearhead.nn.PLACES.items() if place == "layers"]


def build_layer(name: str) -> torch.nn.Module:
    """One of our own layers, of width 12."""
    cls = getattr(clearhead.nn, name)
    return cls(12, **{n: size for n, size in SIZES.items() if n in inspect.signature(cls).parameters})


@pytest.mark.parametrize("name", LAYERS)
def test_our_own_layers_are_right(name: str) -> None:
    for thing in (getattr(clearhead.nn, name), build_layer(name)):
        report = clearhead.check(thing)
        assert report.ok, str(report)


def test_a_function_that_returns_a_module(tmp_path: Path) -> None:
    text = "from torch import nn\ndef FeedForward(dim, mult=4):\n    return nn.Sequential(nn.Linear(dim, dim * mult), "
    right = check_file(saved(tmp_path, text + "nn.GELU(), nn.Linear(dim * mult, dim))\n"))
    assert right.ok, str(right)
    assert keys(check_file(saved(tmp_path, text + "nn.Linear(dim * mult, dim))\n"))) == ["ffn-no-activation"]


def test_a_scale_that_the_caller_gives_is_not_missing(tmp_path: Path) -> None:
    text = "import torch\ndef attention(q, k, v, scale_factor=1, mask=None):\n"
    text += "    return torch.softmax(q @ k.transpose(-1, -2) * scale_factor, -1) @ v\n"
    report = check_file(saved(tmp_path, text))
    assert "no-scale" not in keys(report), str(report)


def test_a_large_file_is_read_once(tmp_path: Path) -> None:
    text = GOOD + "".join(f"def helper_{i}(n):\n    return n + {i}\n" for i in range(300))
    assert check_file(saved(tmp_path, text)).ok
