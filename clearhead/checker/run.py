"""The table of checks by part, and running one of them."""

from __future__ import annotations

import ast
import re
import traceback
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from textwrap import dedent
from typing import Any

from .candidate import Candidate, CannotCall, CannotConstruct, NeedsFloat32, NeedsModule, NotWritten, one_line
from .parts.common import OURS, Recorder, is_about_dtype

# part -> its check function, in the order in which learners meet the parts
PARTS = {
    "softmax": "softmax.check",
    "attention": "attention.check",
    "causal_mask": "masks.check_causal",
    "padding_mask": "masks.check_padding",
    "multi_head": "multihead.check",
    "mixer": "mixers.check",
    "sinusoidal": "positions.check_sinusoidal",
    "position_likeness": "extras.check_likeness",
    "learned": "positions.check_learned",
    "rotary": "rotary.check",
    "layer_norm": "norms.check",
    "rms_norm": "norms.check",
    "feed_forward": "feedforward.check",
    "swiglu": "feedforward.check",
    "encoder_block": "blocks.check",
    "decoder_block": "blocks.check",
    "flops": "extras.check_flops",
    "heat_map": "extras.check_heat_map",
    "encoder": "models.check_encoder",
    "lm": "models.check_lm",
}


def check_for(part: str) -> Callable[[Candidate, Recorder], None]:
    module, _, name = PARTS[part].partition(".")
    return getattr(import_module(f"clearhead.checker.parts.{module}"), name)


def run_check(candidate: Candidate, send: Callable[[dict[str, Any]], None] = lambda event: None) -> Recorder:
    """Run the check of this part and record its diagnostics.

    An error that escapes the check gives no verdict: either the code needs something that we did not give it, or the
    checker does not know how to call it.
    """
    recorder = Recorder(candidate, send)
    try:
        check_for(candidate.part)(candidate, recorder)
    except NeedsFloat32:
        return run_check(replace(candidate, dtype="float32"), send)
    except (NotWritten, NotImplementedError):
        recorder.add("no-return" if has_body(candidate.source) else "not-written")
    except CannotCall as unknown:
        recorder.add("cannot-call", argument=str(unknown), name=candidate.name)
    except CannotConstruct as error:
        recorder.add("cannot-construct", call=error.args[0], error=error.args[1], name=candidate.name)
    except NeedsModule as error:
        recorder.add("needs-module", module=str(error))
    except NameError as error:
        add_name_error(recorder, error)
    except MemoryError:
        recorder.add("memory")
    except Exception as error:
        if is_about_dtype(one_line(error), candidate):
            return run_check(replace(candidate, dtype="float32"), send)
        is_theirs = any(not re.search(OURS, frame.filename) for frame in traceback.extract_tb(error.__traceback__))
        recorder.add("cannot-run" if is_theirs else "not-understood", error=one_line(error), name=candidate.name)
    return recorder


def add_name_error(recorder: Recorder, error: NameError) -> None:
    """An undefined name is the learner's mistake only if every line of the file could be run."""
    name = getattr(error, "name", None) or "?"
    if name in recorder.candidate.broken:
        recorder.add("needs-line", variable=name, line=recorder.candidate.broken[name])
    else:
        recorder.add("undefined-name", variable=name)


def has_body(source: str) -> bool:
    """Return True if the code computes something: it has more than docstrings, `pass` and `raise`."""
    try:
        tree = ast.parse(dedent(source))
    except SyntaxError:
        return False
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name != "__init__"]
    functions = [node for node in functions if node.name in ("forward", "__call__")] or functions
    statements = [statement for function in functions for statement in function.body]
    if any(isinstance(statement, ast.Raise) for statement in statements):
        return False
    texts = [s for s in statements if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
    return any(not isinstance(s, ast.Pass) and s not in texts for s in statements)
