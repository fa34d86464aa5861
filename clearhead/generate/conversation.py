"""A conversation with a model. Each turn reads only what is new; the state holds the turns before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from clearhead.models.model import SequenceModel
from clearhead.nn.cache import DecodeState

from .complete import TextGenerator
from .loop import PrefilledBatch, decode
from .template import ChatTemplate, Message

ROOM = 4096  # size of the first state, in tokens, if the model has no context length


class Conversation:
    """The messages so far, and the model's state after them."""

    def __init__(self, generator: TextGenerator, template: ChatTemplate, system: str | None = None) -> None:
        if not isinstance(generator.model, SequenceModel) or generator.tokenizer is None:
            raise ValueError("a conversation needs a language model with a tokenizer")
        self.model, self.tokenizer, self.template = generator.model, generator.tokenizer, template
        self.generator = with_turn_end(generator, template)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.read: list[int] = []  # tokens that the state holds
        self.state: DecodeState | None = None
        self.room = 0

    def reply(self, text: str) -> Iterator[str]:
        """Yield the model's answer piece by piece. The turn is added to `messages` once it is complete."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.tokenizer.prompt(self.template.render(messages), around=False)
        self.generator.check(ids, "conversation")
        row = self.generator.row(0, ids, sample=len(self.messages))  # another random stream every turn
        batch = self.prefill(ids, row.limit)
        for _, piece in decode(self.model, batch, [row], self.generator.config):
            self.read = [*ids, *row.tokens[:-1]]
            if piece:
                yield piece
        self.messages = [*messages, {"role": "assistant", "content": row.text.strip()}]

    def prefill(self, ids: list[int], room: int) -> PrefilledBatch:
        """Read the tokens after the longest prefix that the state already holds."""
        shared = next((i for i, pair in enumerate(zip(self.read, ids, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(self.read), len(ids) - 1) if shared is None else min(shared, len(ids) - 1)
        with torch.inference_mode():
            state = self.rewind_to(shared, len(ids) + room)
            new = ids[int(state.lengths[0]) :]
            logits = self.model.next_logits(torch.tensor([new], device=state.lengths.device), state)
            seen = torch.zeros_like(logits, dtype=torch.bool)
            seen[0, ids] = True
        self.state, self.read = state, ids
        return PrefilledBatch(state, logits, seen)

    def rewind_to(self, length: int, needed: int) -> DecodeState:
        """The state cut to `length` tokens; an empty state if it cannot go back that far or has no room."""
        if self.state is not None and needed <= self.room:
            try:
                if length < len(self.read):
                    self.state.rewind(torch.tensor([length], device=self.state.lengths.device))
                return self.state
            except ValueError:
                pass  # a window or a recurrent state cannot go back: read everything again
        self.room = self.generator.context or max(ROOM, 2 * needed)
        return self.model.init_state(1, self.room)


def with_turn_end(generator: TextGenerator, template: ChatTemplate) -> TextGenerator:
    """A generator that also stops where the template ends a turn: at a token, or else at a text."""
    mark = template.turn_end()
    if not mark or generator.tokenizer is None:
        return generator
    ids, config = generator.tokenizer.prompt(mark, around=False), generator.config
    if len(ids) == 1:
        return replace(generator, config=replace(config, ends=tuple({*config.ends, *ids})))
    return replace(generator, config=replace(config, stop=(*config.stop, mark)))
