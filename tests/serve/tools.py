"""Small models with tokenizers, and a real server in a thread."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import uvicorn

import clearhead
from clearhead.configs import precision
from clearhead.models.quantize import quantize
from clearhead.serve.openai import Server
from clearhead.serve.run import ServeOptions, application, build_server

from ..parity.test_chat import CHATML, make_tokenizer

CHATML_TOOLS = "{% if tools %}{{ tools | tojson }}\n{% endif %}" + CHATML


def small_model(preset: str = "tiny-llama", weights: str | None = "float32", seed: int = 0, noise: float = 0.3):
    """A model with random weights, whose greedy text depends on the prompt."""
    torch.manual_seed(seed)
    tokenizer, config = make_tokenizer(), clearhead.preset(preset)
    for part in ("embedding", "head"):
        config = config.with_value(f"{part}.vocabulary", tokenizer.vocabulary)
    model = clearhead.build(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(noise * torch.randn_like(parameter))
    return model if weights is None else quantize(model, precision(weights))


def chat_folder(path: Path) -> Path:
    """A saved chat model: tokenizer, template with tools, end token."""
    small_model(weights=None).save(path, tokenizer=make_tokenizer())
    (path / "chat_template.jinja").write_text(CHATML_TOOLS)
    return path


@dataclass
class Running:
    url: str
    server: Server


@contextlib.contextmanager
def running(models: dict, *, key: str | None = None, timeout: float | None = None, **options) -> Iterator[Running]:
    """A server on a free port, in a thread of this process."""
    server = build_server(models, timeout=timeout, **options)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    port = bound.getsockname()[1]
    app = application(server, ServeOptions(port=port, key=key), port)
    runner = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="on"))
    thread = threading.Thread(target=lambda: runner.run(sockets=[bound]), daemon=True)
    thread.start()
    while not runner.started:
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{port}", server)
    finally:
        runner.should_exit = True
        thread.join(timeout=30)
        bound.close()
