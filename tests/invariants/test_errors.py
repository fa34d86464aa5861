"""Impossible requests raise a ValueError that names the value and the rule.

Asked of one process in which nothing checks types, as users have it: under the hook of the tests, a wrong rank or type
never reaches the code that should refuse it.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

MISTAKES = {
    # of the inputs
    "token too large": ("gpt(ids(2, 7) + 30)", r"token \d\d is outside the vocabulary, which has ids 0 to 22"),
    "token below zero": ("gpt(ids(2, 7) - 30)", r"token -\d\d is outside the vocabulary"),
    "tokens of one row without a batch": ("gpt(ids(7))", r"\(7,\).*\[batch, length\]"),
    "tokens of rank 3": ("gpt(ids(2, 7, 3))", r"\(2, 7, 3\).*\[batch, length\]"),
    "tokens that are floats": ("gpt(torch.rand(2, 7))", "float"),
    "an image for a reader of tokens": ("gpt(torch.rand(2, 2, 6, 6))", "token"),
    "tokens for a reader of images": ("vit(ids(2, 7))", "image"),
    "too long for learned positions": ("learned(ids(1, 42))", "position 41 is past the 41 learned positions"),
    "a position past the table": ("learned(ids(1, 2), positions=torch.tensor([[3, 50]]))", "position 50 is past"),
    "a position below zero": ("learned(ids(1, 2), positions=torch.tensor([[-1, 0]]))", "position -1"),
    "an image of another size": ("vit(torch.rand(2, 2, 5, 6))", "images are 2×5×6, but this model reads 2×6×6"),
    "an image of other channels": ("vit(torch.rand(2, 3, 6, 6))", "images are 3×6×6, but this model reads 2×6×6"),
    "an image without a batch": ("vit(torch.rand(2, 6, 6))", "2×6×6"),
    "segments of a model without": ("gpt(ids(2, 7), segments=ids(2, 7) % 2)", "segment"),
    "segment too large": ("bert(ids(2, 7), segments=ids(2, 7) * 0 + 3)", "segment 3 is outside"),
    "padding of another length": ("gpt(ids(2, 7), readable=torch.ones(2, 6, dtype=torch.bool))", r"readable.*\(2, 6\)"),
    "padding for one row only": ("gpt(ids(2, 7), readable=torch.ones(1, 7, dtype=torch.bool))", r"readable.*\(1, 7\)"),
    "padding in ones and zeros": ("gpt(ids(2, 7), readable=torch.ones(2, 7, dtype=torch.long))", "readable.*bool"),
    "documents of another length": ("gpt(ids(2, 7), documents=ids(2, 6))", r"documents.*\(2, 6\)"),
    "positions of another length": ("gpt(ids(2, 7), positions=ids(2, 6))", r"positions.*\(2, 6\)"),
    # of the state
    "a state too small": ("gpt(ids(2, 5), state=gpt.init_state(2, 4))", "position 4 does not fit a state made for 4"),
    "a state of other rows": ("gpt(ids(2, 5), state=gpt.init_state(3, 9))", "holds 3 rows, but the inputs have 2"),
    "a state of one row": ("gpt(ids(2, 5), state=gpt.init_state(1, 9))", "holds 1 rows, but the inputs have 2"),
    "documents while decoding": ("continued(documents=ids(2, 3))", "documents"),
    "a document while decoding one token": ("continued(documents=ids(2, 1))", "documents"),
    "a state of an encoder": ("bert.init_state(2, 9)", "Full.*reads later tokens"),
    # of a translator
    "target too large": ("translator(ids(2, 8), ids(2, 7) + 30)", "token"),
    "target without a batch": ("translator(ids(2, 8), ids(7))", r"\(7,\).*\[batch, length\]"),
    "source without a batch": ("translator(ids(8), ids(2, 7))", r"\(8,\).*\[batch, length\]"),
    "source and target of different rows": ("translator(ids(3, 8), ids(2, 7))", "3.*2|2.*3"),
    "one source for two targets": ("translator(ids(1, 8), ids(2, 7))", "1.*2|2.*1"),
    "decoding without a batch": ("translator.decode(ids(7), translated())", r"\(7,\).*\[batch, length\]"),
    "decoding other rows": ("translator.decode(ids(3, 1), translated())", "holds 2 rows, but the inputs have 3"),
    "decoding past the state": ("translator.decode(ids(2, 6), translated())", "position 5 does not fit a state"),
    # of the config
    "heads in words": ("AttentionConfig(heads='four')", "Attention.heads is 'four', but must be a whole number"),
    "heads as a fraction": ("AttentionConfig(heads=4.0)", "Attention.heads is 4.0, but must be a whole number"),
    "heads as yes": ("AttentionConfig(heads=True)", "Attention.heads is True, but must be a whole number"),
    "bias as 1": ("AttentionConfig(heads=4, qkv_bias=1)", "Attention.qkv_bias is 1, but must be true or false"),
    "a mask by name": ("AttentionConfig(heads=4, mask='causal')", "Attention.mask is 'causal', but must be Mask"),
    "a mask of no kind": ("AttentionConfig(heads=4, mask=Mask())", "Mask"),
    "a wrong word": ("FeedForwardConfig(activation='swish')", "activation is 'swish', but must be 'relu' or"),
    "a wrong placement": ("changed('stack.pattern.0.placement', 'before')", "placement is 'before', but must be"),
    "a list for a tuple": ("StackConfig(dim=4, repeats=1, pattern=[])", r"Stack.pattern is \[\], but must be a tuple"),
    "a tuple of something else": ("StackConfig(dim=4, repeats=1, pattern=(3,))", r"Stack.pattern is \(3,\)"),
    "a number for a part": ("changed('stack.pattern.0.mixer', 3)", "mixer is 3, but must be Attention or"),
    "another part": ("changed('stack.pattern.0.mixer', FeedForwardConfig())", "mixer is .*, but must be Attention or"),
    "a width that does not divide": ("changed('stack.dim', 21)", "dim=21 is not a multiple of heads=5; give head_dim"),
    "no global tokens": ("Global(-1)", "tokens"),
}  # fmt: skip

SCRIPT = """
import json, sys, warnings
warnings.simplefilter("error")
import torch
from clearhead.configs import *
from clearhead.models.model import build
from clearhead.models.presets import PRESETS, preset
from tests.invariants.cases import CASES
torch.set_num_threads(1)
gpt, learned, vit, bert = (build(CASES[n]) for n in ("mha; pre", "position: learned", "patches", "head: masked lm"))
translator = build(CASES["translator; pre"])
changed = CASES["mha; pre"].with_value
def ids(*shape):
    return torch.randint(23, shape, generator=torch.Generator().manual_seed(0))
