"""Chat templates: Jinja programs that come with a checkpoint and format a conversation as text.

They run in Jinja's sandbox with the same functions that `transformers` provides, so they cannot reach the machine.
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
            return self.template.render(given | dict(self.tokens) | more)
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


def environment() -> Any:
    """Jinja with the filters and functions that chat templates expect."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

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

    jinja = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    jinja.filters["tojson"] = to_json
    jinja.globals["raise_exception"] = refuse
    jinja.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return jinja
