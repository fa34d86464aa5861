"""Messages of a chat request, as chat templates read them."""

from __future__ import annotations

from typing import Any

from .errors import invalid
from .tools import parse_arguments

MESSAGE_FIELDS = ("role", "content", "name", "tool_calls", "tool_call_id", "refusal")


def flatten_messages(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with plain text, as chat templates read them.

    Content that is a list of text parts is joined; other parts are refused. The arguments of a tool call are parsed.
    """
    found = []
    for number, message in enumerate(messages):
        role, content, place = message.get("role"), message.get("content"), f"messages[{number}]"
        if odd := [name for name in message if name not in MESSAGE_FIELDS]:
            raise invalid(f"{place} has the unknown field {odd[0]!r}", "messages")
        if role not in ("system", "developer", "user", "assistant", "tool"):
            raise invalid(f"{place}.role is {role!r}, but must be system, user, assistant or tool", "messages")
        if isinstance(content, list):
            if not all(isinstance(part, dict) and part.get("type") == "text" for part in content):
                raise invalid(f"{place}.content has a part that is not text", "messages")
            content = "".join(str(part.get("text", "")) for part in content)
        if not isinstance(content, str | None):
            raise invalid(f"{place}.content must be text", "messages")
        plain = message | {"content": content or "", "role": "system" if role == "developer" else role}
        if message.get("tool_calls") is not None:
            plain["tool_calls"] = parse_arguments(message["tool_calls"], place)
        found.append(plain)
    return found
