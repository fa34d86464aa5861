"""`clearhead studio`: look inside models in the browser."""

from __future__ import annotations

from pathlib import Path

import click

from clearhead.extras import install_command

from .options import device_option, requested_device


@click.command("studio")
@click.argument("models", nargs=-1, metavar="[MODEL …]")
@click.option("--text", default="", help="The text to start with.")
@click.option(
    "--runs", type=click.Path(file_okay=False, path_type=Path), help="A folder of runs to follow and train in."
)
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="Port on 127.0.0.1.  [default: a free one]")
@device_option
@click.option("--no-browser", is_flag=True, help="Print the address only.")
@click.option("--lang", type=click.Choice(["en", "zh"]), default=None, help="Language.  [default: the browser's]")
def command(
    models: tuple[str, ...], text: str, runs: Path | None, port: int, no_browser: bool, lang: str | None
) -> None:
    """Open the studio: nine views of a model on your own text, in the browser, on this machine only.

    MODEL is a checkpoint folder, a GGUF file or a preset. Without one, the studio opens a small model that comes with
    the package. Press Ctrl-C to stop.

    \b
    clearhead studio
    clearhead studio runs/mine --text "To be or not to be"
    clearhead studio runs/a runs/b --runs runs --lang zh
    """
    try:
        import uvicorn

        from clearhead.studio import jobs
        from clearhead.studio.app import find_models, make_app, open_socket
    except ImportError:
        raise ValueError(f"the studio needs starlette and uvicorn: {install_command('serve')}") from None
    from clearhead.inspect.questions import Session

    from .lab import describe_experiments

    session = Session(
        find_models(models, runs),
        text,
        runs,
        trains=True,
        experiments=describe_experiments(),
        device=requested_device(),
    )
    sock = open_socket(port)
    number = sock.getsockname()[1]
    app, token = make_app(session, number, lang or "")
    address = f"http://127.0.0.1:{number}/?token={token}"
    click.echo(address)
    if not no_browser:
        import webbrowser

        webbrowser.open(address)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False))
    try:
        server.run(sockets=[sock])
    finally:
        jobs.stop_all()
