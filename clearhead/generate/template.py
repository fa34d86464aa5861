"""Chat templates: Jinja programs that come with a checkpoint and lay a conversation out as text.

They are run in Jinja's sandbox, with what `transformers` gives them: nothing of the machine can be reached.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from clearhead.tokenize import Tokenizer

Message = Mapping[str, Any]
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


class TemplateError(ValueError):
    """A chat template that is missing, or refuses a conversation."""


class ChatTemplate:
    """The layout in which a model was taught to converse."""

    def __init__(self, source: str, tokens: Mapping[str, str]) -> None:
        import jinja2

        self.tokens = tokens
        try:
            self.template = environment().from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateError(f"the chat template is not Jinja: {error}") from None

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer) -> ChatTemplate:
        """`chat_template.jinja`, or the field of `tokenizer_config.json`; of several the one called default."""
        file = folder / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else tokenizer.settings.get("chat_template")
        if isinstance(source, list):
            source = {one["name"]: one["template"] for one in source}.get("default")
        if not source:
            raise TemplateError(
                f"{folder} has no chat template, so it was not made for conversations; see `clearhead generate`"
            )
        named = {role: tokenizer.settings[role] for role in ROLES if tokenizer.settings.get(role)}
        return cls(source, {role: name["content"] if isinstance(name, dict) else name for role, name in named.items()})

    def render(self, messages: Sequence[Message], *, answering: bool = True, **more: Any) -> str:
        """The conversation as text; `answering`: up to where the assistant is to speak."""
        import jinja2

        given = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": answering}
        try:
            return self.template.render(given | dict(self.tokens) | more)
        except (jinja2.TemplateError, TypeError, ArithmeticError, RecursionError, LookupError) as error:
            raise TemplateError(f"the chat template refuses this conversation: {error}") from None

    def turn_end(self) -> str:
        """What the template writes after an answer, such as `<|im_end|>`: a model that writes it is done."""
        mark = "⁂ANSWER⁂"
        asked: list[Message] = [{"role": "user", "content": "?"}]
        try:
            text = self.render([*asked, {"role": "assistant", "content": mark}], answering=False)
        except TemplateError:
            return ""
        after = text.partition(mark)[2].split()
        return after[0] if after else ""


def environment() -> Any:
    """Jinja as chat templates expect it."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} … {% endgeneration %}` marks what to learn from, and is laid out like any text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    def refuse(message: str) -> None:
        raise TemplateError(f"the chat template refuses this conversation: {message}")

    def to_json(value: Any, ensure_ascii: bool = False, **layout: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **layout)

    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = to_json
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made
