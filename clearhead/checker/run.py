"""The table of checks by part, and running one of them."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .candidate import Candidate, CannotCall, NotWritten
from .parts.common import OURS, Recorder

# part -> its check function, in the order in which learners meet the parts
PARTS = {
    "softmax": "softmax.check",
    "attention": "attention.check",
    "causal_mask": "masks.check_causal",
    "padding_mask": "masks.check_padding",
    "multi_head": "multihead.check",
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
    """Run the check of this part and record its diagnostics, including errors that escape it."""
    recorder = Recorder(candidate, send)
    try:
        check_for(candidate.part)(candidate, recorder)
    except (NotWritten, NotImplementedError):
        recorder.add("not-written")
    except CannotCall as unknown:
        recorder.add("cannot-call", argument=str(unknown))
    except MemoryError:
        recorder.add("memory")
    except Exception as error:
        said = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {said[0] if said else ''}"[:160]
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not re.search(OURS, frame.filename)]
        if theirs:
            recorder.add("raises", error=text, line=theirs[-1].lineno)
        else:  # the checker failed, not the learner
            recorder.add("not-understood", error=text)
    return recorder
