"""The OpenAPI document of the server, made from the request types."""

from __future__ import annotations

from typing import Any

import msgspec

from .request import ChatRequest, CompletionRequest, DetokenizeRequest, EmbeddingRequest, TokenizeRequest

POSTS: dict[str, tuple[type, str]] = {
    "/v1/completions": (CompletionRequest, "Complete prompts"),
    "/v1/chat/completions": (ChatRequest, "Answer a conversation"),
    "/v1/embeddings": (EmbeddingRequest, "Compute embeddings of texts"),
    "/tokenize": (TokenizeRequest, "Text to token ids"),
    "/detokenize": (DetokenizeRequest, "Token ids to text"),
}
GETS = {
    "/v1/models": "List the models",
    "/health": "Whether the server is ready",
    "/metrics": "Prometheus metrics",
    "/tokenizer_info": "Special tokens and chat template of the tokenizer",
}
ERRORS = (400, 401, 403, 404, 405, 413, 415, 429, 503)


def openapi() -> dict[str, Any]:
    """OpenAPI 3.1, as a dict."""
    kinds = [kind for kind, _ in POSTS.values()]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    answers = {str(status): {"description": "an error"} for status in ERRORS} | {"200": {"description": "the answer"}}
    paths: dict[str, Any] = {path: {"get": {"summary": text, "responses": answers}} for path, text in GETS.items()}
    for (path, (_, text)), schema in zip(POSTS.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        paths[path] = {"post": {"summary": text, "requestBody": body, "responses": answers}}
    info = {"title": "Clearhead", "version": "1", "description": "The OpenAI API for models that Clearhead can run."}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}