def continued(**given):
    state = gpt.init_state(2, 9)
    gpt(ids(2, 3), state=state)
    return gpt(ids(2, *next(iter(given.values())).shape[1:]), state=state, **given)
def survives(name):
    config = preset(name)
    again = loads(dumps(config))
    return again == config and hash(again) == hash(config) and dumps(again) == dumps(config)
def translated():
    return translator.init_state(translator.encode(ids(2, 8)), 5)
outcomes = {}
for name, code in json.load(sys.stdin).items():
    try:
        outcomes[name] = "nothing", repr(eval(code))[:200]
    except Exception as error:
        outcomes[name] = ("ValueError" if isinstance(error, ValueError) else type(error).__name__), str(error)
outcomes["presets that do not survive JSON"] = [name for name in PRESETS if not survives(name)], sorted(PRESETS)
json.dump(outcomes, sys.stdout)
"""


@pytest.fixture(scope="module")
def outcomes() -> dict[str, tuple[str, str]]:
    root = Path(__file__).parents[2]
    asked = json.dumps({name: code for name, (code, _) in MISTAKES.items()})
    done = subprocess.run([sys.executable, "-c", SCRIPT], input=asked, capture_output=True, text=True, cwd=root)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str, outcomes: dict[str, tuple[str, str]]) -> None:
    kind, message = outcomes[name]
    assert kind == "ValueError", f"{MISTAKES[name][0]} -> {kind}: {message}"
    assert re.search(MISTAKES[name][1], message), message


def test_every_preset_survives_json(outcomes: dict[str, tuple[list[str], list[str]]]) -> None:
    lost, all_of_them = outcomes["presets that do not survive JSON"]
    assert len(all_of_them) >= 24
    assert lost == []
