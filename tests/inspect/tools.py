"""Small models with weights large enough to show a fault, and a tokenizer of letters."""

from __future__ import annotations

from clearhead.configs import CharactersConfig
from clearhead.models.model import Model, SequenceModel, build
from clearhead.models.presets import preset
from clearhead.tokenize import Tokenizer, make
from tests.invariants.tools import randomise

LETTERS = "abcdefghijklmnopqrstuvwxyz ."


def letters() -> Tokenizer:
    return make(CharactersConfig(), [LETTERS])


def small(name: str) -> Model:
    model = build(preset(name))
    randomise(model)
    return model.eval()


def writer() -> SequenceModel:
    """A little LLaMA whose vocabulary is letters."""
    config = (
        preset("tiny-llama")
        .with_value("embedding.vocabulary", len(LETTERS))
        .with_value("head.vocabulary", len(LETTERS))
    )
    model = build(config)
    randomise(model)
    assert isinstance(model, SequenceModel)
    return model.eval()
