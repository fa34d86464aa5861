"""A conversation: every turn goes on from what the model remembers of the turns before."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from clearhead.models.model import SequenceModel
from clearhead.nn.cache import DecodeState

from .complete import Task
from .loop import Begun, write
from .template import ChatTemplate, Message

ROOM = 4096  # tokens to begin with, where the model has no bound


class Conversation:
    """Who said what, and the state of the model after it."""

    def __init__(self, task: Task, template: ChatTemplate, system: str | None = None) -> None:
        if not isinstance(task.model, SequenceModel) or task.tokenizer is None:
            raise ValueError("a conversation takes a language model and its tokenizer")
        self.model, self.tokenizer, self.template = task.model, task.tokenizer, template
        self.task = ending(task, template)
        self.messages: list[Message] = [{"role": "system", "content": system}] if system else []
        self.read: list[int] = []  # tokens that the state holds
        self.state: DecodeState | None = None
        self.room = 0

    def reply(self, text: str) -> Iterator[str]:
        """The model's answer, piece by piece. The turn counts once it is complete."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self.tokenizer.prompt(self.template.render(messages), around=False)
        self.task.check(ids, "conversation")
        row = self.task.row(0, ids, sample=len(self.messages))  # which draws other numbers every turn
        begun = self.begin(ids, row.limit)
        for _, piece in write(self.model, begun, [row], self.task.config):
            self.read = [*ids, *row.tokens[:-1]]
            if piece:
                yield piece
        self.messages = [*messages, {"role": "assistant", "content": row.text.strip()}]

    def begin(self, ids: list[int], room: int) -> Begun:
        """Read what the state does not hold yet: what comes after the longest beginning that both have."""
        shared = next((i for i, pair in enumerate(zip(self.read, ids, strict=False)) if pair[0] != pair[1]), None)
        shared = min(len(self.read), len(ids) - 1) if shared is None else min(shared, len(ids) - 1)
        with torch.inference_mode():
            state = self.rewound(shared, len(ids) + room)
            new = ids[int(state.lengths[0]) :]
            logits = self.model.next_logits(torch.tensor([new], device=state.lengths.device), state)
            seen = torch.zeros_like(logits, dtype=torch.bool)
            seen[0, ids] = True
        self.state, self.read = state, ids
        return Begun(state, logits, seen)

    def rewound(self, length: int, needed: int) -> DecodeState:
        """The state with its first `length` tokens; an empty one where it cannot go back so far or has no room."""
        if self.state is not None and needed <= self.room:
            try:
                if length < len(self.read):
                    self.state.rewind(torch.tensor([length], device=self.state.lengths.device))
                return self.state
            except ValueError:
                pass  # of a window or a summary: read it all again
        self.room = self.task.context or max(ROOM, 2 * needed)
        return self.model.init_state(1, self.room)


def ending(task: Task, template: ChatTemplate) -> Task:
    """The task, with whatever ends a turn in the template's layout as an end too: a token, or else a text."""
    mark = template.turn_end()
    if not mark or task.tokenizer is None:
        return task
    ids, config = task.tokenizer.prompt(mark, around=False), task.config
    if len(ids) == 1:
        return replace(task, config=replace(config, ends=tuple({*config.ends, *ids})))
    return replace(task, config=replace(config, stop=(*config.stop, mark)))
