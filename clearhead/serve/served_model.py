"""A model that the server offers: its public name, its engine, and what it can do."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property
from threading import Lock
from typing import Any, Unpack

from clearhead.configs import LMHeadConfig
from clearhead.generate.engine import EngineSettings
from clearhead.generate.speculate import Draft
from clearhead.generate.template import ChatTemplate, TemplateError
from clearhead.models.model import Model, SequenceModel

from .engine import Engine
from .errors import ApiError
from .logprobs import TokenTexts


@dataclass
class ServedModel:
    """A model under its public name; `engine` is None for encoders, which only compute embeddings."""

    name: str
    model: Model
    engine: Engine | None
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def writer(self) -> Engine:
        if self.engine is None:
            raise ApiError(
                400, f"{self.name} is an encoder and cannot generate text; use /v1/embeddings", param="model"
            )
        return self.engine

    @cached_property
    def token_texts(self) -> TokenTexts:
        return TokenTexts(self.writer.core.tokenizer)

    @property
    def template(self) -> ChatTemplate:
        tokenizer = self.writer.core.tokenizer
        try:
            if tokenizer is not None and self.model.origin is not None:
                return ChatTemplate.load(self.model.origin, tokenizer)
        except TemplateError:
            pass  # its message names a folder of this machine
        message = f"{self.name} has no chat template; use /v1/completions"
        raise ApiError(400, message, param="messages", code="no_chat_template")


def model_json(served: ServedModel) -> dict[str, Any]:
    return {"id": served.name, "object": "model", "created": served.created, "owned_by": "clearhead"}


def serve_model(
    name: str,
    model: Model,
    *,
    draft: Draft | None = None,
    lock: Lock | None = None,
    **options: Unpack[EngineSettings],
) -> ServedModel:
    """A model with its engine; encoders have none."""
    engine = Engine(model, draft=draft, lock=lock, **options) if writes_text(model) else None
    return ServedModel(name, model, engine)


def writes_text(model: Model) -> bool:
    if not isinstance(model, SequenceModel) or not isinstance(model.config.head, LMHeadConfig):
        return False
    try:
        model.init_state(1, 1)
    except ValueError:  # a mask that reads later tokens
        return False
    return True
