"""The HTTP application that `clearhead serve` and `clearhead studio` share: routes behind one set of guards.

    app = build_app([Route("/hello", hello)], Guards(hosts=local_hosts(8000)))

Every request passes the guards before its route runs:

    Host        must be one of ours, or a web page elsewhere could reach us through its own name (DNS rebinding)  403
    Origin      must be our own page or one of --origin                                                           403
    API key     `Authorization: Bearer KEY`, compared in constant time                                            401
    body        at most `body` bytes                                                                              413
    type        a request with a body must be application/json                                                    415
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Lifespan, Message, Receive, Scope, Send

from .errors import ApiError

BODY = 4 * 1024 * 1024
BODY_SECONDS = 30.0  # that a client has to send its body
BODY_METHODS = ("POST", "PUT", "PATCH")
log = logging.getLogger("clearhead.serve")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Guards:
    """What a request must satisfy before its route runs."""

    hosts: frozenset[str]  # allowed values of the Host header, such as "localhost:8000"; empty: any
    origins: tuple[str, ...] = ()  # other web pages that may call the API (CORS)
    key: str | None = None  # the API key; None: no key needed
    body: int = BODY  # the largest request body, in bytes
    open_paths: frozenset[str] = frozenset({"/", "/health"})  # need no key; must show nothing private


def local_hosts(port: int, *names: str) -> frozenset[str]:
    """The Host headers under which a server on this machine is reached."""
    found = {"localhost", "127.0.0.1", "[::1]", *names}
    return frozenset({f"{name}:{port}" for name in found} | found)


def build_app(routes: Sequence[BaseRoute], guards: Guards, *, lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    """A Starlette application with these routes behind the guards. Every error has the OpenAI shape."""
    app = Starlette(
        routes=list(routes),
        lifespan=lifespan,
        exception_handlers={ApiError: send_api_error, HTTPException: send_http_error, Exception: send_server_error},
    )
    app.add_middleware(GuardMiddleware, guards=guards)
    return app


class GuardMiddleware:
    """Refuses requests that break a guard, limits the body, and adds CORS headers for allowed origins."""

    def __init__(self, app: ASGIApp, guards: Guards) -> None:
        self.app, self.guards = app, guards

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, origin = Headers(scope=scope), None
        try:
            origin = self.check_origin(headers)
            if scope["method"] == "OPTIONS" and origin and "access-control-request-method" in headers:
                await preflight(origin)(scope, receive, send)
                return
            self.check(scope, headers)
        except ApiError as error:
            await error.response()(scope, receive, with_cors(send, origin))
            return
        await self.app(scope, self.limit_body(receive), with_cors(send, origin))

    def check_origin(self, headers: Headers) -> str | None:
        """The origin to allow by CORS; None if the request comes from our own page or from no page."""
        host, origin = headers.get("host", ""), headers.get("origin")
        if self.guards.hosts and host.lower() not in self.guards.hosts:
            raise ApiError(403, f"the Host header {host!r} is not a name of this server", code="foreign_host")
        if origin is None or origin.lower() in (f"http://{host}".lower(), f"https://{host}".lower()):
            return None
        if origin not in self.guards.origins and "*" not in self.guards.origins:
            message = f"pages of {origin} may not call this server; start it with --origin {origin} to allow them"
            raise ApiError(403, message, code="foreign_origin")
        return origin

    def check(self, scope: Scope, headers: Headers) -> None:
        if self.guards.key is not None and scope["path"] not in self.guards.open_paths:
            check_key(headers, self.guards.key)
        length = headers.get("content-length", "0")
        if not length.isdigit():
            raise ApiError(400, f"the Content-Length {length!r} is not a number", code="invalid_header")
        if int(length) > self.guards.body:
            raise self.too_large(int(length))
        has_body = int(length) > 0 or "transfer-encoding" in headers
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if scope["method"] in BODY_METHODS and has_body and kind != "application/json":
            message = f"the Content-Type is {kind or 'missing'}, but must be application/json"
            raise ApiError(415, message, code="unsupported_media_type")

    def limit_body(self, receive: Receive) -> Receive:
        """Count the bytes of a body that is sent in chunks without a length."""
        total = 0

        async def count_requests() -> Message:
            nonlocal total
            message = await receive()
            total += len(message.get("body", b""))
            if total > self.guards.body:
                raise self.too_large(total)
            return message

        return count_requests

    def too_large(self, size: int) -> ApiError:
        message = f"the request has {size:,} bytes, but this server reads at most {self.guards.body:,}"
        return ApiError(413, message, code="request_too_large")


def check_key(headers: Headers, key: str) -> None:
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not given:
        message = "this server needs an API key: send the header `Authorization: Bearer YOUR_KEY`"
        raise ApiError(401, message, code="missing_api_key", headers={"WWW-Authenticate": "Bearer"})
    if not hmac.compare_digest(given.strip().encode(), key.encode()):
        message = "the API key is wrong"
        raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def preflight(origin: str) -> Response:
    """The answer to a browser that asks whether a page of an allowed origin may call."""
    return Response(
        status_code=204,
        headers={
            "Access-Control-Allow-Origin": origin,
            "Access-Control-Allow-Methods": "GET, POST, PUT, DELETE",
            "Access-Control-Allow-Headers": "Authorization, Content-Type",
            "Access-Control-Max-Age": "600",
            "Vary": "Origin",
        },
    )


def with_cors(send: Send, origin: str | None) -> Send:
    if origin is None:
        return send

    async def send_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers["Access-Control-Allow-Origin"] = origin
            headers.add_vary_header("Origin")
        await send(message)

    return send_headers


# ---- errors


async def send_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def send_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = {404: f"there is no {request.url.path}", 405: f"{request.url.path} does not answer {request.method}"}
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    text = message.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, text, code=code, headers=dict(error.headers or {})).response()


async def send_server_error(request: Request, error: Exception) -> Response:
    log.error("%s %s failed: %s", request.method, request.url.path, type(error).__name__)
    return ApiError(500, "the server failed to answer; see its log", code="server_error").response()


# ---- reading requests and sending events


async def read_json(request: Request) -> Any:
    """The JSON body of a request, which must arrive within BODY_SECONDS."""
    try:
        async with asyncio.timeout(BODY_SECONDS):
            body = await request.body()
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {BODY_SECONDS:g} s", code="slow_request") from None
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not valid JSON: {error}", code="invalid_json") from None


async def wait_for_disconnect(request: Request) -> None:
    """Return when the client has closed the connection. The body must have been read before."""
    while True:
        if (await request.receive())["type"] == "http.disconnect":
            return


async def until_disconnect(request: Request, work: Awaitable[Result], cancel: Callable[[], object]) -> Result:
    """Wait for `work`. If the client leaves first, call `cancel` and stop."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(wait_for_disconnect(request))
    try:
        await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(499, "the client closed the connection", code="client_closed")
        return task.result()
    finally:
        leaving.cancel()
        if not task.done():
            task.cancel()
            cancel()


class EventStream(Response):
    """Server-sent events: each item of `events` is sent as one `data:` line, then `data: [DONE]`.

    `cancel` is called if the client leaves before the end. Items are dicts (sent as JSON) or ready strings.
    """

    media_type = "text/event-stream"

    def __init__(
        self, events: AsyncIterator[Any], cancel: Callable[[], object], *, done: str | None = "[DONE]"
    ) -> None:
        self.events, self.cancel, self.done = events, cancel, done
        self.status_code, self.background, self.body = 200, None, b""
        self.init_headers({"Cache-Control": "no-store", "X-Accel-Buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        sending = asyncio.ensure_future(self.send_all(send))
        leaving = asyncio.ensure_future(wait_for_disconnect(request))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()
                self.cancel()

    async def send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        try:
            async for event in self.events:
                await send_event(send, event)
        except ApiError as error:
            await send_event(send, error.body())
        if self.done is not None:
            await send_event(send, self.done)
        await send({"type": "http.response.body", "body": b""})


async def send_event(send: Send, event: Any) -> None:
    data = event.encode() if isinstance(event, str) else msgspec.json.encode(event)
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})


def json_response(content: Any, status: int = 200) -> JSONResponse:
    return JSONResponse(content, status)
