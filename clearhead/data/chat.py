"""Conversations as text, and the lines of a `.jsonl` as documents."""

from __future__ import annotations

from typing import Any

from clearhead.typed_json import JSONError, decode_json

from .corpus import DataError, Piece

ANSWER = "<|assistant|>\n"
"""What comes before an answer."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""The same layout as Jinja, for `chat_template.jinja` beside a model that was trained on conversations."""


def chat(messages: list[dict[str, str]], answering: bool = False) -> tuple[Piece, ...]:
    """A conversation in the layout of Phi-3, spelled out in ordinary characters, with the loss on the answers only.

        <|user|>
        What is two and two?<|end|>
        <|assistant|>
        Four.<|end|>            <- the loss is taken on this line

    With `answering` it stops where the assistant is to speak.
    """
    pieces: list[Piece] = []
    asked = ""
    for message in messages:
        asked += f"<|{message['role']}|>\n"
        said = f"{message['content']}<|end|>\n"
        if message["role"] == "assistant":
            pieces += [(asked, False), (said, True)]
            asked = ""
        else:
            asked += said
    asked += ANSWER if answering else ""
    return (*pieces, (asked, False)) if asked else tuple(pieces)


def parse_line(line: str, where: str) -> tuple[Piece, ...]:
    """The pieces of one line of a `.jsonl`."""
    try:
        record = decode_json(line, where, Any)
    except JSONError as error:
        raise DataError(str(error)) from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is {kind_of(record)}, but must be an object with {KEYS}")
    if "messages" in record:
        return chat(checked_messages(record["messages"], where))
    if "prompt" in record and "completion" in record:
        return ((text_of(record, "prompt", where), False), (text_of(record, "completion", where), True))
    if "text" in record:
        return ((text_of(record, "text", where), True),)
    raise DataError(f"{where} has the keys {', '.join(map(repr, record)) or '(none)'}, but needs {KEYS}")


KEYS = "'text', or 'prompt' and 'completion', or 'messages'"


def checked_messages(messages: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where}: 'messages' is {kind_of(messages)}, but must be a list of objects")
    for message in messages:
        for key in ("role", "content"):
            text_of(message, key, f"{where}: a message")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message is by the 'assistant', so there is no answer to learn from")
    return messages


def text_of(record: dict[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {kind_of(value)}, but must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {key!r} holds half of a surrogate pair at place {error.start:,}") from None
    return value


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "missing or null"}
    return names.get(type(value), "a number")
