"""The studio's web application: files of the page, and questions."""

from __future__ import annotations

import json
import socket
from pathlib import Path

from anyio import to_thread
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Mount, Route, Router

from clearhead.inspect.bundle import WEB
from clearhead.inspect.questions import ModelSource, QuestionError, Session, encode
from clearhead.serve.app import Guards, build_app

from . import design, instruments, jobs, runs  # noqa: F401  each registers its questions
from .guard import BODY_BYTES, TokenGuard

PAGE = """<!doctype html>
<html lang="en" data-lang="{lang}">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Clearhead studio</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="/web/studio.css">
{preload}
<script type="module" src="/web/served.js"></script>
</head>
<body><div id="root"></div></body>
</html>
"""
SMALL_MODEL = Path(__file__).with_name("model")
TYPES = {".js": "text/javascript", ".css": "text/css"}
FILES = {path.relative_to(WEB).as_posix(): path for path in sorted(WEB.rglob("*")) if path.suffix in TYPES}
"""Only these files can be asked for: a fixed table, so that no path leads out of the folder."""

ONE_FILE = {"page.js", "widget.js"}  # modules of the other shells
PRELOAD = "\n".join(
    f'<link rel="modulepreload" href="/web/{name}">' for name in FILES if name.endswith(".js") and name not in ONE_FILE
)
"""All modules are asked for at once, not one level of imports after the other."""


def make_app(session: Session, port: int, lang: str = "") -> tuple[Starlette, str]:
    """The guarded application, and the token that opens it."""

    def page(request: Request) -> Response:
        return HTMLResponse(PAGE.format(lang=lang, preload=PRELOAD))

    def web_file(request: Request) -> Response:
        path = FILES.get(request.path_params["path"])
        if path is None:
            return Response("not found", 404)
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])

    async def ask(request: Request) -> Response:
        body = await request.body()
        try:
            arguments = json.loads(body or b"{}")
            if not isinstance(arguments, dict):
                raise QuestionError("the arguments of a question are an object")
            answer = await to_thread.run_sync(session.ask, request.path_params["question"], arguments)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            return JSONResponse({"error": str(error) or type(error).__name__}, 400)
        return Response(json.dumps(encode(answer), allow_nan=False), media_type="application/json")

    routes = [
        Route("/", page),
        Route("/web/{path:path}", web_file),
        Route("/ask/{question}", ask, methods=["POST"]),
    ]
    guarded = TokenGuard(Router(routes), port)
    guards = Guards(hosts=frozenset({f"127.0.0.1:{port}", f"localhost:{port}"}), body=BODY_BYTES)
    return build_app([Mount("/", app=guarded)], guards), guarded.token


def open_socket(port: int) -> socket.socket:
    """A socket on the loopback address only; port 0 takes a free one."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind(("127.0.0.1", port))
    except OSError as error:
        raise ValueError(f"port {port} cannot be used: {error.strerror}; choose another with --port") from None
    return sock


def find_models(names: tuple[str, ...], folder: Path | None) -> dict[str, Path | str | ModelSource]:
    """Models by the name that the page shows: folders, files, presets, and runs with the steps they have kept."""
    from clearhead.models.presets import PRESETS

    found: dict[str, Path | str | ModelSource] = {}
    for name in names:
        path = Path(name)
        if name in PRESETS:
            found[name] = name
        elif path.exists():
            found[path.resolve().name if path.resolve().name not in found else str(path)] = path.resolve()
        else:
            raise ValueError(
                f"there is no model {name!r}: give a folder, a GGUF file or a preset (`clearhead presets`)"
            )
    if folder is not None and folder.is_dir():
        for run in sorted(folder.iterdir()):
            for name, source in runs.run_sources(run).items() if run.is_dir() else ():
                found.setdefault(name, source)
    return found or {"small": SMALL_MODEL}
