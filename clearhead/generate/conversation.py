"""A conversation with a model. The engine's prefix cache holds the turns before, so each turn reads what is new."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from clearhead.models.model import SequenceModel

from .complete import TextGenerator
from .engine import EngineCore, EngineOptions
from .job import JobOptions
from .template import ChatTemplate, Message

ROOM = 4096  # length of the first engine, in tokens, if the model has no context length


class Conversation:
    """The messages so far, and an engine that has read them."""

    def __init__(self, generator: TextGenerator, template: ChatTemplate, system: str | None = None) -> None:
        if not isinstance(generator.model, SequenceModel) or generator.tokenizer is None:
            raise ValueError("a conversation needs a language model with a tokenizer")
        self.tokenizer, self.template = generator.tokenizer, template
        self.generator = with_turn_end(generator, template)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.engine = self.new_engine(self.generator.context or ROOM)

    def new_engine(self, length: int) -> EngineCore:
        return EngineCore(self.generator, EngineOptions(rows=1, length=length))

    def reply(self, text: str) -> Iterator[str]:
        """Yield the model's answer piece by piece. The turn is added to `messages` once it is complete."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.tokenizer.prompt(self.template.render(messages), around=False)
        self.generator.check(ids, "conversation")
        limit, config = self.generator.limit(ids), self.generator.config
        if len(ids) + limit > self.engine.length + 1:  # only a model without a context length gets here
            self.engine = self.new_engine(2 * (len(ids) + limit))
        config = replace(config, seed=(config.seed or 0) + len(self.messages))  # other random numbers every turn
        job = self.engine.submit(ids, JobOptions(config=config, limit=limit))
        answer = ""
        try:
            while not job.done:
                self.engine.step()
                for delta in job.take():
                    answer += delta.text
                    if delta.text:
                        yield delta.text
            self.messages = [*messages, {"role": "assistant", "content": answer.strip()}]
        finally:  # also if the caller stops reading: the row must become free
            job.cancel()
            self.engine.step()


def with_turn_end(generator: TextGenerator, template: ChatTemplate) -> TextGenerator:
    """A generator that also stops where the template ends a turn: at a token, or else at a text."""
    mark = template.turn_end()
    if not mark or generator.tokenizer is None:
        return generator
    ids, config = generator.tokenizer.prompt(mark, around=False), generator.config
    if len(ids) == 1:
        return replace(generator, config=replace(config, ends=tuple({*config.ends, *ids})))
    return replace(generator, config=replace(config, stop=(*config.stop, mark)))
