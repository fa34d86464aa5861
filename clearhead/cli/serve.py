"""`clearhead serve`: an HTTP server with the OpenAI API."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from clearhead.extras import install_command
from clearhead.memory import memory_budget

from .options import cache_option, device_option, load_writer, weights_option

if TYPE_CHECKING:
    from clearhead.configs import Cache
    from clearhead.models.model import Model

LOOPBACK = ("127.0.0.1", "localhost", "::1")


@click.command("serve")
@click.argument("models", nargs=-1, required=True, metavar="MODEL...")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="Port; 0: any free one.")
@click.option(
    "--api-key-file", type=click.Path(), default=None, help="File with the API key.  [default: $CLEARHEAD_API_KEY]"
)
@click.option("--origin", "origins", multiple=True, metavar="URL", help="Web page that may call the API (CORS).")
@click.option("--rows", type=click.IntRange(min=1), default=8, show_default=True, help="Texts written at once.")
@click.option("--context", type=click.IntRange(min=2), default=None, help="Tokens per text.  [default: the model's]")
@click.option("--queue", type=click.IntRange(min=1), default=64, show_default=True, help="Requests that may wait.")
@click.option(
    "--memory",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    metavar="GB",
    help="Memory for the KV cache and the prefix cache of each model.  [default: a quarter of this machine's, shared]",
)
@click.option("--no-prefix-cache", is_flag=True, help="Read every prompt from its first token.")
@click.option(
    "--draft",
    default=None,
    metavar="MODEL",
    help="A smaller model with the same tokenizer that proposes tokens (speculative decoding). Same answers, faster.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(1, 16),
    default=4,
    show_default=True,
    help="How many tokens the draft proposes at a time.",
)
@click.option("--timeout", type=float, default=None, help="Seconds after which a request fails.  [default: none]")
@click.option("--grace", type=float, default=30.0, show_default=True, help="Seconds to finish requests on SIGTERM.")
@click.option("--log-prompts", is_flag=True, help="Log the bodies of requests. By default nothing of them is logged.")
@device_option
@weights_option
@cache_option
def command(
    models: tuple[str, ...],
    host: str,
    port: int,
    api_key_file: str | None,
    origins: tuple[str, ...],
    rows: int,
    context: int | None,
    queue: int,
    memory: float | None,
    no_prefix_cache: bool,
    draft: str | None,
    draft_tokens: int,
    timeout: float | None,
    grace: float,
    log_prompts: bool,
    weights: str | None,
    cache: Cache | None,
) -> None:
    """Serve models over HTTP with the OpenAI API.

    MODEL is a checkpoint folder, a run or a GGUF file; NAME=PATH gives it another name. The server answers
    /v1/completions, /v1/chat/completions, /v1/embeddings and /v1/models, and has a chat page at /. The same request
    gives the same answer under any load.

    \b
    clearhead serve runs/mine
    clearhead serve small=runs/mine big=path/to/llama --port 9000 --rows 16
    clearhead serve path/to/model --host 0.0.0.0 --api-key-file key.txt
    clearhead serve path/to/model --weights int8 --draft path/to/small-model
    """
    try:
        import uvicorn

        from clearhead.generate.speculate import Draft
        from clearhead.serve.run import ServeOptions, bind, build_server, listen
    except ModuleNotFoundError as error:
        raise click.UsageError(f"serving needs {error.name}: {install_command('serve')}") from None
    assert uvicorn
    key = read_key(api_key_file)
    if host not in LOOPBACK and key is None:
        raise click.UsageError(f"--host {host} opens the server to other machines; protect it with --api-key-file FILE")
    bound = bind(host, port)
    loaded = {}
    for given in models:
        name, path = split_name(given)
        if name in loaded:
            raise click.UsageError(f"two models are named {name}; write NAME=PATH to tell them apart")
        loaded[name] = load_served(path, weights, cache)
    if draft is not None and len(models) > 1:
        raise click.UsageError("--draft works with one MODEL; start a second server for the others")
    options: dict[str, Any] = {
        "rows": rows,
        "length": context,
        "queue": queue,
        "memory": share_of_memory(len(loaded)) if memory is None else int(memory * 1e9),
        "prefix_cache": not no_prefix_cache,
        "draft": None if draft is None else Draft(load_served(draft, weights, None), draft_tokens),
    }
    server = build_server(loaded, timeout=timeout, **options)
    settings = ServeOptions(host, port, key, origins, grace, log_prompts)
    listen(server, settings, bound, lambda text: click.echo(text, err=True))


def load_served(path: str, weights: str | None, cache: Cache | None) -> Model:
    """Load a model with its matrices in the form that the kernels read: their results do not depend on the batch."""
    return load_writer(path, weights or (None if path.endswith(".gguf") else "float32"), cache)


def share_of_memory(models: int) -> int | None:
    """A quarter of this machine's memory, divided among the models; None if unknown."""
    budget = memory_budget()
    return None if budget is None else budget // 4 // models


def split_name(given: str) -> tuple[str, str]:
    """The public name and the path of a model."""
    name, equals, path = given.partition("=")
    return (name, path) if equals and name and not Path(given).exists() else (Path(given).name or given, given)


def read_key(file: str | None) -> str | None:
    """The API key from a file or the environment."""
    if file is None:
        return os.environ.get("CLEARHEAD_API_KEY") or None
    try:
        key = Path(file).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise click.UsageError(f"--api-key-file {file}: {error.strerror}") from None
    if not key:
        raise click.UsageError(f"--api-key-file {file} is empty")
    return key
