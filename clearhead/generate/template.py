"""Chat templates: Jinja programs that come with a checkpoint and format a conversation as text.

They run in Jinja's sandbox with the same functions that `transformers` provides, so they cannot reach the machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

from clearhead.tokenize import Tokenizer

Message = Mapping[str, Any]
SECONDS = 5.0  # that a template may run
LARGEST = 10_000_000  # characters that a template may write
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TemplateError(ValueError):
    """The chat template is missing or rejects the conversation."""


class ChatTemplate:
    """The format in which the model was trained to chat."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        import jinja2

        self.tokens, self.source = tokens, source
        try:
            self.template = environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template has a Jinja syntax error: {error}") from None

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """Read `chat_template.jinja`, or the default template of `tokenizer_config.json`."""
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer.settings.get("chat_template")
        if isinstance(source, list):
            source = {one["name"]: one["template"] for one in source}.get("default")
        if not source:
            raise TemplateError(f"{folder} has no chat template, so it is not a chat model; use `clearhead generate`")
        named = {role: tokenizer.settings[role] for role in ROLES if tokenizer.settings.get(role)}
        return cls(source, {role: name["content"] if isinstance(name, dict) else name for role, name in named.items()})

    def render(self, messages: Sequence[Message], *, prompt: bool = True, **more: Any) -> str:
        """The conversation as text; with `prompt`, it ends where the assistant's answer begins."""
        import jinja2

        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": prompt}
        try:
            with time_limit(SECONDS):
                return limit_size(self.template.generate(given | dict(self.tokens) | more))
        except (jinja2.TemplateError, TypeError, ArithmeticError, RecursionError, LookupError) as error:
            raise TemplateError(f"the chat template rejects this conversation: {error}") from None

    def uses(self, name: str) -> bool:
        """Whether the template reads a variable, such as `tools`."""
        from jinja2 import meta

        return name in meta.find_undeclared_variables(self.template.environment.parse(self.source))

    def turn_end(self) -> str:
        """The text that the template puts after an answer, such as `<|im_end|>`; it ends the model's turn."""
        mark = "⁂ANSWER⁂"
        question: list[Message] = [{"role": "user", "content": "?"}]
        try:
            text = self.render([*question, {"role": "assistant", "content": mark}], prompt=False)
        except TemplateError:
            return ""
        after = text.partition(mark)[2].split()
        return after[0] if after else ""


def limit_size(pieces: Iterable[str]) -> str:
    """Join the output of a template; raise if it is too large."""
    found, size = [], 0
    for piece in pieces:
        found.append(piece)
        size += len(piece)
        if size > LARGEST:
            raise TemplateError(f"the chat template writes more than {LARGEST:,} characters; it may be damaged")
    return "".join(found)


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise `TemplateError` in template code that runs longer than this. Templates run in this thread."""
    end, before = time.monotonic() + seconds, sys.gettrace()

    def check(frame: Any, event: str, argument: Any) -> Any:
        if time.monotonic() > end:
            raise TemplateError(f"the chat template runs longer than {seconds:g} s; it may be damaged")
        return check

    def trace(frame: Any, event: str, argument: Any) -> Any:
        return check if frame.f_code.co_filename == "<template>" else None

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def environment() -> Any:
    """Jinja with the filters and functions that chat templates expect."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Sandbox(ImmutableSandboxedEnvironment):
        """Jinja's sandbox, which also refuses products that would fill the memory."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            texts = [x for x in (left, right) if hasattr(x, "__len__")]
            numbers = [abs(x) for x in (left, right) if isinstance(x, int)]
            if texts and numbers and len(texts[0]) * numbers[0] > LARGEST:
                raise TemplateError(f"the chat template builds a value of more than {LARGEST:,} items")
            if operator == "**" and numbers and max(numbers) > 1000:
                raise TemplateError(f"the chat template computes {left!r} ** {right!r}, which is too large")
            return super().call_binop(context, operator, left, right)

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}` marks the text to train on; it renders like any other text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(f"the chat template rejects this conversation: {message}")

    def to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    jinja = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    jinja.filters["tojson"] = to_json
    jinja.globals["raise_exception"] = refuse
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja
