"""Who may use the studio: a browser on this machine that was given the token, from the studio's own page.

`clearhead.serve.app` checks Host, Origin, body size and content type. This adds what a page needs: a token in
the address once, then a cookie that other sites cannot send, and a header that only the studio's script sets.
"""

from __future__ import annotations

import hmac
import secrets
from http.cookies import CookieError, SimpleCookie

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

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


class TokenGuard:
    """ASGI middleware that asks for the token or the cookie."""

    def __init__(self, app: ASGIApp, port: int, token: str | None = None) -> None:
        self.app, self.token = app, token or secrets.token_urlsafe(24)
        self.cookie = f"clearhead-{port}"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self.refusal(Request(scope)) if scope["type"] == "http" else None

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", []), *more]
            await send(message)

        await (self.app if refusal is None else refusal)(scope, receive, with_headers)

    def refusal(self, request: Request) -> Response | None:
        """The answer to a request that may not pass, or the redirect that swaps the token for a cookie."""
        if request.headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
            return PlainTextResponse("requests from other sites are refused", 403)
        given = request.query_params.get("token")
        if given is not None and request.method == "GET" and request.url.path == "/":
            return self.swap_token(request, given)
        try:
            cookies = SimpleCookie(request.headers.get("cookie", ""))
        except CookieError:
            cookies = SimpleCookie()
        held = cookies[self.cookie].value if self.cookie in cookies else ""
        if not hmac.compare_digest(held.encode(), self.token.encode()):
            return PlainTextResponse("open the address that `clearhead studio` printed: it holds the token", 403)
        if request.method == "POST" and request.headers.get("x-clearhead") != "studio":
            return JSONResponse({"error": "questions come from the studio's own page"}, 403)
        return None

    def swap_token(self, request: Request, given: str) -> Response:
        if not hmac.compare_digest(given.encode(), self.token.encode()):
            return PlainTextResponse("the token is wrong: open the address that `clearhead studio` printed", 403)
        lang = request.query_params.get("lang")
        answer = RedirectResponse(f"/?lang={lang}" if lang in ("en", "zh") else "/", 303)
        answer.set_cookie(self.cookie, self.token, httponly=True, samesite="strict", path="/")
        return answer
