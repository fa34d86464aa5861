"""Start and stop the server: models, HTTP application, uvicorn, and an orderly end on SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Unpack

import uvicorn
from starlette.applications import Starlette

from clearhead.generate.engine import EngineSettings
from clearhead.generate.speculate import Draft
from clearhead.models.model import Model

from .app import Guards, build_app, local_hosts
from .metrics import Metrics
from .openai import Server
from .served_model import serve_model

READY = """\
{names} on {url}

    curl {url}/v1/completions{header} -H 'Content-Type: application/json' \\
      -d '{{"model": "{model}", "prompt": "Once upon a time", "max_tokens": 32}}'

    from openai import OpenAI
    client = OpenAI(base_url="{url}/v1", api_key="{key}")
    client.completions.create(model="{model}", prompt="Once upon a time", max_tokens=32)

Chat page: {url}/   Stop with Ctrl-C."""


SWITCH_SECONDS = 2e-4  # the engine must not wait 5 ms for the interpreter while answers are sent


@dataclass(frozen=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    origins: tuple[str, ...] = ()
    grace: float = 30.0  # seconds to finish running requests before the server exits
    log_prompts: bool = False


def build_server(
    models: Mapping[str, Model],
    *,
    timeout: float | None = None,
    draft: Draft | None = None,
    **options: Unpack[EngineSettings],
) -> Server:
    """A server with an engine for each model; `options` are those of `Engine`. The engines take turns."""
    lock = threading.Lock()
    served = {name: serve_model(name, model, draft=draft, lock=lock, **options) for name, model in models.items()}
    return Server(served, Metrics(), timeout)


def application(server: Server, options: ServeOptions, port: int) -> Starlette:
    """The HTTP application of a server. It drains its engines when it shuts down."""

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        server.draining = True
        for one in server.models.values():
            if one.engine is not None:
                await asyncio.to_thread(one.engine.stop)

    hosts = local_hosts(port) if options.key is None else frozenset[str]()
    guards = Guards(hosts=hosts, origins=options.origins, key=options.key)
    return build_app(server.routes(), guards, lifespan=lifespan)


class DrainingServer(uvicorn.Server):
    """On the first signal, refuse new requests with 503 and let those that run finish."""

    def __init__(self, config: uvicorn.Config, server: Server) -> None:
        super().__init__(config)
        self.clearhead = server

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.clearhead.draining = True
        for one in self.clearhead.models.values():
            if one.engine is not None:
                one.engine.stopping = True
        super().handle_exit(sig, frame)
        self._captured_signals.clear()  # an orderly end exits with 0


def bind(host: str, port: int) -> socket.socket:
    """A socket on this address, before any model is loaded: a port in use is an error at once."""
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror}; try --port 0") from None
    return bound


def listen(server: Server, options: ServeOptions, bound: socket.socket, say: Callable[[str], object]) -> None:
    """Serve until a signal comes."""
    port = bound.getsockname()[1]
    shown = f"[{options.host}]" if ":" in options.host else options.host
    names = list(server.models)
    header = "" if options.key is None else " -H 'Authorization: Bearer KEY'"
    key = "none" if options.key is None else "KEY"
    say(READY.format(names=", ".join(names), url=f"http://{shown}:{port}", model=names[0], header=header, key=key))
    server.log_prompts = options.log_prompts
    logging.basicConfig(format="clearhead: %(message)s", level=logging.WARNING)
    logging.getLogger("clearhead.serve").setLevel(logging.INFO)
    config = uvicorn.Config(
        application(server, options, port),
        log_level="critical",
        access_log=False,
        timeout_graceful_shutdown=max(1, int(options.grace)),
        lifespan="on",
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    DrainingServer(config, server).run(sockets=[bound])
