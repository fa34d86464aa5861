"""`clearhead transcribe`: speech to text."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import click

from .options import device_option, echo_text, json_option, load_model, print_json, weights_option


@click.command("transcribe")
@click.argument("model")
@click.argument("files", nargs=-1, required=True)
@click.option("--language", default=None, metavar="CODE", help="Language of the speech, such as en.  [default: heard]")
@click.option(
    "--task",
    type=click.Choice(["transcribe", "translate"]),
    default="transcribe",
    show_default=True,
    help="Write the spoken words, or translate them to English.",
)
@click.option("--timestamps", is_flag=True, help="Print each segment with its start and end.")
@device_option
@weights_option
@json_option
def command(
    model: str,
    files: tuple[str, ...],
    language: str | None,
    task: Any,
    timestamps: bool,
    weights: str | None,
    as_json: bool,
) -> None:
    """Print the speech in each of FILES as text, with a Whisper model.

    WAV files need no other package. FLAC, OGG and MP3 need soundfile: pip install 'clearhead[audio]'. Any sampling rate
    and any number of channels will do.

    \b
    clearhead transcribe path/to/whisper speech.wav
    clearhead transcribe path/to/whisper speech.flac --timestamps --language de
    clearhead transcribe path/to/whisper *.wav --json
    """
    loaded = load_model(model, weights)
    from clearhead.tasks.transcribe import Segment, transcribe

    def show(segment: Segment) -> None:
        echo_text(f"[{clock(segment.start)} → {clock(segment.end)}]  {segment.text}")

    def skip(segment: Segment) -> None:
        """The text is printed when all of it is ready."""

    found = []
    for file in files:
        if len(files) > 1 and not as_json:
            click.echo(f"{file}:")
        progress = show if timestamps and not as_json else skip
        result = transcribe(loaded, file, language=language, task=task, timestamps=timestamps, progress=progress)
        found.append({"file": file, **asdict(result)})
        if not timestamps and not as_json:
            echo_text(result.text)
    if as_json:
        print_json({"model": model, "files": found})


def clock(seconds: float) -> str:
    """1:02:03.40, or 02:03.40 within the first hour."""
    minutes, rest = divmod(seconds, 60)
    hours, minutes = divmod(int(minutes), 60)
    return (f"{hours}:" if hours else "") + f"{minutes:02d}:{rest:05.2f}"
