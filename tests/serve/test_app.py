"""The guards of the HTTP application, and its event streams."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from clearhead.serve.app import EventStream, Guards, build_app, local_hosts, read_json
from clearhead.serve.errors import invalid


async def echo(request: Request) -> JSONResponse:
    return JSONResponse(await read_json(request))


async def refuse(request: Request) -> JSONResponse:
    raise invalid("top is 99, but must be at most 20", "top")


async def fail(request: Request) -> JSONResponse:
    raise RuntimeError("secret text of a prompt")


async def count(request: Request) -> EventStream:
    async def events() -> AsyncIterator[dict[str, int]]:
        for number in range(3):
            await asyncio.sleep(0)
            yield {"number": number}

    return EventStream(events(), lambda: None)


ROUTES = [
    Route("/echo", echo, methods=["POST"]),
    Route("/refuse", refuse),
    Route("/fail", fail),
    Route("/count", count),
]


def client(**guards) -> TestClient:
    app = build_app(ROUTES, Guards(hosts=local_hosts(80), **guards))
    return TestClient(app, base_url="http://localhost", raise_server_exceptions=False)


def test_json_goes_through() -> None:
    assert client().post("/echo", json={"a": 1}).json() == {"a": 1}


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({"host": "evil.example"}, "{}", 403, "foreign_host"),
        ({"origin": "http://evil.example"}, "{}", 403, "foreign_origin"),
        ({"content-type": "text/plain"}, "{}", 415, "unsupported_media_type"),
        ({"content-type": "application/json"}, "{", 400, "invalid_json"),
        ({"content-type": "application/json"}, "[" * 100_000, 400, "invalid_json"),
        ({"content-type": "application/json"}, "x" * 200_001, 413, "request_too_large"),
    ],
)
def test_guards_refuse_with_openai_errors(headers: dict, body: str, status: int, code: str) -> None:
    answer = client(body=200_000).post("/echo", content=body, headers=headers)
    assert answer.status_code == status
    assert answer.json()["error"]["code"] == code
    assert set(answer.json()["error"]) == {"message", "type", "param", "code"}


def test_body_without_a_length_is_limited() -> None:
    chunks = (b" " * 1000 for _ in range(300))
    answer = client(body=200_000).post("/echo", content=chunks, headers={"content-type": "application/json"})
    assert answer.status_code == 413


def test_key_is_needed_and_compared() -> None:
    guarded = client(key="right")
    assert guarded.get("/refuse").json()["error"]["code"] == "missing_api_key"
    assert guarded.get("/refuse", headers={"authorization": "Bearer wrong"}).status_code == 401
    assert guarded.get("/refuse", headers={"authorization": "Bearer right"}).status_code == 400


def test_allowed_origin_gets_cors_headers() -> None:
    page = client(origins=("http://page.example",))
    asked = {"origin": "http://page.example", "access-control-request-method": "POST"}
    assert page.options("/echo", headers=asked).headers["access-control-allow-origin"] == "http://page.example"
    answer = page.post("/echo", json=[], headers={"origin": "http://page.example"})
    assert answer.headers["access-control-allow-origin"] == "http://page.example"
    assert "access-control-allow-origin" not in page.post("/echo", json=[]).headers


def test_errors_name_the_param_and_hide_the_traceback(caplog: pytest.LogCaptureFixture) -> None:
    answer = client().get("/refuse")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top")
    failed = client().get("/fail")
    assert failed.status_code == 500
    assert "secret" not in failed.text + caplog.text
    assert client().get("/nowhere").json()["error"]["code"] == "not_found"
    assert client().get("/echo").json()["error"]["code"] == "method_not_allowed"


def test_events_are_streamed_and_end_with_done() -> None:
    lines = client().get("/count").text.split("\n\n")
    assert lines == ['data: {"number":0}', 'data: {"number":1}', 'data: {"number":2}', "data: [DONE]", ""]
