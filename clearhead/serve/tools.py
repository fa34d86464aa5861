"""Tools in chat requests: the template shows them to the model, and the model's call is read from its text."""

from __future__ import annotations

import json
import re
import uuid
from typing import Any

from clearhead.generate.template import ChatTemplate

from .errors import invalid
from .request import ChatRequest

CALL = re.compile(r"<tool_call>\s*(\{.*?\})\s*</tool_call>", re.DOTALL)


def check_tools(asked: ChatRequest, template: ChatTemplate) -> list[dict[str, Any]]:
    """The tools to show to the model; raises if a tool is malformed or the template cannot show tools."""
    choice = asked.tool_choice
    if not asked.tools:
        if choice not in (None, "none", "auto"):
            raise invalid("tool_choice needs tools", "tool_choice")
        return []
    for number, tool in enumerate(asked.tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not function.get("name"):
            raise invalid(f"tools[{number}] must be a function with a name", "tools")
    names = [tool["function"]["name"] for tool in asked.tools]
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise invalid(f"tool_choice is {choice!r}, but must be none, auto, required or a function", "tool_choice")
    if isinstance(choice, dict) and chosen_name(choice) not in names:
        raise invalid(f"tool_choice names {chosen_name(choice)!r}, which is not one of tools", "tool_choice")
    if choice == "none":
        return []
    if not template.uses("tools"):
        raise invalid("this model's chat template does not support tools", "tools")
    return asked.tools


def chosen_name(choice: dict[str, Any]) -> Any:
    function = choice.get("function")
    return function.get("name") if isinstance(function, dict) else None


def tool_schema(asked: ChatRequest) -> dict[str, Any] | None:
    """The schema of a forced call; None if the model may answer with text."""
    choice = asked.tool_choice
    if not asked.tools or choice in (None, "auto", "none"):
        return None
    wanted = [tool["function"] for tool in asked.tools]
    if isinstance(choice, dict):
        wanted = [one for one in wanted if one["name"] == chosen_name(choice)]
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, "arguments": one.get("parameters") or {"type": "object"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for one in wanted
    ]
    return calls[0] if len(calls) == 1 else {"anyOf": calls}


def parse_arguments(calls: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls of an earlier message, their arguments as an object: OpenAI sends them as JSON text."""
    if not isinstance(calls, list) or not all(
        isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls
    ):
        raise invalid(f"{place}.tool_calls must be a list of function calls", "messages")
    found = []
    for call in calls:
        function = dict(call["function"])
        if isinstance(function.get("arguments"), str):
            try:
                function["arguments"] = json.loads(function["arguments"])
            except (ValueError, RecursionError):
                raise invalid(f"{place}.tool_calls has arguments that are not JSON", "messages") from None
        found.append(call | {"function": function})
    return found


def parse_tool_calls(text: str) -> list[dict[str, Any]]:
    """Calls written as <tool_call>{…}</tool_call> or as one JSON object with name and arguments."""
    found = CALL.findall(text) or [text.strip()]
    calls = []
    for one in found:
        try:
            call = json.loads(one)
        except ValueError:
            continue
        if isinstance(call, dict) and isinstance(call.get("name"), str) and isinstance(call.get("arguments"), dict):
            function = {"name": call["name"], "arguments": json.dumps(call["arguments"], ensure_ascii=False)}
            calls.append({"id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function})
    return calls
