"""Conversations as text, and lines of a `.jsonl` or rows of a table as documents."""

from __future__ import annotations

from typing import Any

from clearhead.typed_json import JSONError, decode_json

from .corpus import DataError, Piece

ANSWER = "<|assistant|>\n"
"""The text before an answer."""
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
"""The same layout in Jinja, saved as `chat_template.jinja` beside a model trained on conversations."""


def chat(messages: list[dict[str, str]], answering: bool = False) -> tuple[Piece, ...]:
    """A conversation in the layout of Phi-3, in ordinary characters, with loss on the answers only.

        <|user|>
        What is two and two?<|end|>
        <|assistant|>
        Four.<|end|>            <- loss on this line

    With `answering`, the text ends where the assistant answers.

    >>> pieces = chat([{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}])
    >>> [loss for text, loss in pieces]
    [False, True]
    """
    pieces: list[Piece] = []
    question = ""
    for message in messages:
        question += f"<|{message['role']}|>\n"
        content = f"{message['content']}<|end|>\n"
        if message["role"] == "assistant":
            pieces += [(question, False), (content, True)]
            question = ""
        else:
            question += content
    question += ANSWER if answering else ""
    return (*pieces, (question, False)) if question else tuple(pieces)


def parse_line(line: str, where: str) -> tuple[Piece, ...]:
    """The pieces of one line of a `.jsonl`."""
    try:
        record = decode_json(line, where, Any)
    except JSONError as error:
        raise DataError(str(error)) from None
    if not isinstance(record, dict):
        raise DataError(f"{where} is {kind_of(record)}, but must be an object with {KEYS}")
    return parse_record(record, where)


def parse_record(record: dict[str, Any], where: str) -> tuple[Piece, ...]:
    """The pieces of one record: a line of a `.jsonl`, or a row of a table."""
    if "messages" in record:
        return chat(check_messages(record["messages"], where))
    if "prompt" in record and "completion" in record:
        return ((text_of(record, "prompt", where), False), (text_of(record, "completion", where), True))
    if "text" in record:
        return ((text_of(record, "text", where), True),)
    raise DataError(f"{where} has the keys {', '.join(map(repr, record)) or '(none)'}, but needs {KEYS}")


KEYS = "'text', or 'prompt' and 'completion', or 'messages'"


def check_messages(messages: Any, where: str) -> list[dict[str, str]]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{where}: 'messages' is {kind_of(messages)}, but must be a list of objects")
    for message in messages:
        for key in ("role", "content"):
            text_of(message, key, f"{where}: a message")
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"{where}: no message has the role 'assistant', so there is no answer to learn from")
    return messages


def text_of(record: dict[str, Any], key: str, where: str) -> str:
    value = record.get(key)
    if not isinstance(value, str):
        raise DataError(f"{where}: {key!r} is {kind_of(value)}, but must be a text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: {key!r} has half of a surrogate pair at position {error.start:,}") from None
    return value


def kind_of(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "missing or null"}
    return names.get(type(value), "a number")
