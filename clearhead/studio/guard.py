"""Who may ask the studio: a browser on this machine that was given the token, from the studio's own page.

A page of another site must not read your models through your browser, and a name that points to 127.0.0.1 must not
either. So every request needs a known Host, the cookie, and, to ask a question, a header that only our script sends.
"""

from __future__ import annotations

import hmac
import secrets
from http.cookies import SimpleCookie

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

BODY_BYTES = 1_000_000
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "cross-origin-resource-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
}


class Guard:
    """ASGI middleware in front of the studio's application."""

    def __init__(self, app: ASGIApp, port: int, token: str | None = None) -> None:
        self.app, self.port, self.token = app, port, token or secrets.token_urlsafe(24)
        self.cookie = f"clearhead-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        refusal = self.refusal(request)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def with_headers(message: dict[str, object]) -> None:
            if message["type"] == "http.response.start":
                raw = list(message.get("headers", []))  # type: ignore[call-overload]
                message["headers"] = raw + [(name.encode(), value.encode()) for name, value in HEADERS.items()]
            await send(message)

        await self.app(scope, receive, with_headers)  # type: ignore[arg-type]

    def refusal(self, request: Request) -> Response | None:
        """Why a request is refused, or the redirect that swaps the token for a cookie; None if it may pass."""
        own = {f"127.0.0.1:{self.port}", f"localhost:{self.port}"}
        if request.headers.get("host") not in own:
            return PlainTextResponse("unknown host", 421)
        origin = request.headers.get("origin")
        if origin is not None and origin not in {f"http://{host}" for host in own}:
            return PlainTextResponse("foreign origin", 403)
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("cross-site request", 403)
        given = request.query_params.get("token")
        if given is not None and request.method == "GET" and request.url.path == "/":
            if not hmac.compare_digest(given.encode(), self.token.encode()):
                return PlainTextResponse("wrong token", 403)
            kept = [(key, value) for key, value in request.query_params.multi_items() if key == "lang"]
            answer = RedirectResponse(
                "/" + ("?" + "&".join(f"{k}={v}" for k, v in kept if v in ("en", "zh")) if kept else ""), 303
            )
            answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
            return answer
        cookies = SimpleCookie(request.headers.get("cookie", ""))
        held = cookies[self.cookie].value if self.cookie in cookies else ""
        if not hmac.compare_digest(held.encode(), self.token.encode()):
            return PlainTextResponse("open the address that `clearhead studio` printed: it holds the token", 403)
        if request.method == "POST":
            if request.headers.get("x-clearhead") != "studio" or "json" not in request.headers.get("content-type", ""):
                return JSONResponse({"error": "questions are JSON from the studio's own page"}, 403)
            length = request.headers.get("content-length", "")
            if not length.isdigit() or int(length) > BODY_BYTES:
                return JSONResponse({"error": f"the question is larger than {BODY_BYTES:,} bytes"}, 413)
        elif request.method not in ("GET", "HEAD"):
            return PlainTextResponse("method not allowed", 405)
        return None
