"""The requests of the OpenAI API. Every field is honoured, or refused with 400 and the name of the field."""

from __future__ import annotations

import math
import re
import secrets
from typing import Any, Literal

import msgspec

from clearhead.configs import ConfigError, DecodingConfig
from clearhead.generate.complete import merge_options

from .errors import invalid

TOP_LOGPROBS = 20
STOPS = 16
CHOICES = 128


class ChatCompletionStreamOptions(msgspec.Struct, forbid_unknown_fields=True):
    include_usage: bool = False


class JsonSchema(msgspec.Struct, forbid_unknown_fields=True):
    name: str = ""
    schema: Any = True
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema", "regex"] = "text"
    json_schema: JsonSchema | None = None
    pattern: str | None = None  # of type regex, an extension of ours


class Sampling(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Fields that completions and chat share."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None  # extensions, as in vLLM and llama-server
    min_p: float | None = None
    repetition_penalty: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    stream: bool | None = None
    stream_options: ChatCompletionStreamOptions | None = None
    response_format: ResponseFormat | None = None
    user: str | None = None
    store: bool | None = None
    metadata: dict[str, str] | None = None


class CompletionRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    prompt: str | list[Any]
    max_tokens: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None
    suffix: str | None = None


class ChatRequest(Sampling, forbid_unknown_fields=True, kw_only=True):
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class EmbeddingRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: str | list[Any]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    user: str | None = None


class TokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True


class DetokenizeRequest(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[int]


def read(kind: type[Any], body: Any) -> Any:
    """A request of this kind from parsed JSON."""
    if not isinstance(body, dict):
        raise invalid("the body must be a JSON object")
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        message = str(error)
        found = re.search(r"field `([^`]+)`", message) or re.search(r"at `\$\.([A-Za-z_]+)", message)
        raise invalid(message, found[1] if found else None, "invalid_type") from None


def check_range(request: Any, name: str, low: float, high: float) -> None:
    value = getattr(request, name)
    if value is not None and not (low <= value <= high and math.isfinite(value)):
        raise invalid(f"{name} is {value}, but must be between {low:g} and {high:g}", name)


def check_sampling(request: Sampling) -> None:
    """Refuse values out of range, and fields that this server does not honour."""
    check_range(request, "temperature", 0, 2)
    check_range(request, "top_p", 0, 1)
    check_range(request, "min_p", 0, 1)
    check_range(request, "top_k", 1, 2**31)
    check_range(request, "repetition_penalty", 0.01, 100)
    check_range(request, "n", 1, CHOICES)
    check_range(request, "seed", -(2**63), 2**63 - 1)
    check_range(request, "presence_penalty", -2, 2)
    check_range(request, "frequency_penalty", -2, 2)
    for token, bias in (request.logit_bias or {}).items():
        if not token.isdigit():
            raise invalid(f"logit_bias has the key {token!r}, but keys are token ids", "logit_bias")
        if not -100 <= bias <= 100:
            raise invalid(f"logit_bias of token {token} is {bias}, but must be between -100 and 100", "logit_bias")
    stops = stop_strings(request)
    if len(stops) > STOPS or "" in stops:
        raise invalid(f"stop must be at most {STOPS} strings, none of them empty", "stop")
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options needs stream=true", "stream_options")
    for name in ("store", "metadata"):
        if getattr(request, name):
            raise invalid(f"this server does not store answers; leave {name} out", name)


def stop_strings(request: Sampling) -> tuple[str, ...]:
    stop = request.stop
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def decoding_config(request: Sampling, checkpoint: DecodingConfig) -> DecodingConfig:
    """The decoding options of a request: its own fields, else the checkpoint's sampling, else temperature 1."""
    check_sampling(request)
    temperature = request.temperature
    if temperature is None:
        temperature = checkpoint.temperature if checkpoint.sampling and checkpoint.temperature else 1.0
    options: dict[str, Any] = {
        "temperature": temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "min_p": request.min_p,
        "repetition_penalty": request.repetition_penalty,
        "stop": stop_strings(request),
        "seed": secrets.randbits(62) if request.seed is None else request.seed,
        "beams": 1,
        "n": 1,  # the engine makes the choices of a request
    }
    try:
        return merge_options(checkpoint, options)
    except ConfigError as error:
        raise invalid(str(error), str(error).split(" ")[0].split("=")[0]) from None


def prompts_of(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a completion request: a text, texts, token ids, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise invalid("prompt is empty", "prompt")
    if all(is_token(one) for one in prompt):
        return [list(prompt)]
    if all(isinstance(one, str) for one in prompt):
        return list(prompt)
    if all(isinstance(one, list) and one and all(is_token(token) for token in one) for one in prompt):
        return [list(one) for one in prompt]
    raise invalid("prompt must be a string, a list of strings, token ids, or lists of token ids", "prompt")


def is_token(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
