"""Which check belongs to which part, and one suspect through its check."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from .parts.common import OURS, Voice
from .suspect import CannotCall, NotWritten, Suspect

# part -> where its check is, in the order a learner meets the parts
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


def check_of(part: str) -> Callable[[Suspect, Voice], None]:
    module, _, name = PARTS[part].partition(".")
    return getattr(import_module(f"clearhead.checker.parts.{module}"), name)


def examine(suspect: Suspect, tell: Callable[[dict[str, Any]], None] = lambda event: None) -> Voice:
    """Every check of this part. What the learner's code throws outside a check is a finding as well."""
    voice = Voice(suspect, tell)
    try:
        check_of(suspect.part)(suspect, voice)
    except (NotWritten, NotImplementedError):
        voice.say("not-written")
    except CannotCall as unknown:
        voice.say("cannot-call", argument=str(unknown))
    except MemoryError:
        voice.say("memory")
    except Exception as error:
        said = str(error).strip().splitlines()
        text = f"{type(error).__name__}: {said[0] if said else ''}"[:160]
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [frame for frame in frames if not re.search(OURS, frame.filename)]
        if theirs:
            voice.say("raises", error=text, line=theirs[-1].lineno)
        else:  # the checker failed, not the learner
            voice.say("not-understood", error=text)
    return voice
